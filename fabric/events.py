"""KV events: vLLM's wire, the fabric's topic with an epoch, and the snapshot that vLLM lacks.

A message has three frames: topic (UTF-8), sequence number (8 bytes, big-endian, from 0) and a
msgpack payload `[ts, events, data_parallel_rank]`. Events are maps whose key `type` names the
class; until vLLM 0.22 they were arrays that begin with the class's name. Both forms are read, the
map form is written. Unknown keys of maps and extra elements of arrays are skipped, because vLLM
adds fields; an unknown event is refused, because nobody can know what it did.

The topic of a pool's stream is `kvfabric@<node>@<epoch>`: vLLM's wire says nothing when a publisher
restarts, ours does. A batch without events is a heartbeat; it takes a sequence number like any
other, so that a lost last message is noticed one heartbeat later.

Whoever fell out of the replay buffer asks for a snapshot: all residencies of the source as packed
little-endian hashes, and the number of the first batch that is not in them.

A publisher answers on a ROUTER socket. `replay_request` and `parse_reply` are both sides of it.
Everything here is pure; every size is bounded; whatever is not in this form is `Malformed`.
"""

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

import msgspec
import numpy as np
import numpy.typing as npt

from .errors import Malformed
from .types import Medium

PAYLOAD_BYTES_MAX = 16 << 20
"""A step that stores a million tokens is about 5 MiB; three times that is not a step."""
SNAPSHOT_BYTES_MAX = 256 << 20
"""32 million residencies of 8 bytes: a node with 32 TiB in chunks of 1 MiB."""
TOPIC_BYTES_MAX = 512
EVENTS_MAX = 65_536
"""Events in one batch: vLLM removes block by block, so a step may have thousands."""
HASHES_MAX = 65_536
"""Hashes in one event: a million tokens in blocks of 16."""
HASH_BYTES_MAX = 64
NAME_CHARS_MAX = 256

SEQUENCE = struct.Struct(">Q")
END_SEQ = 2**64 - 1
"""Marks the end of a replay (vLLM writes -1, signed)."""
SNAPSHOT_SEQ = 2**64 - 2
"""Asked as the start of a replay it means: the snapshot, please. vLLM answers with its end mark
only, which says that it has none."""
LOW64 = 2**64 - 1

Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]
BlockHash = int | Annotated[bytes, msgspec.Meta(min_length=8, max_length=HASH_BYTES_MAX)]
"""The low 64 bits as a number, or the whole digest (VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0)."""
Hashes = Annotated[tuple[BlockHash, ...], msgspec.Meta(max_length=HASHES_MAX)]
Frames = list[bytes]
"""One ZeroMQ message."""


