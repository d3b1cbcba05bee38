"""The slot table of a pool's control file, written through by its only writer.

Ownership. `SlotTable` borrows a writable buffer: a mapped file, or a bytearray in a simulation.
Only one may write a buffer at a time (`region` holds a lock on the file).

Failure. A process killed between any two stores leaves each record as it was before or as it is
after, or as one that is not believed. Reading the header raises `Corrupt` or `Malformed`; reading
a record raises `Corrupt`.

Threading. One thread writes. Readers in other threads and processes need no lock (`reader`).
"""

from dataclasses import replace

import numpy as np
import xxhash

from ...fabric.errors import ConfigError
from ...fabric.records import (
    BODY,
    BODY_BYTES,
    BUCKET_BYTES,
    CHECKSUM_OFFSET,
    OWNER_OFFSET,
    PAGE_BYTES,
    RECORD_BYTES,
    RECORD_CHECKSUM_OFFSET,
    SLOT_COUNT_MAX,
    STATE_OFFSET,
    STATE_WORDS,
    SlotRecord,
    TableHeader,
    bucket_count_for,
    buckets_offset,
    control_bytes,
    record_offset,
)
from ...fabric.types import SlotState
from .index import KeyIndex
from .slots import SlotEntry

__all__ = ["SlotTable", "control_bytes", "format_table", "new_header", "write_header"]

_FREE_WORD = STATE_WORDS[SlotState.FREE]
_READY_WORD = STATE_WORDS[SlotState.READY]
_NO_OWNER = bytes(12)
_STATE_INDEX = STATE_OFFSET // 8
_CHECKSUM_INDEX = CHECKSUM_OFFSET // 8
_RECORD_CHECKSUM_INDEX = RECORD_CHECKSUM_OFFSET // 8
_RECORD_WORDS = RECORD_BYTES // 8


class SlotTable:
    """Records by slot number, and the index over their keys.

    `control` is writable, contiguous bytes, at least `control_bytes(slot_count)` of them. Raises
    `Corrupt` or `Malformed` if its header is not one of this version's.
    """

    def __init__(self, control: memoryview) -> None:
        self.header = TableHeader.decode(control)
        count = self.header.slot_count
        start = buckets_offset(count)
        self.index = KeyIndex(control[start : start + self.header.bucket_count * BUCKET_BYTES])
        self._records = control[PAGE_BYTES : record_offset(count)]
        self._words = self._records.cast("Q")

    @property
    def slot_count(self) -> int:
        """How many records there are."""
        return self.header.slot_count

    def begin(self, entry: SlotEntry) -> None:
        """Write all fields of a slot that was FREE; it is WRITING when this returns."""
        body = BODY.pack(
            entry.key,
            len(entry.key),
            entry.namespace,
            entry.generation,
            entry.length_bytes,
            entry.checksum,
            entry.depth,
            entry.owner_pid,
            entry.owner_started,
        )
        base = entry.slot * _RECORD_WORDS
        words = self._words
        words[base + _STATE_INDEX] = _FREE_WORD
        start = entry.slot * RECORD_BYTES
        self._records[start : start + BODY_BYTES] = body
        words[base + _RECORD_CHECKSUM_INDEX] = xxhash.xxh3_64_intdigest(body)
        words[base + _STATE_INDEX] = STATE_WORDS[SlotState.WRITING]

    def publish(self, slot: int, checksum: int) -> None:
        """Turn a slot that is WRITING into READY, owned by nobody, with its bytes' checksum."""
        base = slot * _RECORD_WORDS
        start = slot * RECORD_BYTES
        words = self._words
        words[base + _CHECKSUM_INDEX] = checksum
        self._records[start + OWNER_OFFSET : start + OWNER_OFFSET + 12] = _NO_OWNER
        digest = xxhash.xxh3_64_intdigest(self._records[start : start + BODY_BYTES])
        words[base + _RECORD_CHECKSUM_INDEX] = digest
        words[base + _STATE_INDEX] = _READY_WORD

    def set_state(self, slot: int, state: SlotState) -> None:
        """Store a slot's state word and nothing else."""
        self._words[slot * _RECORD_WORDS + _STATE_INDEX] = STATE_WORDS[state]

    def state_word(self, slot: int) -> int:
        """Return a slot's state word as it is."""
        return self._words[slot * _RECORD_WORDS + _STATE_INDEX]

    def used_slots(self) -> list[int]:
        """Return the slots that were used at least once since the table was formatted."""
        words = np.frombuffer(self._records, np.uint64).reshape(-1, _RECORD_WORDS)
        return np.flatnonzero(words.any(axis=1)).tolist()

    def read(self, slot: int) -> SlotRecord:
        """Return a record. Raises `Corrupt` if it cannot be believed."""
        return SlotRecord.decode(self._records[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES])

    def claimed_owner(self, slot: int) -> tuple[int, int]:
        """Return the pid and start time in a record that may be corrupt."""
        fields = BODY.unpack_from(self._records, slot * RECORD_BYTES)
        return fields[7], fields[8]


def new_header(
    slot_count: int, slot_bytes: int, segment_bytes: int, epoch: int, segment_count: int = 1
) -> TableHeader:
    """Return the header of a new table. Raises `ConfigError` if the slots cannot be numbered."""
    if not 0 < slot_count <= SLOT_COUNT_MAX:
        raise ConfigError(
            "host.region_bytes",
            f"{slot_count} slots, not 1 to {SLOT_COUNT_MAX}",
            "Choose host.region_bytes as a multiple of host.slot_bytes in that range.",
        )
    if slot_count > segment_count * (segment_bytes // slot_bytes):
        raise ConfigError(
            "host.region_bytes",
            f"{slot_count} slots of {slot_bytes} bytes do not fit in "
            f"{segment_count} segments of {segment_bytes} bytes",
            "Enlarge host.region_bytes or lessen host.slot_bytes.",
        )
    buckets = bucket_count_for(slot_count)
    return TableHeader(epoch, slot_count, slot_bytes, segment_bytes, segment_count, buckets)


def format_table(
    buffer: memoryview | bytearray,
    slot_count: int,
    slot_bytes: int,
    segment_bytes: int,
    epoch: int,
    segment_count: int = 1,
) -> None:
    """Make a buffer of at least `control_bytes(slot_count)` an empty table, its header last."""
    header = new_header(slot_count, slot_bytes, segment_bytes, epoch, segment_count)
    control = memoryview(buffer)
    control[:] = bytes(len(control))
    write_header(control, header)


def write_header(control: memoryview, header: TableHeader) -> None:
    """Store a header: one copy of 72 bytes."""
    encoded = header.encode()
    control[: len(encoded)] = encoded


def with_epoch(header: TableHeader, epoch: int) -> TableHeader:
    """Return the header of the same table under another epoch."""
    return replace(header, epoch=epoch)
