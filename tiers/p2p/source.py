"""The serving side: grants other pools the right to read chunks of this one.

Ownership. Every lease pins its chunks under an owner of its own (peer identity and request number),
so that ending one lease cannot touch another. The pool owns the slots; `Pins` is all that this side
knows of it.

Lifecycle. A peer says hello and learns the epoch, the agent and the segments. The same identity
with another agent is a peer that started anew: what it held before is free. A lease is answered by
one grant. It ends by its release, by its time, by the peer's bye, or when the source forgets the
peer; nothing else ends it, so the pool needs no timer of its own for these pins. A release travels
under the number of the lease that it ends, and cancels it if it overtakes it. A number is granted
at most once: a duplicate is answered with the same grant while it lasts and with nothing
afterwards.

Failure. A wrong epoch or an unknown peer is answered `Stale` (say hello again), a demand beyond a
bound BUSY or `Refused`, a namespace that the pool lacks MISS. A peer that dies costs its pins until
their lease ends.

Threading. One thread. Sockets and time are handed in: `handle` returns what to send.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from typing import Protocol

import msgspec

from ...fabric.config import PeerConfig
from ...fabric.errors import Conservation
from ...fabric.types import (
    KEY_BYTES_MAX,
    NAMESPACE_BYTES,
    Chunk,
    ChunkKey,
    Lookup,
    NamespaceId,
    Released,
    SlotRef,
)
from ...fabric.wire import (
    BATCH_CHUNKS_MAX,
    Bye,
    Envelope,
    Grant,
    Hello,
    Lease,
    Message,
    Ok,
    Refused,
    Release,
    ReleaseReply,
    Stale,
    Welcome,
    encode,
)
from .transport import Segment

GRANTS_PER_PEER_MAX = 256
"""Leases that one peer may hold. As many as a consumer has pulls."""
ENDED_PER_PEER_MAX = 64
"""Ended leases remembered for their duplicates; older numbers are not granted at all."""
PEER_IDLE_S = 60.0
"""A peer without leases that was silent for this long gives way to a new one."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A pinned chunk and where it lies."""

    chunk: Chunk
    segment: int
    offset_bytes: int


class Pins(Protocol):
    """What the source asks of its pool."""

    def pin(
        self,
        owner: bytes,
        namespace: NamespaceId,
        keys: Sequence[ChunkKey],
        lease_s: float,
        now_s: float,
    ) -> Sequence[Placed | Lookup]:
        """Pin what is readable. Per key a place, or why not: MISS, PENDING or BUSY.

        An unknown namespace is MISS throughout. `owner` has no pins yet.
        """
        ...

    def release(self, owner: bytes, refs: Sequence[SlotRef]) -> Sequence[Released]:
        """End these pins of the owner, and say of each whether it had held."""
        ...

    def forget(self, owner: bytes) -> None:
        """End whatever the owner still holds."""
        ...


@dataclass(frozen=True, slots=True)
class SourceDescription:
    """What a source tells of itself."""

    node: str
    epoch: int
    agent: bytes
    segments: tuple[Segment, ...]
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class Send:
    """A message for a peer."""

    identity: bytes
    epoch: int
    request: int
    body: Message

    @property
    def frame(self) -> bytes:
        """The message as it travels."""
        return encode(self.epoch, self.request, self.body)


@dataclass(slots=True)
class SourceStats:
    """Counts since the start, and the gauges of now."""

    peers: int = 0
    grants: int = 0
    pinned_chunks: int = 0
    leases: int = 0
    hits: int = 0
    expired: int = 0
    duplicates: int = 0
    stale: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class _Lease:
    owner: bytes
    refs: tuple[SlotRef, ...]
    grant: Grant
    ends_s: float


@dataclass(slots=True)
class _Peer:
    identity: bytes
    agent: bytes
    heard_s: float
    leases: dict[int, _Lease] = field(default_factory=dict[int, _Lease])
    ended: dict[int, ReleaseReply] = field(default_factory=dict[int, ReleaseReply])
    """Numbers that will not be granted any more, with what their release is answered."""
    floor: int = 0
    """Nor will any number up to this one."""

    def end(self, request: int, reply: ReleaseReply) -> None:
        self.leases.pop(request, None)
        self.ended[request] = reply
        if len(self.ended) > ENDED_PER_PEER_MAX:
            oldest = next(iter(self.ended))
            del self.ended[oldest]
            self.floor = max(self.floor, oldest)


