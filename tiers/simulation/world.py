"""A world of virtual time: one heap of events, one seed, one trace.

Ownership. The world owns time, the order of events and the seed. Everything random in it draws
from a stream of `fork(name)`, so that a part which draws once more does not shift the others.

Lifecycle. `at` plans, `run` lives. Time moves only from one event to the next, and no event waits:
`sleep_s` is an error. Events of the same instant run in the order in which they were planned.

Failure. An exception that leaves an event, an invariant or the `with` block of the world carries a
note with the seed, the step, the time and the last lines of the trace. The same seed does the same
again, in another process too, as long as the code under test iterates over no set of strings or
bytes (their order differs from process to process; the digest of the trace shows it).

Threading. One thread. Nothing here reads a real clock or makes a thread or socket.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from heapq import heappop, heappush
from random import Random
from types import TracebackType
from typing import Protocol, Self

from ...fabric.errors import Unsupported
from .trace import Trace

SEED_VARIABLE = "KVFABRIC_SEED"
UNIX_START_S = 1_700_000_000.0
"""Where the wall clock of every world begins: a plausible date, and always the same."""


class Stop(IntEnum):
    """Why `World.run` came back."""

    IDLE = 0
    """Nothing is planned any more."""
    TIME = 1
    """The time asked for is over; events remain."""
    STEPS = 2
    """The bound on steps was reached before the time was."""


class Timer:
    """One planned event. Cancelling one that has run does nothing."""

    __slots__ = ("fn", "label", "pending")

    def __init__(self, fn: Callable[[], None] | None, label: str) -> None:
        self.fn = fn
        self.label = label
        self.pending = True
        """Neither run nor cancelled yet."""

    def cancel(self) -> None:
        """Take the event back."""
        self.fn = None
        self.pending = False


class Scheduler(Protocol):
    """What plans events: the world, or a process whose events end with it."""

    def at(self, delay_s: float, fn: Callable[[], None], label: str = "") -> Timer:
        """Plan code of the owner: it waits while the owner is paused and ends with it."""
        ...

    def dma(self, delay_s: float, fn: Callable[[], None], label: str = "") -> Timer:
        """Plan a device's write: it lands even while the owner is paused, and ends with it."""
        ...


@dataclass(slots=True)
class _Invariant:
    name: str
    check: Callable[[], None]
    every_steps: int


class World:
    """Virtual clock (`fabric.clock.Clock`), event heap and seed. See the module's text."""

    def __init__(self, seed: int, *, trace_lines_max: int = 60) -> None:
        self.seed = seed
        self.steps = 0
        self.trace = Trace(trace_lines_max)
        self._now_s = 0.0
        self._order = 0
        self._heap: list[tuple[float, int, Timer]] = []
        self._invariants: list[_Invariant] = []
        self._explained: BaseException | None = None

    def fork(self, name: str) -> Random:
        """Return the stream of random numbers that belongs to a name, from its beginning."""
        return Random(f"{self.seed}/{name}")

    def now_s(self) -> float:
        """Return virtual seconds since the world began."""
        return self._now_s

    def unix_s(self) -> float:
        """Return virtual seconds since the epoch."""
        return UNIX_START_S + self._now_s

    def sleep_s(self, seconds: float) -> None:
        """Refuse: whoever sleeps stops the whole world."""
        raise Unsupported("sleep_s", f"{seconds:g}", "Plan an event with World.at instead.")

    def at(self, delay_s: float, fn: Callable[[], None], label: str = "") -> Timer:
        """Plan `fn` for `delay_s` (0 or more) virtual seconds from now."""
        timer = Timer(fn, label)
        self._order += 1
        heappush(self._heap, (self._now_s + max(0.0, delay_s), self._order, timer))
        return timer

    def dma(self, delay_s: float, fn: Callable[[], None], label: str = "") -> Timer:
        """Plan a device's write; the world is never paused, so it is `at`."""
        return self.at(delay_s, fn, label)

    def note(self, who: str, what: str) -> None:
        """Write a line into the trace."""
        self.trace.add(self._now_s, who, what)

    def watch(self, name: str, check: Callable[[], None], every_steps: int = 1) -> None:
        """Call `check` after every `every_steps` steps and when a run ends; it raises if broken."""
        self._invariants.append(_Invariant(name, check, every_steps))

    def run(self, until_s: float, steps_max: int) -> Stop:
        """Live until the absolute virtual time `until_s`, at most `steps_max` events.

        Ends with every invariant checked, and the clock at `until_s` unless the steps ran out.
        """
        try:
            stop = self._run(until_s, steps_max)
            for invariant in self._invariants:
                invariant.check()
        except Exception as error:
            self.explain(error)
            raise
        return stop

    def _run(self, until_s: float, steps_max: int) -> Stop:
        heap, stamp = self._heap, self.trace.stamp
        last = self.steps + steps_max
        while heap and heap[0][0] <= until_s:
            if self.steps == last:
                return Stop.STEPS
            self._now_s, _, timer = heappop(heap)
            fn = timer.fn
            if fn is None:
                continue
            timer.pending = False
            self.steps += 1
            stamp(self._now_s, timer.label)
            fn()
            for invariant in self._invariants:
                if self.steps % invariant.every_steps == 0:
                    invariant.check()
        self._now_s = max(self._now_s, until_s)
        return Stop.TIME if heap else Stop.IDLE

    def report(self) -> str:
        """Return the seed, where the world is, and the last lines of its trace."""
        return (
            f"simulation seed {self.seed}, step {self.steps}, at {self._now_s:.6f} s; "
            f"again with {SEED_VARIABLE}={self.seed}. The last of {self.trace.lines} lines:\n"
            f"{self.trace.text()}"
        )

    def explain(self, error: BaseException) -> None:
        """Add the report to an error as a note, once."""
        if self._explained is not error:
            self._explained = error
            error.add_note(self.report())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.explain(error)


class LocalClock:
    """A process's own clock: it begins elsewhere and runs a little fast or slow.

    A time that one process sends to another as a point instead of a duration is wrong by hours
    here, which is how such a mistake is found.
    """

    def __init__(self, world: World, offset_s: float, rate: float) -> None:
        self._world, self._offset_s, self._rate = world, offset_s, rate

    def now_s(self) -> float:
        """Return this process's seconds."""
        return self._offset_s + self._rate * self._world.now_s()

    def unix_s(self) -> float:
        """Return the world's wall clock: machines agree on it to within their drift."""
        return UNIX_START_S + self._rate * self._world.now_s()

    def sleep_s(self, seconds: float) -> None:
        """Refuse, as the world does."""
        self._world.sleep_s(seconds)


def seeds(count: int, environ: Mapping[str, str], *, first: int = 1) -> tuple[int, ...]:
    """Return `count` seeds to run, from the one that `KVFABRIC_SEED` names, else from `first`."""
    start = int(environ.get(SEED_VARIABLE) or first)
    return tuple(range(start, start + count))
