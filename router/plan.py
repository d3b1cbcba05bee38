"""Where a request runs and what it does with its prefix: values, and the arithmetic. Pure.

The cost of a candidate is its queue plus, range by range of the prompt's chunks, the cheapest of:
have it in the GPU, load it from the node's host region, fetch it from a tier of the node, pull it
from a peer, recompute it. What is on a GPU helps the engine that has it and no other. Reuse is a
prefix: behind the first recomputed chunk all are recomputed, so the planner tries every end of a
range as the place to cut. Pulls from several sources run side by side and cost what the slowest
takes, behind what it is already sending; a long range is dealt out in pieces to whichever source
would be done first. Nothing is pulled from the node itself, from a source without credit, or where
recomputing is faster.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from ..fabric.types import Medium, SourceRange
from .index import Span
from .policy import Calibration, RateKind

PIECE_CHUNKS_MIN = 16
"""Fewer chunks than this are not worth a message to another source."""
PIECES_MAX = 32
"""Pieces of one range: bounds the work of a decision whatever the prompt's length."""


class Origin(IntEnum):
    """How a range of chunks gets to the GPU, from cheap to dear."""

    GPU = 0
    HOST = 1
    TIER = 2
    PEER = 3
    COMPUTE = 4


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request, as far as the router must know it."""

    hashes: Sequence[int] | npt.NDArray[np.uint64]
    """Low 64 bits of the digest of each full chunk, from the head."""
    tokens: int
    """All tokens, those behind the last full chunk too."""
    chunk_tokens: int
    chunk_bytes: int
    """Of one chunk, summed over `groups`."""
    groups: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that could run the request."""

    worker: str
    node: str
    """Whose pool it is attached to; also the name of that pool's event stream."""
    queued_tokens: int = 0
    """Prompt tokens that wait before it, as it reports them; not those reserved with us."""
    gpu_source: str = ""
    """The stream that says what its own engine's GPU holds: the engine's own, or its pool's where
    the pool has no other engine. Empty: what is on GPUs counts for nothing."""


@dataclass(frozen=True, slots=True)
class PlannedRange:
    """A run of chunks of one origin. `source` is the peer's node for PEER, else empty."""

    origin: Origin
    start: int
    count: int
    source: str
    seconds: float


@dataclass(frozen=True, slots=True)
class CandidateCost:
    """What a request would cost on a worker, and why."""

    worker: str
    node: str
    queue_s: float
    ranges: tuple[PlannedRange, ...]
    pull_s: float
    """Of all pulls together, until the slowest source is done."""
    total_s: float

    @property
    def reused_chunks(self) -> int:
        """Chunks that are not recomputed."""
        return sum(one.count for one in self.ranges if one.origin is not Origin.COMPUTE)

    @property
    def busy_s(self) -> float:
        """How long it occupies the worker: all but queue and pulls."""
        return self.total_s - self.queue_s - self.pull_s


@dataclass(frozen=True, slots=True)
class Plan:
    """A decision: where to run, what comes from where, what it should take, and the others."""

    worker: str
    node: str
    ranges: tuple[PlannedRange, ...]
    sources: tuple[SourceRange, ...]
    """What to hand to the pool of `node`: the pulls among `ranges`, with addresses."""
    expected_s: float
    explanation: tuple[CandidateCost, ...]
    """Every candidate's cost, the cheapest first."""
    reservation: int
    """Names what was reserved for it; see `Decider.settle`."""

    def chunks(self, origin: Origin) -> int:
        """Return how many chunks come from an origin."""
        return sum(one.count for one in self.ranges if one.origin is origin)


@dataclass(frozen=True, slots=True)
class Load:
    """What is going on already: the other half of every cost."""

    reserved_s: Mapping[str, float]
    """By worker, busy time promised to requests that it has not reported yet."""
    sending_bytes: Mapping[str, int]
    """By source, bytes that it was asked for and that are not there yet."""
    pools: Mapping[str, str]
    """By node, the address of its pool. Only these can be pulled from."""


@dataclass(slots=True)
class _Draft:
    """A plan in the making: what was chosen so far, and what that adds up to."""

    ranges: list[PlannedRange] = field(default_factory=list[PlannedRange])
    local_s: float = 0.0
    pulled_bytes: dict[str, int] = field(default_factory=dict[str, int])
    pull_s: float = 0.0


