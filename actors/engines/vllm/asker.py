"""Questions of the scheduler that may take long: what tiers and peers have, fetched and pinned.

Ownership. Each asker has a thread and a pool client of its own, because a client asks one question
at a time. What an ask pinned stays pinned, by that client, until the ask is `drop`ped; then nothing
forbids its eviction any more.

Lifecycle. Askers are made as they are needed, up to `ASKERS_MAX`, and live until `close`. An ask
ends by itself within its time: everything that it waited for and did not get is a miss.

Failure. A pool that does not answer ends the ask with `SILENT`. Nothing is raised.

Threading. `submit`, `drop` and the properties of an ask are for the scheduler's thread and never
wait for a socket.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ....fabric.clock import Clock
from ....fabric.errors import FabricError
from ....fabric.types import Chunk, ChunkKey, Lookup, SlotRef, SourceRange
from ....tiers.pool.client import PoolClient
from .settings import ASKERS_MAX, ASKS_WAITING_MAX, HANDOFF_RETRY_S

LOG = logging.getLogger("kvfabric.vllm")


class AskState(Enum):
    """How far an ask is."""

    WAITING = 0
    DONE = 1
    """The chunks that could be had are in the host region, pinned."""
    SILENT = 2
    """The pool did not answer."""


@dataclass(slots=True, eq=False)
class Ask:
    """One question. Made by the scheduler, ended by an asker."""

    keys: Sequence[ChunkKey]
    sources: Sequence[SourceRange]
    begun_s: float
    wait_s: float
    again_s: float
    """How long to ask again for what a source has not yet."""
    state: AskState = AskState.WAITING
    origins: tuple[str, ...] = ()
    """For each key where it came from; empty if it did not come."""
    asker: "_Asker | None" = None
    dropped: bool = False
    pins: list[SlotRef] = field(default_factory=list[SlotRef])


class Askers:
    """All askers of one scheduler."""

    def __init__(self, attach: Callable[[], PoolClient], clock: Clock) -> None:
        self._attach = attach
        self._clock = clock
        self._askers: list[_Asker] = []
        self._waiting = 0

    def submit(self, ask: Ask) -> Ask:
        """Hand an ask to the asker with the least to do. Too many asks: it is over at once."""
        idle = next((each for each in self._askers if not each.load), None)
        if idle is None and len(self._askers) < ASKERS_MAX:
            idle = _Asker(self._attach, self._clock)
            self._askers.append(idle)
        asker = idle or min(self._askers, key=lambda each: each.load)
        if asker.load >= ASKS_WAITING_MAX // ASKERS_MAX:
            ask.state, ask.origins = AskState.DONE, ("",) * len(ask.keys)
            return ask
        asker.take(ask)
        return ask

    def drop(self, ask: Ask) -> None:
        """Nobody needs the answer or its pins any more."""
        if ask.asker is not None:
            ask.asker.drop(ask)

    def close(self) -> None:
        """End all threads and clients; their pins go with them."""
        for asker in self._askers:
            asker.close()
        self._askers.clear()


class _Asker:
    """One thread with its client."""

    def __init__(self, attach: Callable[[], PoolClient], clock: Clock) -> None:
        self._attach = attach
        self._clock = clock
        self._client: PoolClient | None = None
        self._lock = threading.Lock()
        self._load = 0
        self._work: queue.SimpleQueue[Ask | None] = queue.SimpleQueue()
        """Bounded by `ASKS_WAITING_MAX` asks, each of which is here at most twice."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvfabric-ask", daemon=True)
        self._thread.start()

    @property
    def load(self) -> int:
        """How many asks are not over."""
        return self._load

    def take(self, ask: Ask) -> None:
        ask.asker = self
        with self._lock:
            self._load += 1
        self._work.put(ask)

    def drop(self, ask: Ask) -> None:
        with self._lock:
            if ask.dropped:
                return
            ask.dropped = True
            over = ask.state is not AskState.WAITING
        if over and ask.pins:
            self._work.put(ask)

    def close(self) -> None:
        self._closing.set()
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (ask := self._work.get()) is not None:
            if ask.state is AskState.WAITING:
                self._answer(ask)
            if ask.dropped:
                self._release(ask)
        if self._client is not None:
            self._client.close()

    def _answer(self, ask: Ask) -> None:
        state, origins, pins = AskState.SILENT, [""] * len(ask.keys), list[SlotRef]()
        try:
            self._fetch(ask, origins, pins)
            state = AskState.DONE
        except FabricError as error:
            LOG.warning("a question to the pool failed: %s", error)
        except Exception:  # the requests behind this one would wait their whole time
            LOG.exception("a question to the pool failed")
        with self._lock:
            ask.origins, ask.pins, ask.state = tuple(origins), pins, state
            self._load -= 1

    def _fetch(self, ask: Ask, origins: list[str], pins: list[SlotRef]) -> None:
        """Pin what can be had. What a source has not yet is asked again for a while.

        Fills `origins` and `pins`: what was pinned counts even if the pool falls silent later.
        """
        left = list(range(len(ask.keys)))
        while left and not ask.dropped and not self._closing.is_set():
            now_s = self._clock.now_s()
            wait_s = ask.begun_s + ask.wait_s - now_s
            if wait_s <= 0:
                break
            answers = self._pin(ask, left, wait_s)
            for index, (status, chunk, origin) in zip(left, answers, strict=True):
                if status is Lookup.HIT:
                    origins[index] = origin
                    pins.append(chunk.slot)
            left = [
                i
                for i, (status, _, _) in zip(left, answers, strict=True)
                if status is not Lookup.HIT
            ]
            if not left or self._clock.now_s() - ask.begun_s >= min(ask.again_s, ask.wait_s):
                break
            self._clock.sleep_s(HANDOFF_RETRY_S)

    def _pin(self, ask: Ask, left: Sequence[int], wait_s: float) -> list[tuple[Lookup, Chunk, str]]:
        if self._client is None:
            self._client = self._attach()
        keys = [ask.keys[index] for index in left]
        return self._client.pin(keys, wait_s, _shifted(ask.sources, left))

    def _release(self, ask: Ask) -> None:
        pins, ask.pins = ask.pins, []
        if pins and self._client is not None:
            try:
                self._client.release(pins)
            except FabricError as error:
                # Of a pool that is away the client gives them back when it answers.
                LOG.warning("pins were not given back: %s", error)


def _shifted(sources: Sequence[SourceRange], left: Sequence[int]) -> list[SourceRange]:
    """Return the sources' ranges over the keys that are left."""
    found: list[SourceRange] = []
    for source in sources:
        inside = [at for at, index in enumerate(left) if 0 <= index - source.start < source.count]
        if inside:
            found.append(
                SourceRange(source.node, source.endpoint, inside[0], inside[-1] - inside[0] + 1)
            )
    return found
