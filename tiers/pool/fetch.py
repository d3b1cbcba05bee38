"""What the pool is fetching, and who waits for it.

One `Wanted` exists for each chunk that somebody waits for, however many wait: one promotion serves
them all. A `Waiter` is one client's request; it is answered when all its chunks are decided or its
deadline passes, whichever comes first. Values and bookkeeping only; `core` decides and acts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from ...fabric.errors import Malformed
from ...fabric.types import Chunk, ChunkKey, Lookup, NamespaceId, SlotRef, SourceRange
from ...fabric.wire import SOURCES_PER_CHUNK_MAX, PinReply, SourceRangeWire
from .sessions import Session
from .values import Pinned

NO_CHUNK = Chunk(ChunkKey(b""), SlotRef(0, 0), 0, 0)
"""Stands in an answer where there is no chunk."""


class Stage(IntEnum):
    """What a wanted chunk is waiting for."""

    UNDECIDED = 0
    WRITER = 1
    """Another client is writing it."""
    TIER_ANSWER = 2
    """A tier does not know yet whether it has it."""
    TIER_LOAD = 3
    PEER_PULL = 4


_IDLE = (Stage.UNDECIDED, Stage.WRITER, Stage.TIER_ANSWER)
"""Nothing is under way for a chunk in one of these: it is forgotten with the last who waits."""


@dataclass(slots=True)
class Entry:
    """One chunk's part of an answer."""

    status: Lookup
    chunk: Chunk
    origin: str


@dataclass(slots=True, eq=False)
class Waiter:
    """A client's request that could not be answered at once."""

    session: Session
    request: int
    entries: list[Entry]
    undecided: int
    deadline_s: float
    wanted: list["Wanted"] = field(default_factory=list["Wanted"])
    """What it waits for, or waited for until it was settled."""

    def decide(self, index: int, status: Lookup, chunk: Chunk, origin: str) -> None:
        """Settle one chunk. Settling it again changes nothing."""
        entry = self.entries[index]
        if entry.status is not Lookup.PENDING:
            return
        entry.status, entry.chunk, entry.origin = status, chunk, origin
        self.undecided -= 1


@dataclass(slots=True, eq=False)
class Wanted:
    """A chunk that is being fetched."""

    namespace: NamespaceId
    key: ChunkKey
    stage: Stage = Stage.UNDECIDED
    waiting: dict[Waiter, list[int]] = field(default_factory=dict[Waiter, list[int]])
    """Who waits, and for which of its chunks this is the answer."""
    sources: list[SourceRange] = field(default_factory=list[SourceRange])
    """Peers to ask, in order, those not asked yet."""
    sources_known: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    """Node and endpoint of every source named so far, those asked already among them."""
    tiers_asked: int = 0
    """How many of the pool's tiers, in order, have said no or failed."""
    busy: bool = False
    """Somebody has it and there was no room: the answer is BUSY rather than MISS."""

    def add_source(self, source: SourceRange) -> None:
        """Ask this peer too, if it was not named before."""
        name = (source.node, source.endpoint)
        if name not in self.sources_known:
            self.sources_known.add(name)
            self.sources.append(source)


WANTED_MAX = 65_536
"""Chunks being fetched at once: a million tokens of 16. Beyond it the answer is BUSY."""
WAITERS_MAX = 4_096
"""Requests waiting at once; an engine rarely has more than a few hundred."""


