"""An engine in a simulated world: it loads what is cached, computes the rest and stores it.

It follows the order of messages of `tiers.pool.client`: attach, pin, read, release, reserve, write,
commit; renewals three times a lease; what a late answer brings is given back. What it "computes"
are the true bytes of a key, written to the slot piece by piece: now by a device, which goes on
while the engine is stopped, now by a thread, which goes on when it resumes.

It checks what no engine could: that bytes under a pin that held are the true ones, that no byte it
writes lands in a slot that is not its own any more, and that a pool which was running and awake the
whole time answers in time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from ...fabric.errors import Corrupt
from ...fabric.records import RECORD_BYTES, SlotRecord, record_offset
from ...fabric.types import (
    ChunkKey,
    Committed,
    Lookup,
    NamespaceId,
    Released,
    Reserved,
    SlotRef,
    SlotState,
)
from ...fabric.wire import (
    Abort,
    Attach,
    Attached,
    Commit,
    CommitReply,
    GroupGeometry,
    Message,
    Pin,
    PinReply,
    Release,
    ReleaseReply,
    Renew,
    Reserve,
    ReserveReply,
    SourceRangeWire,
    Stale,
    decode,
    encode,
)
from .network import Network
from .oracle import Overdue, Recorder, true_bytes, true_checksum
from .process import Process, ProcessState
from .sockets import Socket, pack, unpack

TIMEOUT_S = 2.0
"""An engine's patience with its pool, beyond what it asked the pool to wait."""
ANSWER_S = 0.5
"""What an awake pool may take beyond that: its longest sleep, and the network."""
RENEWALS_PER_LEASE = 3
PIECES = 4
"""In how many pieces a chunk is written or read."""
WAITS_S = (0.0, 0.5, 1.0, 2.0)
"""How long requests let the pool look for what it lacks."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What engines do."""

    namespace: Mapping[str, str]
    chunk_bytes: int
    pick: Callable[[Random], Sequence[ChunkKey]]
    """The keys of the next request, from the head."""
    sources: Callable[[Random, int], Sequence[SourceRangeWire]]
    """From whom to pull, for a request of so many chunks."""
    active: Callable[[], bool]
    """Whether to make new requests."""
    piece_s: float = 0.02
    """Mean time between two pieces."""


@dataclass(slots=True)
class _Asked:
    body: Message
    then: Callable[[Message], None] | None
    """None once the engine has given up waiting."""
    deadline_s: float
    """On the engine's clock: when it gives up."""
    overdue_s: float
    """On the world's: when the answer is late."""
    disturbances: int
    pool_epoch: int


