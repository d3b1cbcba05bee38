"""The pool without sockets: messages and results in, frames to send out.

Ownership. The core owns the directory, the tiers and the table of who waits for what. The shell
(`server`) owns sockets, the process and the region's files; it hands in every frame, lets time pass
with `tick`, and sends what `take_actions` returns. The simulation is another such shell.

Failure. A message that cannot be carried out is answered (`Refused`, `Stale`, or a status for each
chunk), never dropped in silence, except from a stranger who did not attach: that gets `Stale`.

Threading. One thread calls everything.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isnan
from typing import cast

from ...fabric.checksum import checksum
from ...fabric.errors import FabricError, Malformed, NamespaceMismatch, Unsupported
from ...fabric.types import GROUP_BYTES, ChunkKey, Committed, Lookup, NamespaceId, SlotRef
from ...fabric.wire import (
    BATCH_CHUNKS_MAX,
    Abort,
    Attach,
    Attached,
    Body,
    Commit,
    CommitReply,
    Detach,
    Drop,
    Envelope,
    Ok,
    OnGpu,
    Pin,
    PinReply,
    Refused,
    Release,
    ReleaseReply,
    Renew,
    Reserve,
    ReserveReply,
    Stale,
    StatsAsk,
    StatsReply,
    decode,
    encode,
)
from .context import PoolContext
from .fetcher import Fetcher
from .sessions import Namespaces, Session

PID_MAX = 1 << 22
"""No pid of Linux is as high (PID_MAX_LIMIT)."""
DROP_VERIFY_BYTES_MAX = 256 << 20
"""Summed for one `Drop`: 20 ms at 12 GB/s, so that a wrong client cannot hold up the others for
longer. What lies beyond is reported again by its next reader."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A frame for a client."""

    identity: bytes
    frame: bytes


@dataclass(frozen=True, slots=True)
class PoolPlace:
    """What a client is told at attach about where the pool's memory is."""

    node: str
    control_path: str
    segment_paths: tuple[str, ...]
    slot_bytes: int
    lease_s: float
    media: tuple[str, ...] = ()
    peer_endpoint: str = ""