class PullSource:
    """Leases and grants of one pool. See the module's text."""

    def __init__(self, description: SourceDescription, pins: Pins, config: PeerConfig) -> None:
        self._description, self._pins, self._config = description, pins, config
        self._peers: dict[bytes, _Peer] = {}
        self._ends_s = inf
        """No lease ends before this."""
        self._stats = SourceStats()

    def handle(self, identity: bytes, envelope: Envelope, now_s: float) -> tuple[Send, ...]:
        """Take a peer's message; return the answer, if one is due."""
        body, request = envelope.body, envelope.request
        peer = self._peers.get(identity)
        if isinstance(body, Hello):
            answer = self._hello(identity, peer, body, now_s)
        elif isinstance(body, Bye):
            if peer is not None:
                self._forget(peer)
            answer = Ok()
        elif not isinstance(body, Lease | Release):
            answer = self._refuse("message", "hello, lease, release or bye", type(body).__name__)
        elif peer is None or envelope.epoch != self._description.epoch:
            self._stats.stale += 1
            answer = Stale()
        else:
            peer.heard_s = now_s
            if isinstance(body, Release):
                answer = self._release(peer, request, body, now_s)
            elif request in peer.leases or request in peer.ended or request <= peer.floor:
                self._stats.duplicates += 1
                answer = self._repeat(peer, request, now_s)
            else:
                answer = self._lease(peer, request, body, now_s)
        if answer is None:
            return ()
        return (Send(identity, self._description.epoch, request, answer),)

    def tick(self, now_s: float) -> None:
        """End the leases whose time is over."""
        if now_s < self._ends_s:
            return
        self._ends_s = inf
        for peer in self._peers.values():
            for request, lease in tuple(peer.leases.items()):
                if lease.ends_s <= now_s:
                    self._expire(peer, request, lease)
                else:
                    self._ends_s = min(self._ends_s, lease.ends_s)

    def next_deadline_s(self) -> float:
        """Return when `tick` may have something to do; infinity if never."""
        return self._ends_s

    @property
    def has_grants(self) -> bool:
        """Whether a peer may be reading: then the transport needs `progress`."""
        return any(peer.leases for peer in self._peers.values())

    def close(self) -> None:
        """Forget all peers and end their leases."""
        for peer in tuple(self._peers.values()):
            self._forget(peer)

    def stats(self) -> SourceStats:
        """Return a copy of the counts and gauges."""
        leases = [lease for peer in self._peers.values() for lease in peer.leases.values()]
        self._stats.peers = len(self._peers)
        self._stats.grants = len(leases)
        self._stats.pinned_chunks = sum(len(lease.refs) for lease in leases)
        return replace(self._stats)

    def check(self) -> None:
        """Raise `Conservation` if a bound or the bookkeeping of leases is broken."""
        if len(self._peers) > self._config.peers_max:
            raise Conservation("peers of the source", f"{len(self._peers)}")
        for peer in self._peers.values():
            both = peer.leases.keys() & peer.ended.keys()
            if both or len(peer.leases) > GRANTS_PER_PEER_MAX:
                raise Conservation("leases of a peer", f"{len(peer.leases)}, ended too: {both}")
            if any(lease.ends_s < self._ends_s for lease in peer.leases.values()):
                raise Conservation("end of leases", f"one ends before {self._ends_s}")

    def _hello(self, identity: bytes, peer: _Peer | None, body: Hello, now_s: float) -> Message:
        ours = self._description
        if body.node == ours.node:
            return self._refuse("node", ours.node, body.node)
        if peer is not None and peer.agent != body.agent:
            self._forget(peer)
            peer = None
        if peer is None:
            if not self._make_room(now_s):
                return self._refuse("peers_max", str(self._config.peers_max), "one more")
            peer = self._peers[identity] = _Peer(identity, body.agent, now_s)
        peer.heard_s = now_s
        return Welcome(
            ours.node,
            ours.agent,
            [segment.address for segment in ours.segments],
            [segment.length_bytes for segment in ours.segments],
            ours.slot_bytes,
        )

    def _make_room(self, now_s: float) -> bool:
        if len(self._peers) < self._config.peers_max:
            return True
        idle = [
            peer
            for peer in self._peers.values()
            if not peer.leases and now_s - peer.heard_s >= PEER_IDLE_S
        ]
        if not idle:
            return False
        self._forget(min(idle, key=lambda peer: peer.heard_s))
        return True

    def _repeat(self, peer: _Peer, request: int, now_s: float) -> Message | None:
        lease = peer.leases.get(request)
        if lease is None or lease.ends_s <= now_s:
            return None
        return msgspec.structs.replace(lease.grant, lease_s=lease.ends_s - now_s)

    def _lease(self, peer: _Peer, request: int, body: Lease, now_s: float) -> Message:
        if len(body.keys) > BATCH_CHUNKS_MAX:
            return self._refuse("keys", str(BATCH_CHUNKS_MAX), str(len(body.keys)))
        if not (isfinite(body.lease_s) and body.lease_s > 0):
            return self._refuse("lease_s", "a positive number", str(body.lease_s))
        self._stats.leases += 1
        lease_s = min(body.lease_s, self._config.lease_s)
        owner = peer.identity + request.to_bytes(9, "big", signed=True)
        answers: Sequence[Placed | Lookup]
        if len(peer.leases) >= GRANTS_PER_PEER_MAX:
            answers = [Lookup.BUSY] * len(body.keys)
        elif len(body.namespace_id) != NAMESPACE_BYTES or any(
            len(key) > KEY_BYTES_MAX for key in body.keys
        ):
            answers = [Lookup.MISS] * len(body.keys)
        else:
            keys = [ChunkKey(key) for key in body.keys]
            answers = self._pins.pin(owner, NamespaceId(body.namespace_id), keys, lease_s, now_s)
        grant = _grant(answers, lease_s)
        refs = tuple(answer.chunk.slot for answer in answers if isinstance(answer, Placed))
        self._stats.hits += len(refs)
        if refs:
            peer.leases[request] = _Lease(owner, refs, grant, now_s + lease_s)
            self._ends_s = min(self._ends_s, now_s + lease_s)
        else:
            peer.end(request, ReleaseReply([]))
        return grant

    def _release(self, peer: _Peer, request: int, body: Release, now_s: float) -> Message:
        if len(body.slots) != len(body.generations):
            return self._refuse("generations", str(len(body.slots)), str(len(body.generations)))
        refs = [SlotRef(*pair) for pair in zip(body.slots, body.generations, strict=True)]
        lease = peer.leases.get(request)
        if lease is not None and lease.ends_s <= now_s:
            self._expire(peer, request, lease)
            lease = None
        if lease is None:
            reply = peer.ended.get(request)
            if reply is None or len(reply.statuses) != len(refs):
                reply = ReleaseReply([Released.LOST] * len(refs))
                if request > peer.floor and request not in peer.ended:
                    peer.end(request, reply)
            return reply
        ours = frozenset(lease.refs)
        held = dict(
            zip(
                (known := [ref for ref in dict.fromkeys(refs) if ref in ours]),
                self._pins.release(lease.owner, known),
                strict=True,
            )
        )
        self._pins.forget(lease.owner)
        reply = ReleaseReply([held.get(ref, Released.LOST) for ref in refs])
        peer.end(request, reply)
        return reply

    def _expire(self, peer: _Peer, request: int, lease: _Lease) -> None:
        self._stats.expired += 1
        self._pins.forget(lease.owner)
        peer.end(request, ReleaseReply([Released.LOST] * len(lease.refs)))

    def _forget(self, peer: _Peer) -> None:
        for lease in peer.leases.values():
            self._pins.forget(lease.owner)
        del self._peers[peer.identity]

    def _refuse(self, refused: str, ours: str, theirs: str) -> Refused:
        self._stats.refused += 1
        return Refused(refused, ours, theirs)


def _grant(answers: Sequence[Placed | Lookup], lease_s: float) -> Grant:
    """Lay the answers out in columns; whatever is not a place has zeros."""
    grant = Grant([], [], [], [], [], [], [], lease_s)
    for answer in answers:
        placed = answer if isinstance(answer, Placed) else None
        chunk = placed.chunk if placed else None
        grant.statuses.append(Lookup.HIT if isinstance(answer, Placed) else answer)
        grant.segments.append(placed.segment if placed else 0)
        grant.offsets.append(placed.offset_bytes if placed else 0)
        grant.lengths.append(chunk.length_bytes if chunk else 0)
        grant.slots.append(chunk.slot.slot if chunk else 0)
        grant.generations.append(chunk.slot.generation if chunk else 0)
        grant.checksums.append(chunk.checksum if chunk else 0)
    return grant
