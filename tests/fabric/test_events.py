"""The event wire: captures of a real engine, golden bytes, both encodings, refusals."""

import struct
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfabric.fabric import events
from kvfabric.fabric.errors import Malformed
from kvfabric.fabric.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EndOfReplay,
    EventBatch,
    ForeignTopic,
    PoolTopic,
    Snapshot,
    SnapshotSection,
)
from kvfabric.fabric.replay_log import ReplayLog
from kvfabric.fabric.types import Medium

CAPTURES = sorted((Path(__file__).parents[1] / "golden" / "vllm_events").glob("*.bin"))


def messages(path):
    data = path.read_bytes()
    frames, at = [], 0
    while at < len(data):
        (length,) = struct.unpack_from(">I", data, at)
        frames.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    if "replay" in path.name:
        return [events.parse_reply(frames[i : i + 4]) for i in range(0, len(frames), 4)]
    return [events.parse_message(frames[i : i + 3]) for i in range(0, len(frames), 3)]


def as_arrays(batch):
    """The same batch as vLLM wrote it before events became maps."""
    encoded = []
    for event in batch.events:
        values = list(msgspec.structs.astuple(event))
        while values and values[-1] is None:
            values.pop()
        encoded.append([type(event).__name__, *values])
    return msgspec.msgpack.encode([batch.ts, encoded, batch.data_parallel_rank])


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.stem)
def test_captures_decode_and_encode_to_the_same_bytes(path):
    seqs = []
    for message in messages(path):
        if isinstance(message, EndOfReplay):
            continue
        seqs.append(message.seq)
        assert isinstance(message.topic, ForeignTopic)
        assert message.epoch == 0
        batch = events.decode_batch(message.payload)
        assert batch.data_parallel_rank == 0
        assert batch.events
        ours = events.encode_batch(batch)
        for keys in range(8, 16):
            # vLLM 0.32 has at most 15 fields and a one-byte map header; 0.33 has more, and three.
            ours = ours.replace(b"\xde\x00%c\xa4type" % keys, b"%c\xa4type" % (0x80 | keys))
        assert ours == message.payload
        assert events.decode_batch(as_arrays(batch)) == batch
    assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))
    if "replay" in path.name:
        assert messages(path)[-1] == EndOfReplay()


def test_captures_hold_every_kind_of_event():
    kinds = set()
    for path in CAPTURES:
        for message in messages(path):
            if isinstance(message, EndOfReplay):
                continue
            for event in events.decode_batch(message.payload).events:
                described = getattr(event, "token_ids", ()) != ()
                kinds.add((type(event).__name__, getattr(event, "medium", None), described))
    assert kinds >= {
        ("BlockStored", "GPU", True),
        ("BlockStored", "CPU", True),
        ("BlockStored", "CPU", False),
        ("BlockStored", "STORAGE", True),
        ("BlockStored", "STORAGE", False),
        ("BlockRemoved", "GPU", False),
        ("BlockRemoved", "CPU", False),
        ("AllBlocksCleared", None, False),
    }


def test_golden_bytes_of_a_pools_batch():
    batch = EventBatch(
        1.5,
        (
            events.chunks_removed([7], 1, Medium.STORAGE),
            events.chunks_stored([1, 2**64 - 1], 0, Medium.CPU, 256),
        ),
        0,
    )
    assert events.encode_batch(batch).hex() == (
        "93cb3ff80000000000009284a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368"
        "65739107a66d656469756da753544f52414745a967726f75705f69647801"
        "de0009a474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739201cfffffffff"
        "ffffffffb1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f69647390aa626c6f636b5f"
        "73697a65cd0100a76c6f72615f6964c0a66d656469756da3435055a96c6f72615f6e616d65c0a96772"
        "6f75705f6964780000"
    )
    assert events.decode_batch(events.encode_batch(batch)) == batch


def test_golden_heartbeat_and_frames():
    log = ReplayLog(events.format_topic("node-a", 7), 10, 1 << 20)
    frames = log.append(events.encode_batch(EventBatch(1.5, (), 0)))
    assert frames == [
        b"kvfabric@node-a@7",
        bytes(8),
        bytes.fromhex("93cb3ff80000000000009000"),
    ]
    message = events.parse_message(frames)
    assert message.topic == PoolTopic("node-a", 7)
    assert (message.seq, message.epoch) == (0, 7)
    assert events.decode_batch(message.payload).events == ()


def test_golden_snapshot():
    snapshot = Snapshot("n", 2, 5, 1.5, (SnapshotSection(0, "CPU", 256, bytes(range(8))),))
    payload = events.encode_snapshot(snapshot)
    assert payload.hex() == (
        "96a8536e617073686f74a16e0205cb3ff8000000000000919400a3435055cd0100c4080001020304050607"
    )
    assert events.decode_snapshot(payload) == snapshot
    assert snapshot.sections[0].array().tolist() == [0x0706050403020100]


def test_maps_with_unknown_keys_are_read():
    event = {
        "type": "BlockRemoved",
        "block_hashes": [b"\x01" * 32],
        "medium": "MOON",
        "invented_later": {"deep": [1, 2, 3]},
    }
    batch = events.decode_batch(msgspec.msgpack.encode([1, [event], None, "more"]))
    assert batch.events == (BlockRemoved((b"\x01" * 32,), "MOON"),)


