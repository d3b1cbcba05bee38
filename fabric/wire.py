"""Messages of the control plane, and the envelope they travel in.

One ZeroMQ frame holds one envelope: a msgpack array `[version, epoch, request, body]`, where body
is an array that begins with the message's tag. `epoch` is the sender's epoch when a pool speaks and
the epoch that the sender believes in when a client or peer does (0 before it knows one). `request`
is chosen by the asker and repeated in the answer. One message names many chunks.

`docs/protocol.md` has the tables; `tests/golden` has the bytes.
"""

import msgspec

from .errors import Malformed
from .types import Committed, Lookup, Released, Reserved

VERSION = 1
MESSAGE_BYTES_MAX = 8 << 20
"""A message of 100,000 keys is 4 MiB; anything larger than twice that is not one of ours."""
BATCH_CHUNKS_MAX = 65_536
"""Chunks in one message. 65,536 chunks of 16 tokens are a million tokens."""
SOURCES_PER_CHUNK_MAX = 16
"""Sources that a pin may name, on average over its chunks. Each that is dead costs a deadline, so
nobody has time for more; and a pool looks at every one."""


class Body(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The root of all messages."""


class GroupGeometry(msgspec.Struct, array_like=True, frozen=True):
    """What a pool must know of a cache group: its index, and how long its chunks are."""

    group: int
    chunk_tokens: int
    chunk_bytes: int


class Attach(Body, frozen=True, tag="attach"):
    """A client's first message to the pool of its node."""

    client: str
    pid: int
    pid_started: int
    """When it started, in clock ticks since boot: a reused pid is not mistaken."""
    namespace: dict[str, str]
    groups: list[GroupGeometry]


class Attached(Body, frozen=True, tag="attached"):
    """The pool's welcome: where its memory is, and for how long a lease runs."""

    node: str
    namespace_id: bytes
    control_path: str
    segment_paths: list[str]
    slot_bytes: int
    lease_s: float
    media: list[str]
    """Names of the pool's tiers below host memory, fastest first."""
    peer_endpoint: str
    """Where other pools and routers reach it; empty if it serves no peers."""


class Refused(Body, frozen=True, tag="refused"):
    """No, with the field that is to blame. Answers any message that cannot be carried out."""

    field: str
    ours: str
    theirs: str


class Reserve(Body, frozen=True, tag="reserve"):
    """Ask for slots to write. All or nothing: room for every chunk not here yet, or BUSY."""

    namespace_id: bytes
    keys: list[bytes]
    depths: list[int]
    """Position of the chunk in its request, counted from the head: the tail is evicted first."""


class ReserveReply(Body, frozen=True, tag="reserved"):
    """One status, slot and generation for each key asked."""

    statuses: list[Reserved]
    slots: list[int]
    generations: list[int]


class Commit(Body, frozen=True, tag="commit"):
    """The bytes are in place: publish them under these checksums."""

    slots: list[int]
    generations: list[int]
    checksums: list[int]


class CommitReply(Body, frozen=True, tag="committed"):
    """What became of each."""

    statuses: list[Committed]


class Abort(Body, frozen=True, tag="abort"):
    """These slots will not be written any more. Frees quarantined ones of the sender too."""

    slots: list[int]
    generations: list[int]


class SourceRangeWire(msgspec.Struct, array_like=True, frozen=True):
    """`fabric.types.SourceRange` on the wire."""

    node: str
    endpoint: str
    start: int
    count: int


class Pin(Body, frozen=True, tag="pin"):
    """Forbid the reuse of these chunks' slots while the sender reads them.

    With `wait_s` above 0 the pool also fetches what it lacks from its tiers and from `sources`, and
    answers when every chunk is decided or the time is up (what is then pending is a MISS).
    """

    namespace_id: bytes
    keys: list[bytes]
    wait_s: float
    sources: list[SourceRangeWire]


class PinReply(Body, frozen=True, tag="pinned"):
    """One status for each key; slot, generation, checksum and origin count where it is HIT."""

    statuses: list[Lookup]
    slots: list[int]
    generations: list[int]
    checksums: list[int]
    origins: list[str]
    """"host" if it was here, else the tier's name ("fs"), or "peer"."""


class Release(Body, frozen=True, tag="release"):
    """The pins are not needed any more."""

    slots: list[int]
    generations: list[int]


class ReleaseReply(Body, frozen=True, tag="released"):
    """Whether each pin had held until now."""

    statuses: list[Released]


class Drop(Body, frozen=True, tag="drop"):
    """A reader found these chunks' bytes corrupt: verify, and take out what is."""

    slots: list[int]
    generations: list[int]


class OnGpu(Body, frozen=True, tag="gpu"):
    """What the sender's engine has in its own cache, in keys of whole chunks.

    Sent twice it changes nothing more. `BATCH_CHUNKS_MAX` keys in all.
    """

    whole: bool
    """`stored` is all that it has: whatever was said before is over."""
    stored: list[bytes]
    removed: list[bytes]


class Renew(Body, frozen=True, tag="renew"):
    """I am alive: extend all my leases."""


class Detach(Body, frozen=True, tag="detach"):
    """I am leaving, hold nothing, and will write nothing."""


class Ok(Body, frozen=True, tag="ok"):
    """Done; there is nothing else to say."""


class StatsAsk(Body, frozen=True, tag="stats"):
    """Ask for gauges and counts."""


class StatsReply(Body, frozen=True, tag="stats_reply"):
    """Gauges and counts by name."""

    values: dict[str, float]


class Stale(Body, frozen=True, tag="stale"):
    """The sender believes in an epoch that is over: attach (or say hello) again."""


class Hello(Body, frozen=True, tag="hello"):
    """A peer's first message: who it is and how its memory can be read."""

    node: str
    agent: bytes
    """NIXL agent metadata; empty if the peer has no such transport."""


class Welcome(Body, frozen=True, tag="welcome"):
    """The answer to hello, with the addresses of the source's segments."""

    node: str
    agent: bytes
    segment_addresses: list[int]
    segment_bytes: list[int]
    slot_bytes: int


class Lease(Body, frozen=True, tag="lease"):
    """Ask to read these chunks; pins what is here for `lease_s`, counted by the source."""

    namespace_id: bytes
    keys: list[bytes]
    lease_s: float


class Grant(Body, frozen=True, tag="grant"):
    """What may be read, chunk by chunk, and until when."""

    statuses: list[Lookup]
    segments: list[int]
    offsets: list[int]
    lengths: list[int]
    slots: list[int]
    generations: list[int]
    checksums: list[int]
    lease_s: float


class Bye(Body, frozen=True, tag="bye"):
    """The sender is closing; what it was granted is free."""


Message = (
    Attach | Attached | Refused | Reserve | ReserveReply | Commit | CommitReply | Abort | Pin
    | PinReply | Release | ReleaseReply | Drop | OnGpu | Renew | Detach | Ok | StatsAsk | StatsReply
    | Stale | Hello | Welcome | Lease | Grant | Bye
)  # fmt: skip
"""Every body that may travel. Release and Renew serve clients and peers alike."""


class Envelope(msgspec.Struct, array_like=True, frozen=True):
    """What one frame holds."""

    version: int
    epoch: int
    request: int
    body: Message


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def encode(epoch: int, request: int, body: Message) -> bytes:
    """Return the frame for a message."""
    return _encoder.encode(Envelope(VERSION, epoch, request, body))


def decode(frame: bytes | memoryview) -> Envelope:
    """Read a frame. Raises `Malformed` for whatever is not a message of this version."""
    if len(frame) > MESSAGE_BYTES_MAX:
        raise Malformed("message", f"{len(frame)} bytes, more than {MESSAGE_BYTES_MAX}")
    try:
        envelope = _decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Malformed("message", str(error)) from error
    if envelope.version != VERSION:
        raise Malformed("message", f"version {envelope.version}, this side speaks {VERSION}")
    return envelope
