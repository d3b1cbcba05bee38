"""The control file of a pool: a header, a table of slot records, and an index of their keys.

Ownership. The pool's process is the only writer. Clients map the file read-only and read it while
it is being written.

Lifecycle. The file outlives the pool's process: the next one reads the records back, and they alone
say what is in the slots. The index is only a way to find them and is rebuilt from them.

Failure. A record is published by its state word, which is stored last and read first. A record that
was half written when its writer died, or whose bits have changed, fails its checksum or has a state
word that is no state, and is not believed. The state word repeats the state's number in each of its
eight bytes, so that no few flipped bits turn one state into another; zeros mean FREE.

Threading. A bucket of the index is a sequence lock: its number is odd while it is being written.
A slot's record changes its key only while no bucket names it, so that a reader who finds the number
of the bucket unchanged after reading the record has read a record that belonged to the key. This
relies on stores becoming visible in order, as on x86; elsewhere a reader may now and then be wrong,
and the pin, which the pool decides by key and generation, puts it right.

All numbers are little-endian. `docs/protocol.md` has the tables; `tests/golden` has the bytes.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from .checksum import ALGORITHM_XXH3_PIECES
from .errors import Corrupt, Malformed
from .types import KEY_BYTES_MAX, NAMESPACE_BYTES, ChunkKey, KeyBatch, NamespaceId, SlotState

MAGIC = b"KVFABCTL"
VERSION = 1
PAGE_BYTES = 4096
"""The header's room, and the alignment of the parts after it."""

KEY_BYTES_MIN = 12
"""The low 64 bits of a digest and a group index: what the tag of a key is made from."""
_GROUP_FACTOR = 0x9E3779B97F4A7C15
_WORD_MAX = (1 << 64) - 1
_LOW_WORD = 3
"""Of a record whose key has 32 bytes of digest: the digest's last eight, big-endian."""

RECORD_BYTES = 128
IDENTITY_BYTES = 56
"""Key, its length and the namespace: the part of a record that a reader compares."""
BODY_BYTES = 112
"""What the record's checksum covers: everything before it."""
CHECKSUM_OFFSET = 72
OWNER_OFFSET = 84
RECORD_CHECKSUM_OFFSET = 112
STATE_OFFSET = 120

BUCKET_BYTES = 128
BUCKET_ENTRIES = 8
TAGS_OFFSET = 8
SLOTS_OFFSET = 72
PROBES_MAX = 64
"""Buckets that a search visits. At half load a bucket of 8 overflows once in fifty, and a run of
even 16 full ones does not happen to hashed keys; past the bound a chunk is kept without being
indexed, which costs a lookup by shared memory and nothing else."""

SLOT_COUNT_MAX = (1 << 32) - 2
"""An entry of the index holds slot + 1 in 32 bits."""

HEADER = struct.Struct("<8sIIQQQQIIQ")
BODY = struct.Struct("<36sI16sQQQIIQ16x")
_U64 = struct.Struct("<Q")
_KEY_BYTES_MAX_LE = np.frombuffer(struct.pack("<I", KEY_BYTES_MAX), np.uint8)
_STATE_WORD_UNIT = 0x0101010101010101

STATE_WORDS: tuple[int, ...] = tuple(state * _STATE_WORD_UNIT for state in SlotState)
"""The state word of each `SlotState`, by its number."""


