"""What was promised and has not happened yet: reservations and expectations. Pure.

A reservation holds a worker's time and its sources' bytes from the decision until the worker
reports the request itself (`settle`). An expectation says that a prompt's chunks will be in a
node's pool, and gives credit to later requests on that node only: nobody can pull what is not
there. Both end after `hold_s` at the latest; by then the pool's own event has come. Times are
handed in and must not go back. Threading: one thread at a time.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from ..fabric.errors import Conservation
from ..fabric.events import chunks_removed, chunks_stored
from ..fabric.types import Medium
from .index import PrefixIndex
from .plan import CandidateCost, Origin, Prompt

EXPECTED_BYTES_MAX = 256 << 20
"""A million chunks expected at once; beyond it requests are decided without that knowledge."""


@dataclass(frozen=True, slots=True)
class BookLimits:
    """How long and how many promises are kept."""

    hold_s: float = 30.0
    """The longest prefill worth waiting for; a lost report or a dead worker costs no more."""
    reservations_max: int = 65_536


@dataclass(slots=True)
class _Promise:
    number: int
    worker: str
    node: str
    busy_s: float
    pulls: dict[str, int]
    until_s: float
    prompt: Prompt
    reserved: bool = True


class Book:
    """All promises of one decider."""

    def __init__(self, limits: BookLimits) -> None:
        self._limits = limits
        self._promises: OrderedDict[int, _Promise] = OrderedDict()
        self._next = 1
        self._reserved_s: dict[str, float] = {}
        self._sending_bytes: dict[str, int] = {}
        self._expected = PrefixIndex(EXPECTED_BYTES_MAX)

    @property
    def reserved_s(self) -> Mapping[str, float]:
        """By worker, busy time reserved."""
        return self._reserved_s

    @property
    def sending_bytes(self) -> Mapping[str, int]:
        """By source, bytes reserved."""
        return self._sending_bytes

    def __len__(self) -> int:
        return len(self._promises)

    def expected_chunks(self, prompt: Prompt) -> dict[str, int]:
        """Return by node how many chunks of the head are on their way into its pool."""
        return {
            one.source: one.prefix
            for one in self._expected.longest_prefix(prompt.hashes, prompt.groups)
        }

    def promise(self, cost: CandidateCost, prompt: Prompt, now_s: float) -> int:
        """Reserve and expect what a decision will do. Returns the number of the promise."""
        self.expire(now_s)
        if len(self._promises) >= self._limits.reservations_max:
            self._end(self._oldest())
        pulls: dict[str, int] = {}
        for one in cost.ranges:
            if one.origin is Origin.PEER:
                pulls[one.source] = pulls.get(one.source, 0) + one.count * prompt.chunk_bytes
        number, self._next = self._next, self._next + 1
        promise = _Promise(
            number,
            cost.worker,
            cost.node,
            cost.busy_s,
            pulls,
            now_s + self._limits.hold_s,
            prompt,
        )
        self._promises[number] = promise
        self._reserved_s[cost.worker] = self._reserved_s.get(cost.worker, 0.0) + cost.busy_s
        for source, size in pulls.items():
            self._sending_bytes[source] = self._sending_bytes.get(source, 0) + size
        hashes = [int(value) for value in prompt.hashes]
        for group in prompt.groups:
            event = chunks_stored(hashes, group, Medium.CPU, prompt.chunk_tokens)
            self._expected.apply(cost.node, [event])
        self._expected.set_trust(cost.node, trusted=True)
        return number

    def settle(self, number: int) -> None:
        """The worker reports this request by itself now. Unknown numbers have expired."""
        promise = self._promises.get(number)
        if promise is not None:
            self._unreserve(promise)

    def cancel(self, number: int) -> None:
        """It will not happen: nothing is reserved or expected any more."""
        promise = self._promises.get(number)
        if promise is not None:
            self._end(promise)

    def expire(self, now_s: float) -> None:
        """End what is past its time."""
        while self._promises and now_s >= self._oldest().until_s:
            self._end(self._oldest())

    def check(self) -> None:
        """Raise `Conservation` unless the sums are those of the promises."""
        open_ones = [one for one in self._promises.values() if one.reserved]
        busy = sum(one.busy_s for one in open_ones)
        sent = sum(sum(one.pulls.values()) for one in open_ones)
        if abs(busy - sum(self._reserved_s.values())) > 1e-6 * (1 + busy):
            raise Conservation("reservations", f"{busy} s, {self._reserved_s}")
        if sent != sum(self._sending_bytes.values()):
            raise Conservation("reservations", f"{sent} bytes, {self._sending_bytes}")
        self._expected.check()

    def _oldest(self) -> _Promise:
        return next(iter(self._promises.values()))

    def _end(self, promise: _Promise) -> None:
        self._unreserve(promise)
        self._unexpect(promise)
        del self._promises[promise.number]

    def _unreserve(self, promise: _Promise) -> None:
        if not promise.reserved:
            return
        promise.reserved = False
        left = self._reserved_s.pop(promise.worker, 0.0) - promise.busy_s
        if left > 1e-9:
            self._reserved_s[promise.worker] = left
        for source, size in promise.pulls.items():
            self._sending_bytes[source] -= size
            if not self._sending_bytes[source]:
                del self._sending_bytes[source]

    def _unexpect(self, promise: _Promise) -> None:
        hashes = [int(value) for value in promise.prompt.hashes]
        for group in promise.prompt.groups:
            self._expected.apply(promise.node, [chunks_removed(hashes, group, Medium.CPU)])
