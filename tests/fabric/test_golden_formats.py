"""Golden bytes of the namespace, the key, the checksum and the messages, as docs/protocol.md prints
them.
"""

import hashlib
from pathlib import Path
from typing import get_args

import msgspec
import pytest
import xxhash

from kvfabric.fabric import wire
from kvfabric.fabric.checksum import PIECE_BYTES, checksum, combine_pieces, piece_digests
from kvfabric.fabric.errors import Malformed
from kvfabric.fabric.namespace import Namespace
from kvfabric.fabric.types import (
    Committed,
    Lookup,
    Released,
    Reserved,
    key_digest,
    key_group,
    key_low64,
    make_key,
)
from kvfabric.fabric.wire import GroupGeometry, SourceRangeWire

PROTOCOL = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
EPOCH, REQUEST = 9, 3

KEY = make_key(bytes(range(32)), 2)
KEY_HEX = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f00000002"
NAMESPACE_ID = bytes(range(0xA0, 0xB0))

NAMESPACE = Namespace(
    model="llama",
    weights_version="1",
    kv_dtype="bfloat16",
    kv_scales="none",
    rope="default",
    max_model_len="4096",
    layout="kvf1:dense/l2/h4/d6/e2/t32",
    chunk_tokens="32",
    tokens_per_hash="16",
    hash_algorithm="sha256_cbor",
    hash_seed="",
)
NAMESPACE_HEX = "d06f1fdb2af81d5716de484870b9882a"

CHECKSUMS = {
    0: 0x2D06800538D394C2,
    1: 0xCF6F6C9964662384,
    64 * 1024: 0xCB68232A83F5F290,
    64 * 1024 + 1: 0xB27B94E6C6B87ECC,
    2 * 1024 * 1024: 0x075B5ECD78E9508F,
}
"""By length, of bytes whose i-th is (131 i + 7) mod 251."""

MESSAGES = [
    (
        wire.Attach("c", 7, 99, {"model": "m"}, [GroupGeometry(0, 32, 4096)]),
        "9401090396a6617474616368a163076381a56d6f64656ca16d91930020cd1000",
    ),
    (
        wire.Attached("a", NAMESPACE_ID, "/s/c", ["/s/0"], 4096, 10.0, ["fs"], "tcp://p"),
        (
            "9401090399a86174746163686564a161c410a0a1a2a3a4a5a6a7a8a9aaabacadaeaf"
            "a42f732f6391a42f732f30cd1000cb402400000000000091a26673a77463703a2f2f70"
        ),
    ),
    (wire.Refused("rope", "x", "y"), "9401090394a772656675736564a4726f7065a178a179"),
    (
        wire.Reserve(NAMESPACE_ID, [KEY], [3]),
        f"9401090394a772657365727665c410a0a1a2a3a4a5a6a7a8a9aaabacadaeaf91c424{KEY_HEX}9103",
    ),
    (
        wire.ReserveReply([Reserved.GRANTED, Reserved.BUSY], [5, 0], [6, 0]),
        "9401090394a87265736572766564920003920500920600",
    ),
    (
        wire.Commit([5], [6], [1 << 63]),
        "9401090394a6636f6d6d69749105910691cf8000000000000000",
    ),
    (
        wire.CommitReply([Committed.READY, Committed.LOST]),
        "9401090392a9636f6d6d6974746564920001",
    ),
    (wire.Abort([5], [6]), "9401090393a561626f727491059106"),
    (
        wire.Pin(NAMESPACE_ID, [KEY], 0.5, [SourceRangeWire("b", "tcp://h:1", 0, 1)]),
        (
            f"9401090395a370696ec410a0a1a2a3a4a5a6a7a8a9aaabacadaeaf91c424{KEY_HEX}"
            "cb3fe00000000000009194a162a97463703a2f2f683a310001"
        ),
    ),
    (
        wire.PinReply([Lookup.HIT, Lookup.MISS], [5, 0], [6, 0], [9, 0], ["fs", ""]),
        "9401090396a670696e6e656492010092050092060092090092a26673a0",
    ),
    (wire.Release([5], [6]), "9401090393a772656c6561736591059106"),
    (
        wire.ReleaseReply([Released.HELD, Released.LOST]),
        "9401090392a872656c6561736564920001",
    ),
    (wire.Drop([5], [6]), "9401090393a464726f7091059106"),
    (wire.OnGpu(True, [KEY], []), f"9401090394a3677075c391c424{KEY_HEX}90"),
    (wire.Renew(), "9401090391a572656e6577"),
    (wire.Detach(), "9401090391a6646574616368"),
    (wire.Ok(), "9401090391a26f6b"),
    (wire.StatsAsk(), "9401090391a57374617473"),
    (
        wire.StatsReply({"free": 1.0}),
        "9401090392ab73746174735f7265706c7981a466726565cb3ff0000000000000",
    ),
    (wire.Stale(), "9401090391a57374616c65"),
    (wire.Hello("b", b"\x01\x02"), "9401090393a568656c6c6fa162c4020102"),
    (
        wire.Welcome("a", b"\x03", [4096], [8192], 4096),
        "9401090396a777656c636f6d65a161c4010391cd100091cd2000cd1000",
    ),
    (
        wire.Lease(NAMESPACE_ID, [KEY], 5.0),
        (
            "9401090394a56c65617365c410a0a1a2a3a4a5a6a7a8a9aaabacadaeaf91c424"
            f"{KEY_HEX}cb4014000000000000"
        ),
    ),
    (
        wire.Grant([Lookup.HIT], [0], [4096], [4000], [1], [7], [9], 2.5),
        "9401090399a56772616e749101910091cd100091cd0fa0910191079109cb4004000000000000",
    ),
    (wire.Bye(), "9401090391a3627965"),
]


