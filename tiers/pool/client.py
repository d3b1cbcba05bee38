"""What an engine process attaches to its node's pool with.

Ownership. The client owns one socket to the pool and maps the pool's memory: the control file to
read, the segments to read and write. Slots are written only between a granted `reserve` and its
`commit` or `abort`, and read only between a `pin` and its `release`.

Lifecycle. `attach` -> any number of calls -> `close`. A renewal thread keeps the leases alive. When
the pool restarts, the next call attaches again by itself: what was committed is still there, what
was reserved or pinned is lost (`LOST`).

Failure. A pool that does not answer within `timeout_s` is `Unavailable`; the caller treats it as a
miss, and what the pool may have granted meanwhile goes back to it later. Loaded bytes are verified;
corrupt ones are reported to the pool and are a MISS.

Threading. Calls may come from several threads; they take turns on the socket. A process that is
forked attaches for itself: of what it inherits it may only `close` the client, which leaves the
parent's as it was, or `lookup`.
"""

import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

from ...fabric.clock import Clock, SystemClock
from ...fabric.errors import (
    Closed,
    FabricError,
    Malformed,
    Unavailable,
)
from ...fabric.namespace import Namespace
from ...fabric.types import (
    Chunk,
    ChunkKey,
    Committed,
    Lookup,
    NamespaceId,
    Released,
    Reserved,
    SlotRef,
    SourceRange,
)
from ...fabric.wire import (
    Abort,
    Attach,
    Attached,
    Commit,
    CommitReply,
    Drop,
    GroupGeometry,
    Message,
    Ok,
    OnGpu,
    Pin,
    PinReply,
    Release,
    ReleaseReply,
    Renew,
    Reserve,
    ReserveReply,
    SourceRangeWire,
    StatsAsk,
    StatsReply,
)
from .channel import Channel, Remapped, columns, references
from .copy import Copier, copy_summed
from .process import this_process
from .reader import LookupResult, TableReader
from .region import RegionView

R = TypeVar("R", bound=Message)

NO_SUM = 0
"""No chunk has this checksum: what could not be read is a MISS."""
RENEWALS_PER_LEASE = 3
"""So that one lost renewal, or one slow answer, ends no lease."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load brought, chunk by chunk."""

    statuses: tuple[Lookup, ...]
    """HIT: verified and handed over. Anything else: recompute."""
    origins: tuple[str, ...]
    """"host", a tier's name, or "peer"; empty for a chunk that did not come."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What a store did, chunk by chunk."""

    reserved: tuple[Reserved, ...]
    committed: int
    """How many chunks this call published."""