class BlockStored(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """Blocks became readable in a medium. Fields and their order are vLLM 0.33's.

    Without `token_ids` and with `parent_block_hash` None it is a placeholder that knows hashes
    only. That is all the fabric's pools publish, with `block_size` = tokens of a chunk; vLLM's
    offload placeholders say 0 there.
    """

    block_hashes: Hashes
    parent_block_hash: BlockHash | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None
    medium: Name | None
    lora_name: Name | None
    extra_keys: tuple[Any, ...] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: Name | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: Name | None = None
    ownership: Name | None = None
    session_id: Name | None = None
    lookahead_token_ids: tuple[Any, ...] | None = None


class BlockRemoved(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """Blocks left a medium."""

    block_hashes: Hashes
    medium: Name | None
    group_idx: int | None = None
    locality: Name | None = None
    ownership: Name | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """The engine reset its GPU prefix cache. It says no medium: host and storage may survive."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, frozen=True):
    """What one message carries. `ts` is in seconds since the epoch, on the publisher's clock."""

    ts: float
    events: Annotated[tuple[Event, ...], msgspec.Meta(max_length=EVENTS_MAX)]
    data_parallel_rank: int | None = None


class _StoredArray(
    msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, tag="BlockStored"
):
    block_hashes: Hashes
    parent_block_hash: BlockHash | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None = None
    medium: Name | None = None
    lora_name: Name | None = None
    extra_keys: tuple[Any, ...] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: Name | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: Name | None = None
    ownership: Name | None = None
    session_id: Name | None = None
    lookahead_token_ids: tuple[Any, ...] | None = None


class _RemovedArray(msgspec.Struct, frozen=True, array_like=True, tag="BlockRemoved"):
    block_hashes: Hashes
    medium: Name | None = None
    group_idx: int | None = None
    locality: Name | None = None
    ownership: Name | None = None


class _ClearedArray(msgspec.Struct, frozen=True, array_like=True, tag="AllBlocksCleared"):
    pass


class _ArrayBatch(msgspec.Struct, array_like=True, frozen=True):
    ts: float
    events: Annotated[
        tuple[_StoredArray | _RemovedArray | _ClearedArray, ...],
        msgspec.Meta(max_length=EVENTS_MAX),
    ]
    data_parallel_rank: int | None = None


class SnapshotSection(msgspec.Struct, array_like=True, frozen=True):
    """The residencies of one cache group in one medium.

    `hashes` is little-endian uint64, in any order; a hash that was announced n times and not
    removed stands there n times.
    """

    group: int
    medium: Name
    chunk_tokens: int
    hashes: bytes

    def array(self) -> npt.NDArray[np.uint64]:
        """Return the hashes as uint64[n]; reads the message's bytes in place where it can."""
        return np.frombuffer(self.hashes, dtype="<u8").astype(np.uint64, copy=False)


class Snapshot(msgspec.Struct, array_like=True, frozen=True, tag="Snapshot"):
    """All that a source holds. `next_seq` numbers the first batch that is not contained."""

    node: str
    epoch: int
    next_seq: int
    ts: float
    sections: Annotated[tuple[SnapshotSection, ...], msgspec.Meta(max_length=EVENTS_MAX)]


@dataclass(frozen=True, slots=True)
class PoolTopic:
    """The topic of a pool's stream. `node` identifies the source, `epoch` one life of it."""

    node: str
    epoch: int


@dataclass(frozen=True, slots=True)
class ForeignTopic:
    """Anybody else's topic, such as vLLM's: it has no epoch."""

    text: str


@dataclass(frozen=True, slots=True)
class Message:
    """The three frames of a message, read apart from the payload."""

    topic: PoolTopic | ForeignTopic
    seq: int
    payload: bytes

    @property
    def epoch(self) -> int:
        """The publisher's epoch; 0 where the stream has none."""
        return self.topic.epoch if isinstance(self.topic, PoolTopic) else 0


@dataclass(frozen=True, slots=True)
class EndOfReplay:
    """The publisher has sent all that it was asked for."""


_TOPIC = re.compile(r"kvfabric@([A-Za-z0-9_.-]{1,64})@(0|[1-9][0-9]{0,19})")
_encoder = msgspec.msgpack.Encoder()
_maps = msgspec.msgpack.Decoder(EventBatch)
_arrays = msgspec.msgpack.Decoder(_ArrayBatch)
_snapshots = msgspec.msgpack.Decoder(Snapshot)


def format_topic(node: str, epoch: int) -> bytes:
    """Return the topic frame of a pool. Raises `Malformed` for a name that a config refuses too."""
    text = f"kvfabric@{node}@{epoch}"
    if not _TOPIC.fullmatch(text) or epoch > LOW64:
        raise Malformed("topic", f"{text!r} does not match {_TOPIC.pattern}")
    return text.encode()


def parse_topic(frame: bytes) -> PoolTopic | ForeignTopic:
    """Read a topic frame. Raises `Malformed` for one too long, not UTF-8, or half ours."""
    if len(frame) > TOPIC_BYTES_MAX:
        raise Malformed("topic", f"{len(frame)} bytes, more than {TOPIC_BYTES_MAX}")
    try:
        text = frame.decode()
    except UnicodeDecodeError as error:
        raise Malformed("topic", str(error)) from error
    if not text.startswith("kvfabric@"):
        return ForeignTopic(text)
    match = _TOPIC.fullmatch(text)
    if match is None or int(match[2]) > LOW64:
        raise Malformed("topic", f"{text!r} does not match {_TOPIC.pattern}")
    return PoolTopic(match[1], int(match[2]))


def encode_batch(batch: EventBatch) -> bytes:
    """Return the payload of a batch, in vLLM's current form."""
    return _encoder.encode(batch)


def decode_batch(payload: bytes) -> EventBatch:
    """Read a payload in either form. Raises `Malformed`."""
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise Malformed("event batch", f"{len(payload)} bytes, more than {PAYLOAD_BYTES_MAX}")
    try:
        return _maps.decode(payload)
    except msgspec.ValidationError as error:
        return _decode_arrays(payload, error)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed("event batch", str(error)) from error


def _decode_arrays(payload: bytes, as_maps: Exception) -> EventBatch:
    try:
        batch = _arrays.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed("event batch", f"as maps: {as_maps}; as arrays: {error}") from error
    events = tuple(_from_array(event) for event in batch.events)
    return EventBatch(batch.ts, events, batch.data_parallel_rank)


def _from_array(event: _StoredArray | _RemovedArray | _ClearedArray) -> Event:
    if isinstance(event, _StoredArray):
        return BlockStored(*msgspec.structs.astuple(event))
    if isinstance(event, _RemovedArray):
        return BlockRemoved(*msgspec.structs.astuple(event))
    return AllBlocksCleared()


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """Return the payload of a snapshot. Raises `Malformed` for one beyond the bound."""
    payload = _encoder.encode(snapshot)
    if len(payload) > SNAPSHOT_BYTES_MAX:
        raise Malformed("snapshot", f"{len(payload)} bytes, more than {SNAPSHOT_BYTES_MAX}")
    return payload


def decode_snapshot(payload: bytes) -> Snapshot:
    """Read a snapshot. Raises `Malformed`."""
    if len(payload) > SNAPSHOT_BYTES_MAX:
        raise Malformed("snapshot", f"{len(payload)} bytes, more than {SNAPSHOT_BYTES_MAX}")
    try:
        snapshot = _snapshots.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed("snapshot", str(error)) from error
    for section in snapshot.sections:
        if len(section.hashes) % 8:
            raise Malformed("snapshot", f"{len(section.hashes)} bytes of hashes of 8 bytes")
    return snapshot


def parse_message(frames: Sequence[bytes]) -> Message:
    """Read the frames of a live message. Raises `Malformed`."""
    if len(frames) != 3:
        raise Malformed("event message", f"{len(frames)} frames, expected topic, seq, payload")
    topic, seq, payload = frames
    if len(seq) != SEQUENCE.size:
        raise Malformed("event message", f"sequence number of {len(seq)} bytes")
    return Message(parse_topic(topic), SEQUENCE.unpack(seq)[0], payload)


def parse_reply(frames: Sequence[bytes]) -> Message | EndOfReplay:
    """Read the frames that a DEALER gets: empty, topic, seq, payload. Raises `Malformed`.

    A message whose number is `SNAPSHOT_SEQ` has a snapshot as its payload.
    """
    if len(frames) != 4 or frames[0]:
        raise Malformed(
            "replay reply", f"{len(frames)} frames, expected empty, topic, seq, payload"
        )
    if frames[2] == SEQUENCE.pack(END_SEQ):
        return EndOfReplay()
    return parse_message(frames[1:])


def replay_request(start_seq: int) -> Frames:
    """Return the frames that a DEALER sends. `SNAPSHOT_SEQ` asks for the snapshot."""
    return [b"", SEQUENCE.pack(start_seq)]


def parse_replay_request(frames: Sequence[bytes]) -> int:
    """Read what a ROUTER gets behind the identity: empty, start. Raises `Malformed`."""
    if len(frames) != 2 or frames[0] or len(frames[1]) != SEQUENCE.size:
        raise Malformed("replay request", "expected an empty frame and 8 bytes of start")
    return int(SEQUENCE.unpack(frames[1])[0])


def hash_low64(value: int | bytes) -> int:
    """Return the low 64 bits of a published hash, in whatever form it came (SGLang signs them)."""
    number = value if isinstance(value, int) else int.from_bytes(value[-8:], "big")
    return number & LOW64


def hashes_low64(values: Sequence[int | bytes]) -> list[int]:
    """Return the low 64 bits of each; plain unsigned numbers, the usual case, pass as they are."""
    if values and set(map(type, values)) == {int} and min(cast("Sequence[int]", values)) >= 0:
        return list(cast("Sequence[int]", values))
    return [hash_low64(value) for value in values]


def chunks_stored(
    hashes: Sequence[int], group: int, medium: Medium, chunk_tokens: int
) -> BlockStored:
    """Return the event by which a pool announces chunks: low 64 bits of the digests, no tokens."""
    return BlockStored(
        block_hashes=tuple(hashes),
        parent_block_hash=None,
        token_ids=(),
        block_size=chunk_tokens,
        lora_id=None,
        medium=medium.name,
        lora_name=None,
        group_idx=group,
    )


def chunks_removed(hashes: Sequence[int], group: int, medium: Medium) -> BlockRemoved:
    """Return the event by which a pool takes chunks back."""
    return BlockRemoved(block_hashes=tuple(hashes), medium=medium.name, group_idx=group)