def pattern(length: int) -> bytes:
    return bytes((131 * i + 7) % 251 for i in range(length))


def test_a_namespace_is_the_digest_of_its_fields_in_order():
    assert NAMESPACE.id.hex() == NAMESPACE_HEX
    pairs = [[name, value] for name, value in NAMESPACE.fields().items()]
    assert NAMESPACE.id == hashlib.sha256(msgspec.msgpack.encode(pairs)).digest()[:16]
    assert NAMESPACE_HEX in PROTOCOL
    for name in NAMESPACE.fields():
        assert f"`{name}`" in PROTOCOL


def test_a_key_is_a_digest_and_a_group():
    assert KEY.hex() == KEY_HEX
    assert make_key(bytes(16), 1).hex() == "00" * 16 + "00000001"
    assert (key_digest(KEY), key_group(KEY)) == (bytes(range(32)), 2)
    assert key_low64(KEY) == 0x18191A1B1C1D1E1F
    assert KEY_HEX in PROTOCOL


@pytest.mark.parametrize("length", CHECKSUMS)
def test_checksums_have_their_golden_values(length: int):
    data = pattern(length)
    assert checksum(data) == CHECKSUMS[length]
    pieces = [data[at : at + PIECE_BYTES] for at in range(0, length, PIECE_BYTES)]
    digests = b"".join(xxhash.xxh3_64_digest(piece)[::-1] for piece in pieces)
    assert piece_digests(memoryview(data)) == digests
    assert xxhash.xxh3_64_intdigest(digests) == CHECKSUMS[length]
    assert f"{CHECKSUMS[length]:016x}" in PROTOCOL


def test_no_checksum_is_zero(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(xxhash, "xxh3_64_intdigest", lambda _data: 0)
    assert combine_pieces(b"") == 1


def test_every_message_has_a_golden_frame():
    assert {type(body) for body, _ in MESSAGES} == set(get_args(wire.Message))


@pytest.mark.parametrize(("body", "frame"), MESSAGES, ids=lambda value: type(value).__name__)
def test_messages_have_their_golden_bytes(body: wire.Message, frame: str):
    assert wire.encode(EPOCH, REQUEST, body).hex() == frame
    assert wire.decode(bytes.fromhex(frame)) == wire.Envelope(1, EPOCH, REQUEST, body)
    version, epoch, request, fields = msgspec.msgpack.decode(bytes.fromhex(frame))
    assert (version, epoch, request) == (1, EPOCH, REQUEST)
    assert fields[0] == type(body).__struct_config__.tag
    assert len(fields) == 1 + len(body.__struct_fields__)
    assert f"`{frame}`" in PROTOCOL
    for name in body.__struct_fields__:
        assert f"`{name}`" in PROTOCOL


@pytest.mark.parametrize(
    "frame",
    ["", "93010903", "9402090391a26f6b", "9401090391a26e6f", "9401090391a3706970"],
    ids=["empty", "short", "version 2", "unknown tag", "truncated"],
)
def test_what_is_no_message_of_this_version_is_malformed(frame: str):
    with pytest.raises(Malformed):
        wire.decode(bytes.fromhex(frame))