def test_arrays_of_all_ages_are_read():
    oldest = [1.0, [["BlockStored", [-1], None, [5] * 4, 4]]]
    stored = events.decode_batch(msgspec.msgpack.encode(oldest)).events[0]
    assert stored == BlockStored((-1,), None, (5,) * 4, 4, None, None, None)
    assert events.hashes_low64(stored.block_hashes) == [2**64 - 1]
    newer = [1.0, [["BlockRemoved", [3], "CPU", 1, None, None, "later"], ["AllBlocksCleared"]], 2]
    batch = events.decode_batch(msgspec.msgpack.encode(newer))
    assert batch.events == (BlockRemoved((3,), "CPU", 1), AllBlocksCleared())
    assert batch.data_parallel_rank == 2


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x93",
        msgspec.msgpack.encode({"ts": 1.0}),
        msgspec.msgpack.encode([1.0, [{"type": "BlockPainted"}], 0]),
        msgspec.msgpack.encode([1.0, [["BlockPainted"]], 0]),
        msgspec.msgpack.encode([1.0, [{"block_hashes": [1]}], 0]),
        msgspec.msgpack.encode([1.0, [{"type": "BlockRemoved", "block_hashes": 4}], 0]),
        msgspec.msgpack.encode(
            [1.0, [{"type": "BlockRemoved", "block_hashes": [b"short"], "medium": "CPU"}], 0]
        ),
        msgspec.msgpack.encode([1.0, [["BlockRemoved", ["text"], "CPU"]], 0]),
        msgspec.msgpack.encode([1.0, [["BlockRemoved", [0] * (events.HASHES_MAX + 1), "CPU"]], 0]),
        b"\x93\xcb" + bytes(8) + b"\x91" * 100_000 + b"\x00\x00",
        b"\x93\xcb" + bytes(8) + b"\x91\x84\xa4type\xacBlockRemoved\xa6medium\xa1\xff",
        bytes(events.PAYLOAD_BYTES_MAX + 1),
    ],
    ids=range(14),
)
def test_malformed_payloads_are_refused(payload):
    with pytest.raises(Malformed):
        events.decode_batch(payload)


def test_malformed_nesting_is_refused():
    deep = b"\x91" * 100_000 + b"\xc0"
    head = msgspec.msgpack.encode([1.0, [["BlockRemoved", [1], "CPU"]]])
    with pytest.raises(Malformed):
        events.decode_batch(b"\x93" + head[1:] + deep[:-1])
    extra = b"\x93\x01\x91\x82\xa4type\xb0AllBlocksCleared\xa1x" + deep + b"\x00"
    with pytest.raises(Malformed):
        events.decode_batch(extra)


@settings(deadline=None, max_examples=200, derandomize=True)
@given(st.binary(max_size=200), st.integers(0, 199), st.integers(0, 255))
def test_arbitrary_bytes_decode_or_are_malformed(noise, position, value):
    good = bytearray(events.encode_batch(EventBatch(1.0, (AllBlocksCleared(),), 0)))
    good[position % len(good)] = value
    for payload in (noise, bytes(good)):
        for decode in (events.decode_batch, events.decode_snapshot):
            try:
                decode(payload)
            except Malformed:
                continue


@pytest.mark.parametrize(
    "frames",
    [[], [b"t", bytes(8)], [b"t", bytes(7), b""], [b"\xff", bytes(8), b""],
     [b"x" * 513, bytes(8), b""], [b"kvfabric@n", bytes(8), b""],
     [b"kvfabric@n@01", bytes(8), b""], [b"kvfabric@n@-1", bytes(8), b""],
     [b"kvfabric@n@18446744073709551616", bytes(8), b""],
     [b"kvfabric@a b@1", bytes(8), b""]],
    ids=range(10),
)  # fmt: skip
def test_malformed_frames_are_refused(frames):
    with pytest.raises(Malformed):
        events.parse_message(frames)


def test_malformed_replies_requests_topics_snapshots():
    with pytest.raises(Malformed):
        events.parse_reply([b"x", b"", bytes(8), b""])
    with pytest.raises(Malformed):
        events.parse_reply([b"", bytes(8), b""])
    assert events.parse_reply([b"", b"", b"\xff" * 8, b""]) == EndOfReplay()
    assert events.parse_replay_request(events.replay_request(9)) == 9
    for bad in ([bytes(8)], [b"", bytes(7)], [b"x", bytes(8)]):
        with pytest.raises(Malformed):
            events.parse_replay_request(bad)
    for node, epoch in (("", 1), ("a@b", 1), ("n", -1), ("n", 2**64), ("n" * 65, 1)):
        with pytest.raises(Malformed):
            events.format_topic(node, epoch)
    odd = Snapshot("n", 0, 0, 0.0, (SnapshotSection(0, "CPU", 16, bytes(9)),))
    with pytest.raises(Malformed):
        events.decode_snapshot(events.encode_snapshot(odd))


def test_the_replay_log_is_bounded_by_count_and_by_bytes():
    by_count = ReplayLog(b"t", 3, 1 << 20)
    for number in range(5):
        by_count.append(bytes([number]))
    assert [frames[3] for frames in by_count.answer(0, bytes)] == [b"\x02", b"\x03", b"\x04", b""]
    by_bytes = ReplayLog(b"t", 100, 10)
    for _ in range(7):
        by_bytes.append(bytes(4))
    assert by_bytes.buffer_bytes == 8
    assert len(by_bytes.answer(0, bytes)) == 3
    by_bytes.append(bytes(11))
    assert by_bytes.buffer_bytes == 0
    assert by_bytes.answer(0, bytes) == [[b"", b"", b"\xff" * 8, b""]]
