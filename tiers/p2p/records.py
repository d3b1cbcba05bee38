"""What the pulling side keeps of its sources, pulls and reads. Used by `consumer` alone."""

from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf, isfinite

from ...fabric.errors import Malformed
from ...fabric.types import Lookup, SlotRef
from ...fabric.wire import Grant, Message, Refused, ReleaseReply, Stale, Welcome
from .actions import Arrival, Pull


class SourceState(IntEnum):
    """How we stand with a source."""

    GREETING = 0
    """Hello is under way; pulls wait."""
    READY = 1
    SUSPECT = 2
    """It missed its deadline or failed: not asked until its time is up and its reads are over."""


class PullState(IntEnum):
    """Where a pull stands."""

    WAITING = 0
    """For the source's welcome."""
    LEASING = 1
    """For the grant."""
    RESERVING = 2
    """For slots of this pool."""
    READING = 3
    """Chunks are to be read, being read, or being verified."""


class AskedKind(IntEnum):
    """What a request of ours was."""

    HELLO = 0
    LEASE = 1
    RELEASE = 2


class ReadStage(IntEnum):
    """Where a read stands."""

    RUNNING = 0
    """The transport may write its slots."""
    DOOMED = 1
    """So it may, but its pull is over."""
    VERIFYING = 2


@dataclass(slots=True, eq=False)
class AskedRecord:
    """A request without an answer."""

    kind: AskedKind
    asked_s: float
    pull: "PullRecord | None" = None


@dataclass(slots=True)
class Offer:
    """A chunk that the source pinned for us."""

    index: int
    remote_address: int
    length_bytes: int
    checksum: int


@dataclass(slots=True, eq=False)
class SourceRecord:
    """A source, from its first pull until it gives way to others."""

    endpoint: str
    used_s: float
    state: SourceState = SourceState.GREETING
    epoch: int = 0
    """0 before it said."""
    welcome: Welcome | None = None
    heard_s: float = -inf
    suspect_until_s: float = -inf
    asked: dict[int, AskedRecord] = field(default_factory=dict[int, AskedRecord])
    pulls: dict[int, "PullRecord"] = field(default_factory=dict[int, "PullRecord"])
    reads: dict[int, "ReadRecord"] = field(default_factory=dict[int, "ReadRecord"])
    """Running or doomed."""
    retired: set[bytes] = field(default_factory=set[bytes])
    """Agents that are to be removed when their last read is over."""


@dataclass(slots=True, eq=False)
class PullRecord:
    """A pull that is not over."""

    pull: Pull
    source: SourceRecord
    outcomes: list[Lookup]
    state: PullState = PullState.WAITING
    stale_seen: bool = False
    request: int = 0
    """Number of its lease, and of the release that ends it."""
    epoch: int = 0
    """Of the source when the lease was asked."""
    slots: list[int] = field(default_factory=list[int])
    generations: list[int] = field(default_factory=list[int])
    """The source's slots that are pinned for us."""
    lease_open: bool = False
    """Asked, and not released yet."""
    lease_ends_s: float = inf
    """Counted from the asking, so never later than the source counts."""
    offers: tuple[Offer, ...] = ()
    to_read: deque[Arrival] = field(default_factory=deque[Arrival])
    reads: dict[int, "ReadRecord"] = field(default_factory=dict[int, "ReadRecord"])
    """Running or verifying."""
    unverified: dict[int, Arrival] = field(default_factory=dict[int, Arrival])
    """By index: reserved, and neither verified nor given up."""
    verified: list[Arrival] = field(default_factory=list[Arrival])
    aborts: list[SlotRef] = field(default_factory=list[SlotRef])

    def running(self) -> bool:
        """Whether the transport may be writing a slot of it."""
        return any(read.stage == ReadStage.RUNNING for read in self.reads.values())


@dataclass(slots=True, eq=False)
class ReadRecord:
    """A batch of chunks, from the start of its read until it is verified."""

    read_id: int
    owner: PullRecord
    agent: bytes
    arrivals: tuple[Arrival, ...]
    started_s: float
    stage: ReadStage = ReadStage.RUNNING


@dataclass(slots=True)
class ConsumerStats:
    """Counts since the start, and the gauges of now."""

    sources: int = 0
    suspects: int = 0
    pulls: int = 0
    doomed_chunks: int = 0
    chunks: int = 0
    bytes: int = 0
    corrupt: int = 0
    lost_leases: int = 0
    silent: int = 0
    failed_reads: int = 0
    unanswered: int = 0
    late: int = 0
    malformed: int = 0
    stale: int = 0
    busy: int = 0


def answers(kind: AskedKind, body: Message) -> bool:
    """Return whether a message is an answer to such a request."""
    if kind == AskedKind.HELLO:
        return isinstance(body, Welcome | Refused)
    if kind == AskedKind.LEASE:
        return isinstance(body, Grant | Stale | Refused)
    return isinstance(body, ReleaseReply | Stale | Refused)


def usable(welcome: Welcome) -> bool:
    """Return whether a source can be read at all."""
    return (
        bool(welcome.agent)
        and bool(welcome.segment_addresses)
        and len(welcome.segment_addresses) == len(welcome.segment_bytes)
    )


def read_offers(welcome: Welcome, grant: Grant, keys: int, slot_bytes: int) -> tuple[Offer, ...]:
    """Return the chunks that a grant offers.

    Raises `Malformed` if its columns differ in length, or if a chunk lies outside its segment or is
    larger than a slot of ours. A chunk without a checksum could not be verified and is no offer.
    """
    if not (isfinite(grant.lease_s) and grant.lease_s > 0):
        raise Malformed("grant", f"a lease of {grant.lease_s} s")
    columns = (
        grant.statuses, grant.segments, grant.offsets, grant.lengths, grant.slots,
        grant.generations, grant.checksums,
    )  # fmt: skip
    if any(len(column) != keys for column in columns):
        raise Malformed("grant", f"{[len(column) for column in columns]} answers to {keys} keys")
    offers: list[Offer] = []
    for index, status in enumerate(grant.statuses):
        if status != Lookup.HIT:
            continue
        segment, offset, length = grant.segments[index], grant.offsets[index], grant.lengths[index]
        if not 0 <= segment < len(welcome.segment_addresses):
            raise Malformed("grant", f"segment {segment} of {len(welcome.segment_addresses)}")
        if not 0 < length <= slot_bytes:
            raise Malformed("grant", f"a chunk of {length} bytes, slots here have {slot_bytes}")
        if not 0 <= offset <= welcome.segment_bytes[segment] - length:
            raise Malformed("grant", f"bytes {offset} to {offset + length} of segment {segment}")
        if grant.checksums[index]:
            address = welcome.segment_addresses[segment] + offset
            offers.append(Offer(index, address, length, grant.checksums[index]))
    return tuple(offers)
