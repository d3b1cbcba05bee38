"""The file record: golden bytes, round trips, and every way to damage one."""

import struct

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfabric.fabric.errors import Corrupt, FabricError, Malformed
from kvfabric.fabric.file_record import (
    BLOCK_BYTES,
    PAYLOAD_BYTES_MAX,
    RecordHeader,
    decode,
    decode_header,
    encode,
    encode_header,
    padded_bytes,
    record_bytes,
)
from kvfabric.fabric.types import ChunkKey, NamespaceId, make_key

NAMESPACE = NamespaceId(bytes(range(16)))
KEY = make_key(bytes(range(0x40, 0x60)), 2)


def test_golden_bytes():
    record = encode(NAMESPACE, KEY, b"abc" * 1000)
    assert record[:88].hex() == (
        "4b56464142524543"  # KVFABREC
        "0100"  # version
        "0100"  # checksum algorithm
        "2400"  # key length
        "0000"
        "000102030405060708090a0b0c0d0e0f"
        "404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f00000002"
        "00000000"
        "b80b000000000000"  # payload length
        "82bef99ac407304e"  # payload checksum
    )
    assert record[88:4088] == bytes(4000)
    assert record[4088:4096].hex() == "2b8a87e9a673c7d1"
    assert record[4096:7096] == b"abc" * 1000
    assert record[7096:] == bytes(1096)
    assert decode(record) == (
        RecordHeader(NAMESPACE, KEY, 3000, struct.unpack_from("<Q", record, 80)[0]),
        b"abc" * 1000,
    )


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    st.binary(min_size=16, max_size=16),
    st.binary(min_size=1, max_size=36),
    st.binary(max_size=10_000),
)
def test_round_trip(namespace: bytes, key: bytes, payload: bytes):
    record = encode(NamespaceId(namespace), ChunkKey(key), payload)
    assert len(record) == record_bytes(len(payload)) == 4096 + padded_bytes(len(payload))
    header, decoded = decode(record)
    assert (header.namespace, header.key, decoded) == (namespace, key, payload)


def test_every_flipped_bit_is_noticed():
    record = bytearray(encode(NAMESPACE, KEY, b"payload!" * 20))
    places = [*range(96), 2000, *range(4080, 4096), *range(4096, 4096 + 170), 8191]
    for place in places:
        for bit in range(8):
            record[place] ^= 1 << bit
            with pytest.raises((Corrupt, Malformed)):
                decode(bytes(record))
            record[place] ^= 1 << bit
    decode(bytes(record))


@pytest.mark.parametrize("length", [0, 1, 100, 4095, 4096, 8191, 8193, 12288])
def test_every_other_length_is_noticed(length):
    record = encode(NAMESPACE, KEY, b"x" * 4000)
    changed = record[:length].ljust(length, b"\0")
    with pytest.raises(Corrupt):
        decode(changed)


def resealed(offset: int, raw: bytes) -> bytes:
    """A header with other bytes at an offset and a checksum that agrees."""
    header = bytearray(encode_header(RecordHeader(NAMESPACE, KEY, 8, 1)))
    header[offset : offset + len(raw)] = raw
    header[4088:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(header[:4088])))
    return bytes(header)


@pytest.mark.parametrize(
    ("offset", "raw", "word"),
    [
        (0, b"KVFABRED", "begins"),
        (8, b"\x02\x00", "version 2"),
        (10, b"\x07\x00", "algorithm 7"),
        (12, b"\x25\x00", "key of 37"),
        (12, b"\x00\x00", "key of 0"),
        (72, struct.pack("<Q", PAYLOAD_BYTES_MAX + 1), "payload of"),
    ],
)
def test_what_this_version_does_not_read_is_malformed(offset, raw, word):
    with pytest.raises(Malformed, match=word):
        decode_header(resealed(offset, raw))


@pytest.mark.parametrize(
    "header",
    [
        RecordHeader(NamespaceId(b"short"), KEY, 1, 1),
        RecordHeader(NAMESPACE, ChunkKey(b""), 1, 1),
        RecordHeader(NAMESPACE, ChunkKey(bytes(37)), 1, 1),
        RecordHeader(NAMESPACE, KEY, PAYLOAD_BYTES_MAX + 1, 1),
        RecordHeader(NAMESPACE, KEY, -1, 1),
    ],
)
def test_what_the_format_cannot_hold_is_refused(header):
    with pytest.raises(Malformed):
        encode_header(header)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(st.binary(max_size=5000))
def test_garbage_never_decodes(data: bytes):
    with pytest.raises(FabricError):
        decode(data)


def test_sizes():
    assert BLOCK_BYTES == 4096
    assert [padded_bytes(n) for n in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]