class SimEngine:
    """The program of an engine's process."""

    def __init__(
        self, process: Process, local: Network, pool: Process, recorder: Recorder, work: Workload
    ) -> None:
        self.process, self.local, self.pool = process, local, pool
        self.recorder, self.work = recorder, work
        self.random = process.world.fork(f"engine/{process.name}/{process.epoch}")
        self.namespace = NamespaceId(b"")
        self.busy = False
        self.owed: list[SlotRef] = []
        """Slots to give back: reserved for this engine, which will not write them any more."""
        self._epoch = 0
        self._attached = False
        self._lease_s = 1.0
        self._slot_bytes = 0
        self._request = 0
        self._renewed_s = 0.0
        self._asked: dict[int, _Asked] = {}

    def on_message(self, source: str, frame: bytes) -> None:
        """Take an answer of the pool."""
        del source
        _, connection, message = unpack(frame)
        if connection != self.process.epoch:
            return
        envelope = decode(message)
        asked = self._asked.pop(envelope.request, None)
        if asked is None:
            return
        if isinstance(envelope.body, Stale):
            self._attached = False
            self._fail(asked)
        elif asked.then is None:
            self._give_back(envelope.body)
        else:
            if isinstance(envelope.body, Attached):
                self._epoch = envelope.epoch
            asked.then(envelope.body)

    def tick(self) -> None:
        """Give up what is late; renew; begin something."""
        now_s = self.process.clock.now_s()
        for request, asked in list(self._asked.items()):
            if asked.then is not None and now_s >= asked.deadline_s:
                self._fail(asked)
                asked.then = None
            if asked.then is None and asked.pool_epoch != self.pool.epoch:
                del self._asked[request]
        if not self._attached:
            self._attach()
        elif now_s - self._renewed_s >= self._lease_s / RENEWALS_PER_LEASE:
            self._renewed_s = now_s
            self._ask(Renew(), _ignore)
        if self._attached and not self.busy:
            if self.owed:
                self._abort()
            elif self.work.active():
                self._begin()

    def check(self) -> None:
        """Raise `Overdue` if an awake pool left this awake engine without an answer."""
        now_s = self.process.world.now_s()
        awake = ProcessState.RUNNING
        if self.process.state is not awake or self.pool.state is not awake:
            return
        for request, asked in self._asked.items():
            if asked.disturbances == self._disturbances() and now_s > asked.overdue_s:
                name = f"{self.process.name}#{request} {type(asked.body).__name__}"
                raise Overdue(name, asked.overdue_s, now_s)

    @property
    def quiet(self) -> bool:
        """Whether nothing is under way but renewals."""
        return (
            not self.busy
            and not self.owed
            and all(isinstance(asked.body, Renew) for asked in self._asked.values())
        )

    def _disturbances(self) -> int:
        return self.process.disturbances + self.pool.disturbances

    def _ask(self, body: Message, then: Callable[[Message], None], wait_s: float = 0.0) -> None:
        self._request += 1
        self._asked[self._request] = _Asked(
            body,
            then,
            self.process.clock.now_s() + wait_s + TIMEOUT_S,
            self.process.world.now_s() + wait_s + ANSWER_S,
            self._disturbances(),
            self.pool.epoch,
        )
        message = encode(self._epoch, self._request, body)
        frame = pack(Socket.ENGINE, self.process.epoch, message)
        self.local.send(self.process.name, self.pool.name, frame)

    def _fail(self, asked: _Asked) -> None:
        """No answer, or one from a pool that forgot us: what it was for is recomputed."""
        if asked.then is None:
            return
        if isinstance(asked.body, Commit | Abort):
            self._owe(asked.body.slots, asked.body.generations)
        if asked.then is not _ignore and not isinstance(asked.body, Attach):
            self.recorder.misses += 1
            self.busy = False

    def _give_back(self, answer: Message) -> None:
        """An answer that came too late: what it grants will not be used."""
        if isinstance(answer, ReserveReply):
            granted = [i for i, s in enumerate(answer.statuses) if s is Reserved.GRANTED]
            self._owe([answer.slots[i] for i in granted], [answer.generations[i] for i in granted])
        elif isinstance(answer, PinReply):
            hits = [i for i, s in enumerate(answer.statuses) if s is Lookup.HIT]
            if hits:
                slots = [answer.slots[i] for i in hits]
                self._ask(Release(slots, [answer.generations[i] for i in hits]), _ignore)

    def _owe(self, slots: Sequence[int], generations: Sequence[int]) -> None:
        self.owed += [SlotRef(*pair) for pair in zip(slots, generations, strict=True)]

    def _abort(self) -> None:
        owed, self.owed = self.owed, []
        self.busy = True
        body = Abort([ref.slot for ref in owed], [ref.generation for ref in owed])
        self._ask(body, lambda _: self._done())

    def _done(self) -> None:
        self.busy = False

    def _attach(self) -> None:
        if any(isinstance(asked.body, Attach) and asked.then for asked in self._asked.values()):
            return
        group = GroupGeometry(0, 16, self.work.chunk_bytes)
        client = f"{self.process.name}/{self.process.epoch}"
        started = self.process.epoch
        body = Attach(client, self.process.pid, started, dict(self.work.namespace), [group])
        self._ask(body, self._on_attached)

    def _on_attached(self, answer: Message) -> None:
        if isinstance(answer, Attached):
            self._attached = True
            self.namespace = NamespaceId(answer.namespace_id)
            self._lease_s = answer.lease_s
            self._slot_bytes = answer.slot_bytes
            self._renewed_s = self.process.clock.now_s()

    def _begin(self) -> None:
        self.busy = True
        keys = list(self.work.pick(self.random))
        wait_s = self.random.choice(WAITS_S)
        sources = list(self.work.sources(self.random, len(keys)))
        body = Pin(self.namespace, [bytes(key) for key in keys], wait_s, sources)
        self._ask(body, lambda answer: self._on_pinned(keys, answer), wait_s)

    def _on_pinned(self, keys: Sequence[ChunkKey], answer: Message) -> None:
        if not isinstance(answer, PinReply):
            self._done()
            return
        hits = [i for i, status in enumerate(answer.statuses) if status is Lookup.HIT]
        missing = [i for i, status in enumerate(answer.statuses) if status is Lookup.MISS]
        if not hits:
            self._reserve(keys, missing)
            return
        read = {i: bytearray(self.work.chunk_bytes) for i in hits}
        delay_s = 0.0
        for piece in range(PIECES):
            delay_s += self.random.expovariate(1 / self.work.piece_s)
            for i in hits:
                self.process.at(
                    delay_s, lambda s=answer.slots[i], r=read[i], p=piece: self._copy(s, r, p)
                )
        self.process.at(delay_s, lambda: self._release(keys, answer, read, missing), "release")

    def _piece(self, slot: int, piece: int) -> tuple[slice, memoryview]:
        size = self.work.chunk_bytes // PIECES
        place = slice(piece * size, (piece + 1) * size)
        segment = self.pool.shared_memory("segment", 0)
        start = slot * self._slot_bytes
        return place, segment[start + place.start : start + place.stop]

    def _copy(self, slot: int, target: bytearray, piece: int) -> None:
        place, view = self._piece(slot, piece)
        target[place] = view

    def _release(
        self,
        keys: Sequence[ChunkKey],
        pinned: PinReply,
        read: Mapping[int, bytearray],
        missing: Sequence[int],
    ) -> None:
        slots = [pinned.slots[i] for i in read]
        generations = [pinned.generations[i] for i in read]

        def on_released(answer: Message) -> None:
            if isinstance(answer, ReleaseReply):
                for i, status in zip(read, answer.statuses, strict=True):
                    if status is Released.HELD:
                        self._take(keys[i], pinned.checksums[i], read[i])
                    else:
                        self.recorder.misses += 1
            self._reserve(keys, missing)

        self._ask(Release(slots, generations), on_released)

    def _take(self, key: ChunkKey, digest: int, data: bytearray) -> None:
        name = self.process.name
        if digest != true_checksum(self.namespace, key, len(data)):
            raise Corrupt(f"chunk {key[:4].hex()} at {name}", "published under a wrong checksum")
        self.recorder.hit(name, self.namespace, key, memoryview(data))

    def _reserve(self, keys: Sequence[ChunkKey], missing: Sequence[int]) -> None:
        self.recorder.misses += len(missing)
        if not missing:
            self._done()
            return
        wanted = [keys[i] for i in missing]
        body = Reserve(self.namespace, [bytes(key) for key in wanted], list(missing))
        self._ask(body, lambda answer: self._on_reserved(wanted, answer))

    def _on_reserved(self, keys: Sequence[ChunkKey], answer: Message) -> None:
        if not isinstance(answer, ReserveReply):
            self._done()
            return
        mine = [
            (key, SlotRef(slot, generation))
            for key, status, slot, generation in zip(
                keys, answer.statuses, answer.slots, answer.generations, strict=True
            )
            if status is Reserved.GRANTED
        ]
        if not mine:
            self._done()
            return
        delay_s = 0.0
        write = self.random.choice((self.process.at, self.process.dma))
        for piece in range(PIECES):
            delay_s += self.random.expovariate(1 / self.work.piece_s)
            for key, ref in mine:
                write(delay_s, lambda k=key, r=ref, p=piece: self._land(k, r, p))
        self.process.at(delay_s, lambda: self._commit(mine), "commit")

    def _land(self, key: ChunkKey, ref: SlotRef, piece: int) -> None:
        control = self.pool.shared_memory("control", 0)
        start = record_offset(ref.slot)
        record = SlotRecord.decode(control[start : start + RECORD_BYTES])
        owned = record.state in (SlotState.WRITING, SlotState.QUARANTINED)
        if not owned or (record.key, record.generation) != (key, ref.generation):
            raise Corrupt(
                f"slot {ref.slot} of {self.pool.name}",
                f"{self.process.name} still writes generation {ref.generation}, and it is "
                f"{record.state.name}, generation {record.generation}",
            )
        place, view = self._piece(ref.slot, piece)
        view[:] = true_bytes(self.namespace, key, self.work.chunk_bytes)[place]

    def _commit(self, mine: Sequence[tuple[ChunkKey, SlotRef]]) -> None:
        size = self.work.chunk_bytes
        for key, _ in mine:
            self.recorder.commit(self.namespace, key)
        slots, generations = [ref.slot for _, ref in mine], [ref.generation for _, ref in mine]
        sums = [true_checksum(self.namespace, key, size) for key, _ in mine]

        def on_committed(answer: Message) -> None:
            statuses = answer.statuses if isinstance(answer, CommitReply) else ()
            lost = [i for i in range(len(mine)) if Committed.READY not in statuses[i : i + 1]]
            self._owe([slots[i] for i in lost], [generations[i] for i in lost])
            self._done()

        self._ask(Commit(slots, generations, sums), on_committed)


def _ignore(_answer: Message) -> None:
    """What follows a message on which nothing waits."""
