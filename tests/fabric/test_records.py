"""Formats of the control file: golden bytes, offsets, and what is refused."""

import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvfabric.fabric import records
from kvfabric.fabric.errors import Corrupt, Malformed
from kvfabric.fabric.records import SlotRecord, TableHeader
from kvfabric.fabric.types import (
    ChunkKey,
    KeyBatch,
    NamespaceId,
    SlotState,
    key_group,
    key_low64,
    make_key,
)

GOLDEN = Path(__file__).parent.parent / "golden"
HEADER = TableHeader(
    epoch=0x0102030405060708,
    slot_count=1000,
    slot_bytes=2 << 20,
    segment_bytes=1000 * (2 << 20),
    segment_count=1,
    bucket_count=256,
)
RECORD = SlotRecord(
    key=make_key(bytes(range(32)), 3),
    namespace=NamespaceId(bytes(range(100, 116))),
    generation=0x1122334455667788,
    length_bytes=2 << 20,
    checksum=0xA1A2A3A4A5A6A7A8,
    depth=17,
    owner_pid=4321,
    owner_started=0x99AABBCC,
    state=SlotState.READY,
)


def golden(name: str) -> bytes:
    return bytes.fromhex((GOLDEN / name).read_text())


def whole(header: bytes) -> bytes:
    return header.ljust(records.control_bytes(1000), b"\0")


def test_header_has_its_golden_bytes():
    assert HEADER.encode() == golden("table_header.hex")
    assert TableHeader.decode(whole(golden("table_header.hex"))) == HEADER


def test_record_has_its_golden_bytes():
    assert RECORD.encode() == golden("slot_record.hex")
    assert SlotRecord.decode(golden("slot_record.hex")) == RECORD


def test_record_offsets_are_as_documented():
    raw = RECORD.encode()
    assert len(raw) == records.RECORD_BYTES == 128
    assert raw[0:36] == RECORD.key
    assert raw[40:56] == RECORD.namespace
    assert raw[96:112] == bytes(16)
    numbers = {
        "<I": {36: 36, 80: 17, 84: 4321},
        "<Q": {
            56: RECORD.generation,
            64: RECORD.length_bytes,
            72: RECORD.checksum,
            88: RECORD.owner_started,
            112: xxhash.xxh3_64_intdigest(raw[:112]),
            120: 0x0202020202020202,
        },
    }
    for form, fields in numbers.items():
        for offset, value in fields.items():
            assert struct.unpack_from(form, raw, offset)[0] == value


def test_a_short_key_is_padded_with_zeros():
    key = make_key(b"d" * 16, 1)
    raw = SlotRecord(key, RECORD.namespace, 1, 2, 3, 4, 5, 6, SlotState.WRITING).encode()
    assert raw[20:36] == bytes(16)
    assert SlotRecord.decode(raw).key == key


def test_state_words_differ_in_every_byte():
    assert records.STATE_WORDS[SlotState.FREE] == 0
    for one in records.STATE_WORDS:
        for other in records.STATE_WORDS:
            apart = (one ^ other).to_bytes(8, "little")
            assert one == other or all(apart)


def test_a_record_with_any_bit_flipped_is_refused():
    for bit in range(128 * 8):
        raw = bytearray(RECORD.encode())
        raw[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupt):
            SlotRecord.decode(bytes(raw))


def test_ready_without_checksum_and_impossible_key_are_refused():
    with pytest.raises(Corrupt, match="without a checksum"):
        SlotRecord.decode(
            SlotRecord(RECORD.key, RECORD.namespace, 1, 2, 0, 4, 5, 6, SlotState.READY).encode()
        )
    body = bytearray(RECORD.encode()[:112])
    body[36] = 37
    raw = bytes(body) + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little") + bytes(8)
    with pytest.raises(Corrupt, match="37 bytes"):
        SlotRecord.decode(raw)