@dataclass(frozen=True, slots=True)
class TableHeader:
    """What the first page says."""

    epoch: int
    """Of the pool that opened the file last; grows with every opening."""
    slot_count: int
    slot_bytes: int
    segment_bytes: int
    segment_count: int
    bucket_count: int
    """A power of two, at least a quarter of the slots: the index is never more than half full."""
    checksum_algorithm: int = ALGORITHM_XXH3_PIECES

    @property
    def geometry(self) -> tuple[int, ...]:
        """Everything but the epoch: what must be equal for a file to be adopted."""
        return (
            self.slot_count,
            self.slot_bytes,
            self.segment_bytes,
            self.segment_count,
            self.bucket_count,
            self.checksum_algorithm,
        )

    def encode(self) -> bytes:
        """Return the fields and their hash: 72 bytes at the start of the header page."""
        fields = HEADER.pack(
            MAGIC,
            VERSION,
            self.checksum_algorithm,
            self.epoch,
            self.slot_count,
            self.slot_bytes,
            self.segment_bytes,
            self.segment_count,
            0,
            self.bucket_count,
        )
        return fields + _U64.pack(xxhash.xxh3_64_intdigest(fields))

    @classmethod
    def decode(cls, control: memoryview | bytes) -> "TableHeader":
        """Read the header of a whole control file.

        Raises `Corrupt` if it is not one or has changed, `Malformed` if another version wrote it.
        """
        if len(control) < PAGE_BYTES:
            raise Corrupt("control file", f"{len(control)} bytes, shorter than its header page")
        fields = HEADER.unpack_from(control)
        if fields[0] != MAGIC:
            raise Corrupt("control file", f"it begins with {fields[0]!r}, not {MAGIC!r}")
        if fields[1] != VERSION:
            raise Malformed("control file", f"version {fields[1]}, this side reads {VERSION}")
        digest = xxhash.xxh3_64_intdigest(bytes(control[: HEADER.size]))
        if _U64.unpack_from(control, HEADER.size)[0] != digest:
            raise Corrupt("control file", "the hash of its header does not match")
        algorithm, epoch, slot_count, slot_bytes, segment_bytes, segments = fields[2:8]
        if algorithm != ALGORITHM_XXH3_PIECES:
            raise Malformed("control file", f"checksum algorithm {algorithm} is not known here")
        header = cls(epoch, slot_count, slot_bytes, segment_bytes, segments, fields[9], algorithm)
        if header.bucket_count != bucket_count_for(slot_count):
            raise Corrupt("control file", f"{header.bucket_count} buckets for {slot_count} slots")
        if len(control) < control_bytes(slot_count):
            raise Corrupt(
                "control file", f"{len(control)} bytes are too few for {slot_count} slots"
            )
        return header


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """One record of the slot table."""

    key: ChunkKey
    namespace: NamespaceId
    generation: int
    length_bytes: int
    checksum: int
    """Of the chunk's bytes; 0 until it is committed."""
    depth: int
    owner_pid: int
    """The process that may write the slot; 0 once the chunk is committed."""
    owner_started: int
    state: SlotState

    def encode(self) -> bytes:
        """Return the 128 bytes."""
        body = BODY.pack(
            self.key,
            len(self.key),
            self.namespace,
            self.generation,
            self.length_bytes,
            self.checksum,
            self.depth,
            self.owner_pid,
            self.owner_started,
        )
        digest = xxhash.xxh3_64_intdigest(body)
        return body + _U64.pack(digest) + _U64.pack(STATE_WORDS[self.state])

    @classmethod
    def decode(cls, record: memoryview | bytes) -> "SlotRecord":
        """Read 128 bytes. Raises `Corrupt` for what no writer finished or has changed since."""
        body = bytes(record[:BODY_BYTES])
        if _U64.unpack_from(record, RECORD_CHECKSUM_OFFSET)[0] != xxhash.xxh3_64_intdigest(body):
            raise Corrupt("slot record", "its checksum does not match")
        word = _U64.unpack_from(record, STATE_OFFSET)[0]
        if word not in STATE_WORDS:
            raise Corrupt("slot record", f"state word {word:#x} is no state")
        key, key_bytes, namespace, generation, length, checksum, depth, pid, started = BODY.unpack(
            body
        )
        if key_bytes > KEY_BYTES_MAX:
            raise Corrupt("slot record", f"a key of {key_bytes} bytes")
        state = SlotState(STATE_WORDS.index(word))
        if state is SlotState.READY and checksum == 0:
            raise Corrupt("slot record", "it is ready without a checksum of its bytes")
        return cls(
            key=ChunkKey(key[:key_bytes]),
            namespace=NamespaceId(namespace),
            generation=generation,
            length_bytes=length,
            checksum=checksum,
            depth=depth,
            owner_pid=pid,
            owner_started=started,
            state=state,
        )


