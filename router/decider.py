"""The two questions, answered in process: where to run, and from whom to pull. Pure.

A decider reads an index that somebody else feeds and keeps its own book of promises and its own
calibration. A decision is atomic: it reads, chooses and reserves in one call, so that of many equal
prompts each sees what the one before it took. It never waits and never sends. Threading: one thread
at a time. Failure: `Unavailable` if there is no candidate; nothing is reserved then.
"""

from collections.abc import Sequence

from ..fabric.errors import Unavailable
from ..fabric.types import SourceRange
from .book import Book, BookLimits
from .index import PrefixIndex
from .plan import Candidate, CandidateCost, Costing, Load, Plan, Prompt, source_ranges
from .policy import Calibration


class Decider:
    """Decides over an index."""

    def __init__(
        self, index: PrefixIndex, calibration: Calibration, limits: BookLimits | None = None
    ) -> None:
        self.index = index
        self.calibration = calibration
        self.book = Book(limits or BookLimits())
        self._pools: dict[str, str] = {}

    @property
    def pools(self) -> dict[str, str]:
        """By node, the address at which its pool serves peers (a copy)."""
        return dict(self._pools)

    def set_pool(self, node: str, endpoint: str) -> None:
        """Make a pool known as one that can be pulled from; empty `endpoint` forgets it."""
        if endpoint:
            self._pools[node] = endpoint
        else:
            self._pools.pop(node, None)

    def costs(
        self, prompt: Prompt, candidates: Sequence[Candidate], now_s: float
    ) -> tuple[CandidateCost, ...]:
        """Return every candidate's cost, the cheapest first. Reserves nothing."""
        self.book.expire(now_s)
        costing = self._costing(prompt)
        expected = self.book.expected_chunks(prompt)
        costs = [costing.of(one, expected.get(one.node, 0)) for one in candidates]
        return tuple(sorted(costs, key=lambda cost: (cost.total_s, cost.queue_s, cost.worker)))

    def decide(self, prompt: Prompt, candidates: Sequence[Candidate], now_s: float) -> Plan:
        """Choose the cheapest candidate and reserve for it. Raises `Unavailable` without any."""
        costs = self.costs(prompt, candidates, now_s)
        if not costs:
            raise Unavailable("any worker", 0.0, "Start workers, or wait until they are healthy.")
        best = costs[0]
        return Plan(
            best.worker,
            best.node,
            best.ranges,
            source_ranges(best.ranges, self._pools),
            best.total_s,
            costs,
            self.book.promise(best, prompt, now_s),
        )

    def plan_pull(self, node: str, prompt: Prompt) -> tuple[SourceRange, ...]:
        """Return from whom a node should pull, where the place to run is chosen already.

        Ranges that it has, that nobody has, or that are recomputed faster are left out.
        """
        cost = self._costing(prompt).of(Candidate(worker="", node=node))
        return source_ranges(cost.ranges, self._pools)

    def settle(self, reservation: int) -> None:
        """The worker now reports this request itself: end its reservation."""
        self.book.settle(reservation)

    def cancel(self, reservation: int) -> None:
        """The request will not run there: end its reservation and what it promised."""
        self.book.cancel(reservation)

    def _costing(self, prompt: Prompt) -> Costing:
        load = Load(self.book.reserved_s, self.book.sending_bytes, self._pools)
        spans = self.index.spans(prompt.hashes, prompt.groups)
        return Costing(prompt, spans, self.calibration, load)