def test_a_header_with_any_bit_flipped_is_refused():
    for bit in range(72 * 8):
        raw = bytearray(whole(HEADER.encode()))
        raw[bit // 8] ^= 1 << bit % 8
        with pytest.raises((Corrupt, Malformed)):
            TableHeader.decode(bytes(raw))


def rehash(fields: bytes) -> bytes:
    return fields + xxhash.xxh3_64_intdigest(fields).to_bytes(8, "little")


def test_header_of_another_version_or_algorithm_is_malformed():
    fields = bytearray(HEADER.encode()[:64])
    fields[8] = 2
    with pytest.raises(Malformed, match="version 2, this side reads 1"):
        TableHeader.decode(whole(rehash(bytes(fields))))
    fields[8], fields[12] = 1, 9
    with pytest.raises(Malformed, match="algorithm 9"):
        TableHeader.decode(whole(rehash(bytes(fields))))


def test_header_that_does_not_fit_its_file_is_corrupt():
    with pytest.raises(Corrupt, match="shorter than its header page"):
        TableHeader.decode(HEADER.encode())
    with pytest.raises(Corrupt, match="too few"):
        TableHeader.decode(HEADER.encode().ljust(8192, b"\0"))
    odd = TableHeader(1, 1000, 4096, 4096000, 1, 512)
    with pytest.raises(Corrupt, match="512 buckets for 1000 slots"):
        TableHeader.decode(whole(odd.encode()))


@pytest.mark.parametrize("slots", [1, 2, 4, 5, 8, 16, 17, 1000, 4096, 100_000])
def test_buckets_are_a_power_of_two_and_at_most_half_full(slots: int):
    buckets = records.bucket_count_for(slots)
    assert buckets & (buckets - 1) == 0
    assert slots <= buckets * 8 / 2
    assert buckets == 1 or slots > buckets * 8 / 4
    assert records.buckets_offset(slots) % 4096 == 0
    assert records.control_bytes(slots) >= records.buckets_offset(slots) + 128 * buckets


def tag_by_hand(namespace: bytes, key: ChunkKey) -> int:
    mask = (1 << 64) - 1
    x = key_low64(key) ^ key_group(key) * 0x9E3779B97F4A7C15 & mask
    x ^= xxhash.xxh3_64_intdigest(namespace)
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return x ^ x >> 31


def test_tags_of_a_batch_equal_those_by_hand_and_the_golden_one():
    namespace = RECORD.namespace
    keys = [make_key(bytes([i]) * (32 if i % 3 else 16), i) for i in range(50)]
    assert records.tags_of(namespace, keys).tolist() == [tag_by_hand(namespace, k) for k in keys]
    assert records.tags_of(namespace, []).tolist() == []
    assert records.tags_of(namespace, [RECORD.key]).tolist() == [0x70F90F22B6FDCEAD]


def test_identities_are_the_first_bytes_of_records():
    keys = [RECORD.key, make_key(b"d" * 16, 1)]
    rows, tags = records.lookups_of(RECORD.namespace, keys)
    assert tags.tolist() == [tag_by_hand(RECORD.namespace, key) for key in keys]
    assert rows.dtype == np.uint64
    for row, key in zip(rows, keys, strict=True):
        raw = SlotRecord(key, RECORD.namespace, 1, 2, 3, 4, 5, 6, SlotState.WRITING).encode()
        assert row.tobytes() == raw[:56]
    rows, tags = records.lookups_of(RECORD.namespace, keys[:1] * 3)
    assert rows.tobytes() == RECORD.encode()[:56] * 3
    assert tags.tolist() == [tag_by_hand(RECORD.namespace, RECORD.key)] * 3


@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("group", [0, 1, (1 << 32) - 1])
def test_a_batch_of_keys_is_looked_up_as_its_keys(size: int, group: int):
    digests = [bytes([i]) * (size - 8) + bytes(range(i, i + 8)) for i in range(50)]
    batch, keys = KeyBatch(digests, group), [make_key(each, group) for each in digests]
    for many, one in zip(
        records.lookups_of(RECORD.namespace, batch),
        records.lookups_of(RECORD.namespace, keys),
        strict=True,
    ):
        assert many.dtype == one.dtype
        assert many.tolist() == one.tolist()


@pytest.mark.parametrize("size", [0, 11, 37, 72])
def test_bytes_that_cannot_be_a_key_are_malformed(size: int):
    for keys in ([bytes(size)], [RECORD.key, bytes(size)]):
        with pytest.raises(Malformed, match=f"key is malformed: {size} bytes"):
            records.tags_of(RECORD.namespace, keys)
        with pytest.raises(Malformed, match=f"key is malformed: {size} bytes"):
            records.lookups_of(RECORD.namespace, keys)