class Costing:
    """Costs one prompt against the present state; made for one decision."""

    def __init__(
        self, prompt: Prompt, spans: Sequence[Span], rates: Calibration, load: Load
    ) -> None:
        self._prompt = prompt
        self._spans = spans
        self._rates = rates
        self._load = load

    def of(self, candidate: Candidate, expected_chunks: int = 0) -> CandidateCost:
        """Return the cheapest way for a candidate.

        `expected_chunks` of the head are on their way into its node's pool by earlier decisions.
        """
        prefill = self._rates.rate(RateKind.PREFILL, candidate.worker)
        queue_s = candidate.queued_tokens / prefill
        queue_s += self._load.reserved_s.get(candidate.worker, 0.0)
        draft = _Draft()
        best_s, best_cut, best_pull_s = self._compute_s(0, prefill), 0, 0.0
        for span in self._split(expected_chunks):
            self._reuse(draft, candidate, span, expected=span.start < expected_chunks)
            end = span.start + span.count
            if not draft.ranges or draft.ranges[-1].start + draft.ranges[-1].count != end:
                break
            total_s = draft.local_s + draft.pull_s + self._compute_s(end, prefill)
            if total_s < best_s:
                best_s, best_cut, best_pull_s = total_s, end, draft.pull_s
        ranges = [one for one in draft.ranges if one.start < best_cut]
        rest = len(self._prompt.hashes) - best_cut
        ranges.append(
            PlannedRange(Origin.COMPUTE, best_cut, rest, "", self._compute_s(best_cut, prefill))
        )
        return CandidateCost(
            candidate.worker,
            candidate.node,
            queue_s,
            tuple(ranges),
            best_pull_s,
            queue_s + best_s,
        )

    def _compute_s(self, reused_chunks: int, prefill: float) -> float:
        """Seconds to compute what is behind the reused chunks; the last token always is."""
        tokens = self._prompt.tokens - reused_chunks * self._prompt.chunk_tokens
        return max(tokens, 1) / prefill

    def _split(self, expected_chunks: int) -> list[Span]:
        """Return the spans, cut where the expected chunks end, and those that only are expected."""
        spans: list[Span] = []
        end = 0
        for span in self._spans:
            end = span.start + span.count
            if span.start < expected_chunks < end:
                head = expected_chunks - span.start
                spans.append(replace(span, count=head))
                spans.append(replace(span, start=expected_chunks, count=span.count - head))
            else:
                spans.append(span)
        if expected_chunks > end:
            spans.append(Span(end, expected_chunks - end, {}))
        return spans

    def _reuse(self, draft: _Draft, candidate: Candidate, span: Span, *, expected: bool) -> None:
        """Add the cheapest reuse of a span to a draft; nothing if nobody can give it."""
        size = span.count * self._prompt.chunk_bytes
        load_s = size / self._rates.rate(RateKind.LOAD, candidate.node)
        if span.holders.get(candidate.gpu_source) is Medium.GPU:
            draft.ranges.append(PlannedRange(Origin.GPU, span.start, span.count, "", 0.0))
            return
        local = span.in_pool(candidate.node)
        if expected or local is Medium.CPU:
            draft.ranges.append(PlannedRange(Origin.HOST, span.start, span.count, "", load_s))
            draft.local_s += load_s
            return
        pulled = self._deal(draft, candidate, span)
        tier_s = size / self._rates.rate(RateKind.TIER, candidate.node)
        if local is Medium.STORAGE and not (pulled and pulled.pull_s - draft.pull_s < tier_s):
            seconds = tier_s + load_s
            draft.ranges.append(PlannedRange(Origin.TIER, span.start, span.count, "", seconds))
            draft.local_s += seconds
        elif pulled:
            draft.ranges += pulled.ranges
            draft.pulled_bytes = pulled.pulled_bytes
            draft.pull_s = pulled.pull_s
            draft.local_s += load_s

    def _deal(self, draft: _Draft, candidate: Candidate, span: Span) -> _Draft | None:
        """Deal a span out to the peers that hold it. None where none does."""
        peers = [
            source
            for source in span.holders
            if span.in_pool(source) is Medium.CPU
            and source != candidate.node
            and source in self._load.pools
        ]
        if not peers:
            return None
        peers.sort()
        dealt = _Draft(pulled_bytes=dict(draft.pulled_bytes))
        piece = max(PIECE_CHUNKS_MIN, -(-span.count // PIECES_MAX))
        finish = {source: self._finish_s(dealt, source, 0) for source in peers}
        for start in range(span.start, span.start + span.count, piece):
            count = min(piece, span.start + span.count - start)
            size = count * self._prompt.chunk_bytes
            each = {source: self._finish_s(dealt, source, size) for source in peers}
            source = min(peers, key=lambda name: (each[name], name))
            dealt.pulled_bytes[source] = dealt.pulled_bytes.get(source, 0) + size
            seconds = each[source] - finish[source]
            finish[source] = each[source]
            last = dealt.ranges[-1] if dealt.ranges else None
            if last is not None and last.source == source:
                dealt.ranges[-1] = PlannedRange(
                    Origin.PEER, last.start, last.count + count, source, last.seconds + seconds
                )
            else:
                dealt.ranges.append(PlannedRange(Origin.PEER, start, count, source, seconds))
        slowest = max(self._finish_s(dealt, source, 0) for source in dealt.pulled_bytes)
        dealt.pull_s = self._rates.pull_setup_s + slowest
        return dealt

    def _finish_s(self, draft: _Draft, source: str, more_bytes: int) -> float:
        """When a source would be done with what it sends, what is planned, and this."""
        sending = self._load.sending_bytes.get(source, 0)
        total = sending + draft.pulled_bytes.get(source, 0) + more_bytes
        return total / self._rates.rate(RateKind.PULL, source)


def source_ranges(
    ranges: Sequence[PlannedRange], pools: Mapping[str, str]
) -> tuple[SourceRange, ...]:
    """Return the pulls among planned ranges, with addresses."""
    return tuple(
        SourceRange(one.source, pools[one.source], one.start, one.count)
        for one in ranges
        if one.origin is Origin.PEER
    )
