"""The key index of the control file, as its only writer sees it: tag to slot, open addressing.

A key's home is the bucket that the low bits of its tag name. It lies there, or, where that is full,
in the first bucket after it that has room; every bucket that it was pushed past counts it in
`overflow`, so that a search goes on only where something was pushed on. Keys never move, so a
reader cannot miss one that stays.
"""

from enum import IntEnum

import numpy as np

from ...fabric.records import (
    BUCKET_BYTES,
    BUCKET_ENTRIES,
    PROBES_MAX,
    SLOTS_OFFSET,
    TAGS_OFFSET,
)

_HALVES = BUCKET_BYTES // 4
_WORDS = BUCKET_BYTES // 8
_SLOTS = SLOTS_OFFSET // 4
_TAGS = TAGS_OFFSET // 8
_SEQ_MASK = (1 << 32) - 1


class Indexed(IntEnum):
    """Whether the index names a slot."""

    YES = 0
    CROWDED = 1
    """No room within `PROBES_MAX` buckets of its home: readers of the index will miss it."""
    ABSENT = 2
    """It was not there to be removed: it had been CROWDED."""


class KeyIndex:
    """Writes buckets in place under their sequence locks. One thread; readers need no other lock.

    `buckets` is the index's part of the control file: 128 bytes times a power of two.
    """

    def __init__(self, buckets: memoryview) -> None:
        self._bytes = buckets
        self._halves = buckets.cast("I")
        self._words = buckets.cast("Q")
        self._mask = buckets.nbytes // BUCKET_BYTES - 1
        self._probes_max = min(PROBES_MAX, self._mask + 1)

    def insert(self, tag: int, slot: int) -> Indexed:
        """Name a slot that is not named yet. Changes nothing if the answer is CROWDED."""
        halves = self._halves
        bucket = tag & self._mask
        for probes in range(self._probes_max):
            base = bucket * _HALVES
            slots = halves[base + _SLOTS : base + _SLOTS + BUCKET_ENTRIES].tolist()
            if 0 in slots:
                lane = slots.index(0)
                seq = halves[base]
                halves[base] = seq + 1 & _SEQ_MASK
                self._words[bucket * _WORDS + _TAGS + lane] = tag
                halves[base + _SLOTS + lane] = slot + 1
                halves[base] = seq + 2 & _SEQ_MASK
                if probes:
                    self._add_overflow(tag, probes, 1)
                return Indexed.YES
            bucket = bucket + 1 & self._mask
        return Indexed.CROWDED

    def remove(self, tag: int, slot: int) -> Indexed:
        """Stop naming a slot. Answers ABSENT if it was not named."""
        halves = self._halves
        bucket = tag & self._mask
        for probes in range(self._probes_max):
            base = bucket * _HALVES
            slots = halves[base + _SLOTS : base + _SLOTS + BUCKET_ENTRIES].tolist()
            if slot + 1 in slots:
                lane = slots.index(slot + 1)
                seq = halves[base]
                halves[base] = seq + 1 & _SEQ_MASK
                halves[base + _SLOTS + lane] = 0
                halves[base] = seq + 2 & _SEQ_MASK
                if probes:
                    self._add_overflow(tag, probes, -1)
                return Indexed.YES
            if halves[base + 1] == 0:
                return Indexed.ABSENT
            bucket = bucket + 1 & self._mask
        return Indexed.ABSENT

    def clear(self) -> None:
        """Name nothing. Readers see each bucket either as it was or empty, never half."""
        halves = np.frombuffer(self._bytes, np.uint32).reshape(-1, _HALVES)
        halves[:, 0] |= 1
        halves[:, 1:] = 0
        halves[:, 0] += 1

    def named(self) -> list[int]:
        """Return every slot that is named, in no order. For checks."""
        halves = np.frombuffer(self._bytes, np.uint32).reshape(-1, _HALVES)
        slots = halves[:, _SLOTS : _SLOTS + BUCKET_ENTRIES].ravel()
        return (slots[slots > 0].astype(np.int64) - 1).tolist()

    def _add_overflow(self, tag: int, passed: int, change: int) -> None:
        halves = self._halves
        for probe in range(passed):
            base = (tag + probe & self._mask) * _HALVES
            seq = halves[base]
            halves[base] = seq + 1 & _SEQ_MASK
            halves[base + 1] += change
            halves[base] = seq + 2 & _SEQ_MASK