class PoolClient:
    """A client of one pool, for one namespace. Make it with `attach`."""

    def __init__(
        self,
        endpoint: str,
        namespace: Namespace,
        groups: Sequence[GroupGeometry],
        clock: Clock | None = None,
        timeout_s: float = 2.0,
    ) -> None:
        namespace.refuse_unsupported()
        self.endpoint = endpoint
        self.namespace = namespace
        self.groups = {group.group: group for group in groups}
        self.timeout_s = timeout_s
        self.client = uuid.uuid4().hex
        self.copier = Copier()
        self.node = ""
        self.media: tuple[str, ...] = ()
        """The pool's tiers below host memory, fastest first."""
        self.peer_endpoint = ""
        """Where other pools reach this one; empty if it serves none."""
        self.namespace_id = NamespaceId(b"")
        self.attachments = 0
        """How often it has attached. Each time the pool knows nothing of the engine's own cache."""
        self.on_attach: Callable[[], object] = _nobody
        """Called in whatever thread has attached again. It may not ask the pool."""
        self._closed = threading.Event()
        self._lease_s = 0.0
        self._lease_changed = threading.Event()
        self._memory: tuple[RegionView, TableReader] | None = None
        attach = Attach(self.client, *this_process(), namespace.fields(), list(groups))
        self._channel = Channel(endpoint, attach, self._on_attached, clock or SystemClock())
        try:
            self._channel.open(timeout_s)
        except BaseException:
            self._channel.close()
            raise
        self._renewer = threading.Thread(
            target=self._renew_leases, name="kvfabric-renew", daemon=True
        )
        self._renewer.start()

    @classmethod
    def attach(
        cls,
        endpoint: str,
        namespace: Namespace,
        groups: Sequence[GroupGeometry],
        clock: Clock | None = None,
        timeout_s: float = 2.0,
    ) -> "PoolClient":
        """Attach to the pool at `endpoint` (`ipc://...`).

        Raises `NamespaceMismatch` or `Unsupported`, naming the field, if the pool refuses,
        `Unavailable` if it does not answer, and `ConfigError` if `endpoint` is no address.
        """
        return cls(endpoint, namespace, groups, clock, timeout_s)

    def lookup(self, keys: Sequence[bytes]) -> LookupResult:
        """Ask the shared index which chunks are here; no message is sent. A hint: `pin` decides."""
        return self._mapped()[1].lookup(self.namespace_id, keys)

    def view(self, ref: SlotRef, length: int) -> memoryview:
        """Return the bytes of a slot that this client has reserved or pinned.

        Raises `Closed` for a reference that is over: the slot, or the memory itself if the pool
        began anew, belongs to others now. A view that was made before stays with its memory.
        """
        region, reader = self._mapped()
        view = region.view(ref.slot, length)
        if reader.generation(ref.slot) != ref.generation:
            raise Closed(f"slot {ref.slot} of generation {ref.generation}")
        return view

    def reserve(
        self, keys: Sequence[ChunkKey], depths: Sequence[int]
    ) -> list[tuple[Reserved, SlotRef]]:
        """Ask for slots to write; see `fabric.wire.Reserve`."""
        reply = self._ask(Reserve(self.namespace_id, list(keys), list(depths)), ReserveReply)
        refs = references(reply.slots, reply.generations)
        return list(zip(reply.statuses, refs, strict=True))

    def commit(self, refs: Sequence[SlotRef], checksums: Sequence[int]) -> list[Committed]:
        """Publish written slots under their checksums.

        If it fails, or the answer does not come, the slots count as given up and must not be
        written again.
        """
        body = Commit(*columns(refs), list(checksums))
        try:
            return self._ask(body, CommitReply).statuses
        except FabricError:
            self._channel.owe(refs)
            raise

    def abort(self, refs: Sequence[SlotRef]) -> None:
        """Give back slots that will not be written any more: now, or when the pool answers."""
        try:
            self._send(Abort(*columns(refs)))
        except Unavailable:
            self._channel.owe(refs)

    def pin(
        self,
        keys: Sequence[ChunkKey],
        wait_s: float = 0.0,
        sources: Iterable[SourceRange] = (),
    ) -> list[tuple[Lookup, Chunk, str]]:
        """Pin chunks for reading: status, chunk and origin for each key; see `fabric.wire.Pin`."""
        lengths = [self._length(key) for key in keys]
        wire = [SourceRangeWire(s.node, s.endpoint, s.start, s.count) for s in sources]
        reply = self._ask(
            Pin(self.namespace_id, list(keys), wait_s, wire), PinReply, self.timeout_s + wait_s
        )
        refs = references(reply.slots, reply.generations)
        chunks = list(map(Chunk, keys, refs, lengths, reply.checksums))
        return list(zip(reply.statuses, chunks, reply.origins, strict=True))

    def release(self, refs: Sequence[SlotRef]) -> list[Released]:
        """Give pins back; says of each whether it held until now.

        Where that cannot be known in time, the pins go back when the pool answers again.
        """
        try:
            return self._ask(Release(*columns(refs)), ReleaseReply).statuses
        except Unavailable:
            self._channel.owe_pins(refs)
            raise

    def store(
        self,
        keys: Sequence[ChunkKey],
        depths: Sequence[int],
        fill: Callable[[int, memoryview], int],
    ) -> Stored:
        """Reserve, fill and publish.

        `fill(index, slot)` writes the chunk of `keys[index]` into the slot and returns its
        checksum; it is called on the copier's threads, only for chunks that the pool lacks.
        """
        got = self.reserve(keys, depths)
        granted = [i for i, (status, _) in enumerate(got) if status is Reserved.GRANTED]
        refs = [got[i][1] for i in granted]
        if not refs:
            return Stored(tuple(status for status, _ in got), 0)
        try:
            sums = self.copier.map(
                lambda n: fill(granted[n], self.view(refs[n], self._length(keys[granted[n]]))),
                len(granted),
            )
        except BaseException:
            self.abort(refs)
            raise
        statuses = self.commit(refs, sums)
        lost = [r for r, s in zip(refs, statuses, strict=True) if s is Committed.LOST]
        if lost:
            self.abort(lost)
        return Stored(tuple(status for status, _ in got), len(refs) - len(lost))

    def store_bytes(
        self, keys: Sequence[ChunkKey], depths: Sequence[int], chunks: Sequence[memoryview]
    ) -> Stored:
        """Store chunks that lie in the caller's memory."""
        return self.store(keys, depths, lambda index, slot: copy_summed(slot, chunks[index]))

    def load(
        self,
        keys: Sequence[ChunkKey],
        drain: Callable[[int, memoryview, int], int],
        wait_s: float = 0.0,
        sources: Iterable[SourceRange] = (),
    ) -> Loaded:
        """Pin, verify, hand over, release.

        `drain(index, slot, checksum)` takes the bytes of `keys[index]` and returns the checksum of
        what it took, or calls `fabric.checksum.checksum` on the slot before it reads it. It is
        called on the copier's threads. A chunk whose checksum differs is reported and is a MISS; so
        is one whose pin was lost before the end.
        """
        pinned = self.pin(keys, wait_s, sources)
        held = [i for i, (status, _, _) in enumerate(pinned) if status is Lookup.HIT]
        statuses = [status for status, _, _ in pinned]
        try:
            sums = self.copier.map(
                lambda n: self._drain(pinned[held[n]][1], held[n], drain), len(held)
            )
        finally:
            released = self.release([pinned[i][1].slot for i in held]) if held else []
        corrupt: list[SlotRef] = []
        for index, summed, kept in zip(held, sums, released, strict=True):
            chunk = pinned[index][1]
            if kept is Released.LOST:
                statuses[index] = Lookup.MISS
            elif summed != chunk.checksum:
                statuses[index] = Lookup.MISS
                corrupt.append(chunk.slot)
        if corrupt:
            self._send(Drop(*columns(corrupt)))
        origins = (
            o if s is Lookup.HIT else "" for s, (_, _, o) in zip(statuses, pinned, strict=True)
        )
        return Loaded(tuple(statuses), tuple(origins))

    def load_bytes(
        self,
        keys: Sequence[ChunkKey],
        into: Sequence[memoryview],
        wait_s: float = 0.0,
        sources: Iterable[SourceRange] = (),
    ) -> Loaded:
        """Load chunks into the caller's memory; a target whose status is not HIT holds garbage."""
        return self.load(
            keys, lambda index, slot, _sum: copy_summed(into[index], slot), wait_s, sources
        )

    def tell_gpu(
        self, stored: Sequence[ChunkKey], removed: Sequence[ChunkKey], *, whole: bool
    ) -> None:
        """Say what the engine's own cache gained and lost; see `fabric.wire.OnGpu`.

        If it fails nobody knows whether it arrived: the next one must be `whole`.
        """
        self._ask(OnGpu(whole, list(stored), list(removed)), Ok)

    def stats(self) -> dict[str, float]:
        """Return the pool's gauges and counts."""
        return self._ask(StatsAsk(), StatsReply).values

    def close(self) -> None:
        """Say goodbye and let go of everything. Safe to call twice."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._lease_changed.set()
        self._renewer.join()
        self.copier.close()
        self._channel.close()
        if self._memory is not None:
            self._memory[0].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _drain(self, chunk: Chunk, index: int, drain: Callable[[int, memoryview, int], int]) -> int:
        try:
            slot = self.view(chunk.slot, chunk.length_bytes)
        except Closed:
            self._mapped()  # raises if it is this client that is closed
            return NO_SUM
        return drain(index, slot, chunk.checksum)

    def _length(self, key: ChunkKey) -> int:
        group = self.groups.get(int.from_bytes(key[-4:], "big"))
        if group is None:
            raise Malformed("key", f"cache group {key[-4:].hex()} was not named at attach")
        return group.chunk_bytes

    def _mapped(self) -> tuple[RegionView, TableReader]:
        memory = self._memory
        if memory is None or self._closed.is_set():
            raise Closed("the pool client")
        return memory

    def _on_attached(self, reply: Attached) -> Remapped:
        """Know the pool, and map its memory if it is not the one that is mapped."""
        self.node = reply.node
        self.attachments += 1
        self.on_attach()
        self.media = tuple(reply.media)
        self.peer_endpoint = reply.peer_endpoint
        if reply.lease_s != self._lease_s:
            self._lease_s = reply.lease_s
            self._lease_changed.set()
        self.namespace_id = NamespaceId(reply.namespace_id)
        known = self._memory
        try:
            if known is not None and known[0].is_at(reply.control_path):
                return Remapped.SAME
            region = RegionView.attach(reply.control_path, reply.segment_paths)
        except OSError as error:
            raise Unavailable(f"the region of node {reply.node}", 0.0, str(error)) from error
        # The memory known before is unmapped when the last thread that looks at it lets go.
        self._memory = region, TableReader(region.control)
        return Remapped.OTHER

    def _ask(self, body: Message, expected: type[R], timeout_s: float | None = None) -> R:
        reply = self._send(body, timeout_s)
        if not isinstance(reply, expected):
            raise Malformed(type(body).__name__, f"the pool answered {type(reply).__name__}")
        return reply

    def _send(self, body: Message, timeout_s: float | None = None) -> Message:
        return self._channel.ask(body, self.timeout_s if timeout_s is None else timeout_s)

    def _renew_leases(self) -> None:
        while not self._closed.is_set():
            if self._lease_changed.wait(self._lease_s / RENEWALS_PER_LEASE):
                self._lease_changed.clear()
                continue
            try:
                self._send(Renew())
            except FabricError:
                continue


def _nobody() -> None:
    return