class ClientCore:
    """Answers the clients of one pool."""

    def __init__(
        self,
        place: PoolPlace,
        context: PoolContext,
        fetcher: Fetcher,
    ) -> None:
        self.place = place
        self.directory = context.directory
        self.memory = context.memory
        self.fetcher = fetcher
        self.gpu = context.gpu
        self.recorder = context.recorder
        self.clock = context.clock
        self.epoch = context.directory.epoch
        self.namespaces = Namespaces(place.slot_bytes)
        self.sessions: dict[bytes, Session] = {}
        self._replies: list[Reply] = []
        self._handlers: dict[type[Body], Callable[[Session, int, Body], Body | None]] = {
            Reserve: self._reserve,
            Commit: self._commit,
            Abort: self._abort,
            Pin: self._pin,
            Release: self._release,
            Drop: self._drop,
            OnGpu: self._on_gpu,
            Renew: self._renew,
            StatsAsk: self._stats,
        }

    def on_frame(self, identity: bytes, frame: bytes | memoryview) -> None:
        """Take a frame from the client that speaks on `identity`."""
        try:
            envelope = decode(frame)
        except Malformed as error:
            self.recorder.count("kvfabric_messages_refused_total", channel="client")
            self._reply(identity, 0, Refused("message", "", error.problem))
            return
        answer = self._answer(identity, envelope)
        if answer is not None:
            self._reply(identity, envelope.request, answer)

    def tick(self) -> None:
        """Let time pass: leases end, and waiting requests are answered."""
        now_s = self.clock.now_s()
        for _owner in self.directory.expire(now_s):
            self.recorder.count("kvfabric_leases_expired_total", owner="client")
            self.fetcher.writers_changed()
        for identity, request, reply in self.fetcher.take_answers(now_s):
            self._count_lookups(reply)
            self._reply(identity, request, reply)

    def process_gone(self, pid: int, pid_started: int) -> None:
        """A client's process has ended: nothing of it can write any more."""
        for identity, session in list(self.sessions.items()):
            if (session.pid, session.pid_started) == (pid, pid_started):
                self._forget(identity, session)
        self.directory.process_gone(pid, pid_started)
        self.fetcher.writers_changed()

    def take_replies(self) -> Sequence[Reply]:
        """Return the frames to send since the last call."""
        replies, self._replies = self._replies, []
        return replies

    def processes(self) -> set[tuple[int, int]]:
        """Return pid and start time of every process whose end must be noticed.

        Those attached, and those that an earlier pool gave slots to and that have not come back.
        """
        attached = {(session.pid, session.pid_started) for session in self.sessions.values()}
        return attached | self.directory.unclaimed_processes()

    def _reply(self, identity: bytes, request: int, body: Body) -> None:
        self._replies.append(Reply(identity, encode(self.epoch, request, body)))  # pyright: ignore[reportArgumentType] (every answer is a Message)

    def _answer(self, identity: bytes, envelope: Envelope) -> Body | None:
        body = envelope.body
        if isinstance(body, Attach):
            return self._attach(identity, body)
        session = self.sessions.get(identity)
        if session is not None and isinstance(body, Detach):
            # Of any epoch: who was answered too late to know this one may be leaving.
            self._forget(identity, session)
            return Ok()
        if session is None or envelope.epoch != self.epoch:
            return Stale()
        handler = self._handlers.get(type(body))
        if handler is None:
            return Refused("message", "a client's request", type(body).__name__)
        self.directory.renew(session.client, self.clock.now_s())
        try:
            return handler(session, envelope.request, body)
        except Malformed as error:
            return Refused(error.what, "", error.problem)
        except FabricError as error:
            return Refused(type(error).__name__, "no more", str(error))

    def _attach(self, identity: bytes, attach: Attach) -> Body:
        if not (0 < attach.pid < PID_MAX and 0 < attach.pid_started < 1 << 63):
            return Refused("pid", "a process of this node", f"{attach.pid} {attach.pid_started}")
        try:
            namespace, retired = self.namespaces.admit(attach)
        except NamespaceMismatch as error:
            return Refused(error.field, error.ours, error.theirs)
        except Unsupported as error:
            return Refused(error.field, error.remedy, error.value)
        for old in retired:
            self.directory.retire(old)
        session = Session(identity, attach.client, attach.pid, attach.pid_started, namespace)
        # A client whose connection broke comes back under another identity.
        for known in [i for i, other in self.sessions.items() if other.client == attach.client]:
            self.fetcher.leave(known)
            self.directory.unpin(attach.client)  # it may never have heard of some of them
            self.gpu.leave(attach.client)
            del self.sessions[known]
        self.sessions[identity] = session
        self.directory.open_owner(
            attach.client,
            self.place.lease_s,
            attach.pid,
            attach.pid_started,
            self.clock.now_s(),
        )
        return Attached(
            self.place.node,
            namespace,
            self.place.control_path,
            list(self.place.segment_paths),
            self.place.slot_bytes,
            self.place.lease_s,
            list(self.place.media),
            self.place.peer_endpoint,
        )

    def _forget(self, identity: bytes, session: Session) -> None:
        del self.sessions[identity]
        self.fetcher.leave(identity)
        self.directory.owner_gone(session.client)
        self.gpu.leave(session.client)

    def _reserve(self, session: Session, _request: int, body: Body) -> Body | None:
        assert isinstance(body, Reserve)
        if body.namespace_id != session.namespace:
            return _other_namespace(session, body.namespace_id)
        keys = _keys(body.keys, len(body.depths))
        lengths = self._lengths(session.namespace, keys)
        got = self.directory.reserve(
            session.client, session.namespace, keys, body.depths, lengths, self.clock.now_s()
        )
        return ReserveReply(
            [one.status for one in got],
            [one.slot.slot for one in got],
            [one.slot.generation for one in got],
        )

    def _lengths(self, namespace: NamespaceId, keys: Sequence[ChunkKey]) -> list[int]:
        tails = [key[-GROUP_BYTES:] for key in keys]
        of: dict[bytes, int] = {}
        for tail in set(tails):
            group = int.from_bytes(tail, "big")
            length = self.namespaces.chunk_bytes(namespace, group)
            if length is None:
                raise Malformed("keys", f"cache group {group} was not named at attach")
            of[tail] = length
        return [of[tail] for tail in tails]

    def _commit(self, session: Session, _request: int, body: Body) -> Body | None:
        assert isinstance(body, Commit)
        refs = _refs(body.slots, body.generations, len(body.checksums))
        statuses = self.directory.commit(session.client, refs, body.checksums, self.clock.now_s())
        ready = [
            ref for ref, status in zip(refs, statuses, strict=True) if status is Committed.READY
        ]
        self.fetcher.cascade(session.namespace, ready)
        self.fetcher.writers_changed()
        return CommitReply(list(statuses))

    def _abort(self, session: Session, _request: int, body: Body) -> Body | None:
        assert isinstance(body, Abort)
        self.directory.abort(session.client, _refs(body.slots, body.generations))
        self.fetcher.writers_changed()
        return Ok()

    def _pin(self, session: Session, request: int, body: Body) -> Body | None:
        assert isinstance(body, Pin)
        if body.namespace_id != session.namespace:
            return _other_namespace(session, body.namespace_id)
        if isnan(body.wait_s):
            raise Malformed("pin", "wait_s is not a number")
        reply = self.fetcher.pin(session, request, _keys(body.keys), body.wait_s, body.sources)
        if reply is not None:
            self._count_lookups(reply)
        return reply

    def _count_lookups(self, reply: PinReply) -> None:
        for status in Lookup:
            number = reply.statuses.count(status)
            if number:
                self.recorder.count("kvfabric_lookups_total", number, outcome=status.name.lower())

    def _release(self, session: Session, _request: int, body: Body) -> Body | None:
        assert isinstance(body, Release)
        refs = _refs(body.slots, body.generations)
        released = self.directory.release(session.client, refs, self.clock.now_s())
        return ReleaseReply(list(released))

    def _drop(self, _session: Session, _request: int, body: Body) -> Body | None:
        assert isinstance(body, Drop)
        corrupt: list[SlotRef] = []
        left_bytes = DROP_VERIFY_BYTES_MAX
        for ref in dict.fromkeys(_refs(body.slots, body.generations)):
            chunk = self.directory.chunk(ref)
            if chunk is None:
                continue
            left_bytes -= chunk.length_bytes
            if left_bytes < 0:
                break
            if checksum(self.memory.view(ref.slot, chunk.length_bytes)) != chunk.checksum:
                corrupt.append(ref)
        if corrupt:
            self.recorder.count("kvfabric_checksum_failures_total", len(corrupt), path="host")
            self.directory.drop(corrupt)
        return Ok()

    def _on_gpu(self, session: Session, _request: int, body: Body) -> Body | None:
        assert isinstance(body, OnGpu)
        stored = _keys(body.stored + body.removed)[: len(body.stored)]
        self._lengths(session.namespace, stored)
        refused = self.gpu.tell(
            session.client,
            session.namespace,
            whole=body.whole,
            stored=stored,
            removed=_keys(body.removed),
        )
        self.recorder.count("kvfabric_gpu_chunks_refused_total", refused)
        return Ok()

    def _renew(self, _session: Session, _request: int, _body: Body) -> Body | None:
        return Ok()

    def _stats(self, _session: Session, _request: int, _body: Body) -> Body | None:
        return StatsReply(self.fetcher.stats())


def _other_namespace(session: Session, theirs: bytes) -> Refused:
    return Refused("namespace_id", session.namespace.hex(), theirs.hex())


def _keys(keys: list[bytes], expected: int | None = None) -> list[ChunkKey]:
    if len(keys) > BATCH_CHUNKS_MAX or (expected is not None and expected != len(keys)):
        raise Malformed("message", f"{len(keys)} keys, {expected} depths")
    for length in set(map(len, keys)):
        if length not in (20, 36):
            raise Malformed("key", f"{length} bytes, neither 20 nor 36")
    return cast("list[ChunkKey]", keys)  # a NewType's call costs as much as a lookup


def _refs(
    slots: Sequence[int], generations: Sequence[int], expected: int | None = None
) -> list[SlotRef]:
    if len(slots) != len(generations) or (expected is not None and expected != len(slots)):
        raise Malformed("message", f"{len(slots)} slots, {len(generations)} generations")
    return list(map(SlotRef, slots, generations))