class Fetches:
    """All chunks being fetched and all requests waiting for them."""

    def __init__(self) -> None:
        self.wanted: dict[tuple[NamespaceId, ChunkKey], Wanted] = {}
        self.waiters: dict[Waiter, None] = {}
        self._in_stage: dict[Stage, dict[Wanted, None]] = {stage: {} for stage in Stage}

    def want(self, namespace: NamespaceId, key: ChunkKey) -> Wanted:
        """Begin to want a chunk that is not wanted yet."""
        wanted = self.wanted[namespace, key] = Wanted(namespace, key)
        self._in_stage[wanted.stage][wanted] = None
        return wanted

    def join(self, waiter: Waiter, index: int, wanted: Wanted) -> None:
        """Let a waiter wait for a chunk."""
        wanted.waiting.setdefault(waiter, []).append(index)
        waiter.wanted.append(wanted)

    def move(self, wanted: Wanted, stage: Stage) -> None:
        """Let a chunk wait for something else, if anybody still waits for it.

        One that was settled meanwhile stays settled.
        """
        if not wanted.waiting and stage in _IDLE:
            self.drop(wanted)
        elif self._in_stage[wanted.stage].pop(wanted, wanted) is None:
            self._in_stage[stage][wanted] = None
        wanted.stage = stage

    def drop(self, wanted: Wanted) -> None:
        """Want a chunk no longer."""
        if self._in_stage[wanted.stage].pop(wanted, wanted) is None:
            del self.wanted[wanted.namespace, wanted.key]

    def in_stage(self, stage: Stage) -> list[Wanted]:
        """Return the chunks in a stage."""
        return list(self._in_stage[stage])

    def overdue(self, now_s: float) -> list[Waiter]:
        """Return the waiters whose time is up or whose chunks are all decided."""
        return [w for w in self.waiters if w.undecided == 0 or w.deadline_s <= now_s]

    def remove(self, waiter: Waiter) -> None:
        """Forget an answered waiter and the undecided chunks that nobody waits for any more."""
        del self.waiters[waiter]
        for wanted in waiter.wanted:
            wanted.waiting.pop(waiter, None)
            if not wanted.waiting and wanted.stage in _IDLE:
                self.drop(wanted)

    def leave(self, identity: bytes) -> None:
        """Forget the waiters of a client that is gone."""
        for waiter in [w for w in self.waiters if w.session.identity == identity]:
            self.remove(waiter)

    def next_deadline_s(self) -> float:
        """Return when the next waiter must be answered; infinity if none waits."""
        return min((waiter.deadline_s for waiter in self.waiters), default=float("inf"))


def sources_of(count: int, sources: Sequence[SourceRangeWire]) -> list[list[SourceRange]]:
    """Return the sources of each of `count` chunks, in the order in which they were named.

    Raises `Malformed` for more than `SOURCES_PER_CHUNK_MAX` a chunk.
    """
    spans = [(max(s.start, 0), min(s.start + s.count, count)) for s in sources]
    named = sum(max(end - start, 0) for start, end in spans)
    if max(named, len(sources)) > SOURCES_PER_CHUNK_MAX * count:
        raise Malformed("pin", f"{len(sources)} sources, {named} in all for {count} chunks")
    of: list[list[SourceRange]] = [[] for _ in range(count)]
    for one, (start, end) in zip(sources, spans, strict=True):
        source = SourceRange(one.node, one.endpoint, one.start, one.count)
        for chosen in of[start:end] if start < end else ():
            chosen.append(source)
    return of


def reply_at_once(pinned: Sequence[Pinned]) -> PinReply:
    """Return the answer to a request for which nothing is fetched."""
    chunks = [one.chunk for one in pinned]
    return PinReply(
        [one.status for one in pinned],
        [chunk.slot.slot for chunk in chunks],
        [chunk.slot.generation for chunk in chunks],
        [chunk.checksum for chunk in chunks],
        ["host" if one.status is Lookup.HIT else "" for one in pinned],
    )


def reply_of(entries: Sequence[Entry]) -> PinReply:
    """Return the answer to a request that has waited."""
    return PinReply(
        [entry.status for entry in entries],
        [entry.chunk.slot.slot for entry in entries],
        [entry.chunk.slot.generation for entry in entries],
        [entry.chunk.checksum for entry in entries],
        [entry.origin if entry.status is Lookup.HIT else "" for entry in entries],
    )