def bucket_count_for(slot_count: int) -> int:
    """Return the power of two of buckets that `slot_count` keys fill at most half."""
    needed = -(-2 * slot_count // BUCKET_ENTRIES)
    return 1 << max(needed - 1, 0).bit_length()


def record_offset(slot: int) -> int:
    """Return where a slot's record begins in the control file."""
    return PAGE_BYTES + slot * RECORD_BYTES


def buckets_offset(slot_count: int) -> int:
    """Return where the key index begins in the control file."""
    return _page_up(record_offset(slot_count))


def control_bytes(slot_count: int) -> int:
    """Return the size of a control file: header page, records, index, each a whole page."""
    return _page_up(buckets_offset(slot_count) + bucket_count_for(slot_count) * BUCKET_BYTES)


def require_key(key: bytes) -> None:
    """Raise `Malformed` for bytes that cannot be a chunk's key."""
    if not KEY_BYTES_MIN <= len(key) <= KEY_BYTES_MAX:
        raise Malformed("key", f"{len(key)} bytes, not {KEY_BYTES_MIN} to {KEY_BYTES_MAX}")


def tags_of(namespace: bytes, keys: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    """Return the tag of each key: shape [len(keys)], uint64.

    The low 64 bits of the digest, the group and the namespace, mixed by the finalizer of SplitMix64
    (Steele, Lea and Flood 2014), so that the low bits may choose a bucket. Raises `Malformed` for
    bytes that cannot be a key.
    """
    lengths = set(map(len, keys))
    if len(lengths) == 1:
        require_key(keys[0])
        return _mix(namespace, b"".join(keys), lengths.pop())
    tags = np.empty(len(keys), np.uint64)
    for length in lengths:
        lanes = [lane for lane, key in enumerate(keys) if len(key) == length]
        require_key(keys[lanes[0]])
        tags[lanes] = _mix(namespace, b"".join([keys[lane] for lane in lanes]), length)
    return tags


def lookups_of(
    namespace: bytes, keys: Sequence[bytes]
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Return what a reader of the table needs of every key, in one pass.

    The first 56 bytes of the key's record as words, shape [len(keys), 7], uint64, and its tag,
    shape [len(keys)], uint64. Raises `Malformed` for bytes that cannot be a key.
    """
    rows = np.empty((len(keys), IDENTITY_BYTES), np.uint8)
    if isinstance(keys, KeyBatch) and keys.key_bytes == KEY_BYTES_MAX:
        return _batch_lookups(namespace, keys, rows)
    lengths = set(map(len, keys))
    if lengths == {KEY_BYTES_MAX}:
        joined = b"".join(keys)
        tags = _mix(namespace, joined, KEY_BYTES_MAX)
        rows[:, KEY_BYTES_MAX:40] = _KEY_BYTES_MAX_LE
    else:
        tags = tags_of(namespace, keys)
        joined = b"".join([key.ljust(KEY_BYTES_MAX, b"\0") for key in keys])
        sizes = np.fromiter(map(len, keys), "<u4", len(keys))
        rows[:, KEY_BYTES_MAX:40] = sizes[:, None].view(np.uint8)
    rows[:, :KEY_BYTES_MAX] = np.frombuffer(joined, np.uint8).reshape(-1, KEY_BYTES_MAX)
    rows[:, 40:] = np.frombuffer(namespace, np.uint8, NAMESPACE_BYTES)
    return rows.view("<u8"), tags


def _batch_lookups(
    namespace: bytes, keys: KeyBatch, rows: npt.NDArray[np.uint8]
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """As `lookups_of` for keys of one group and 32 bytes of digest, with fewer passes."""
    rows[:, :KEY_BYTES_MAX] = np.frombuffer(keys.joined, np.uint8).reshape(-1, KEY_BYTES_MAX)
    rows[:, KEY_BYTES_MAX:40] = _KEY_BYTES_MAX_LE
    rows[:, 40:] = np.frombuffer(namespace, np.uint8, NAMESPACE_BYTES)
    words = rows.view("<u8")
    low = words[:, _LOW_WORD].byteswap()
    return words, _mixed(low, keys.group * _GROUP_FACTOR & _WORD_MAX, namespace)


def _mix(namespace: bytes, joined: bytes, key_bytes: int) -> npt.NDArray[np.uint64]:
    fields = np.dtype(
        {
            "names": ["low", "group"],
            "formats": [">u8", ">u4"],
            "offsets": [key_bytes - KEY_BYTES_MIN, key_bytes - 4],
            "itemsize": key_bytes,
        }
    )
    keys = np.frombuffer(joined, fields)
    groups = keys["group"].astype(np.uint64) * np.uint64(_GROUP_FACTOR)
    return _mixed(keys["low"].astype(np.uint64), groups, namespace)


def _mixed(
    low: npt.NDArray[np.uint64], groups: npt.NDArray[np.uint64] | int, namespace: bytes
) -> npt.NDArray[np.uint64]:
    """Mix the low words of digests, in place, with their groups and the namespace."""
    if isinstance(groups, int):
        low ^= np.uint64(groups ^ xxhash.xxh3_64_intdigest(namespace))
    else:
        low ^= groups
        low ^= np.uint64(xxhash.xxh3_64_intdigest(namespace))
    low ^= low >> np.uint64(30)
    low *= np.uint64(0xBF58476D1CE4E5B9)
    low ^= low >> np.uint64(27)
    low *= np.uint64(0x94D049BB133111EB)
    low ^= low >> np.uint64(31)
    return low


def _page_up(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
