"""Bulk lookup in a control file that another process is writing. No messages and no locks.

Ownership. The reader borrows a read-only buffer: the control file as a client maps it. Its arrays
are views of that buffer, so the mapping lives at least as long as the reader.

Failure. An answer is a hint: it was true a moment ago, and the pin decides. What cannot be read
consistently within `RETRIES_MAX` tries is answered MISS, and so is a record that makes no sense.

Threading. Any number of readers. One reader may be used by many threads: it keeps no state.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...fabric.errors import Malformed
from ...fabric.records import (
    BUCKET_BYTES,
    BUCKET_ENTRIES,
    IDENTITY_BYTES,
    PAGE_BYTES,
    PROBES_MAX,
    RECORD_BYTES,
    SLOTS_OFFSET,
    STATE_OFFSET,
    STATE_WORDS,
    TAGS_OFFSET,
    TableHeader,
    buckets_offset,
    lookups_of,
)
from ...fabric.types import NAMESPACE_BYTES, Lookup, SlotState

RETRIES_MAX = 4
"""Tries for a key whose bucket was being written. The writer holds one for microseconds; if it was
stopped or killed while holding it, no number of tries helps."""

_WORDS = RECORD_BYTES // 8
_IDENTITY = slice(0, IDENTITY_BYTES // 8)
_GENERATION, _LENGTH, _CHECKSUM = 7, 8, 9
_STATE = STATE_OFFSET // 8
_TAGS = slice(TAGS_OFFSET // 8, TAGS_OFFSET // 8 + BUCKET_ENTRIES)
_SLOTS = slice(SLOTS_OFFSET // 4, SLOTS_OFFSET // 4 + BUCKET_ENTRIES)
_ODD = np.uint64(1)
_SEQ_MAX = np.uint64((1 << 32) - 1)
"""A bucket's first word is above it where something was pushed past the bucket."""
_READY = np.uint64(STATE_WORDS[SlotState.READY])
_WRITING = np.uint64(STATE_WORDS[SlotState.WRITING])

Lanes = npt.NDArray[np.intp]
Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class LookupResult:
    """One element per key asked. All but `states` means something only where the state is HIT."""

    states: npt.NDArray[np.uint8]
    """`Lookup` values."""
    slots: npt.NDArray[np.int64]
    generations: npt.NDArray[np.uint64]
    checksums: npt.NDArray[np.uint64]
    lengths: npt.NDArray[np.int64]
    """Bytes of the chunk."""


class TableReader:
    """Looks keys up in a control file. Raises `Corrupt` or `Malformed` if its header is not one."""

    def __init__(self, control: memoryview) -> None:
        self.header = TableHeader.decode(control)
        count, buckets = self.header.slot_count, self.header.bucket_count
        self._records: Words = np.frombuffer(control, "<u8", count * _WORDS, PAGE_BYTES).reshape(
            -1, _WORDS
        )
        self._slot_max = count - 1
        self._states: Words = self._records[:, _STATE]
        self._buckets: Words = np.frombuffer(
            control, "<u8", buckets * BUCKET_BYTES // 8, buckets_offset(count)
        ).reshape(-1, BUCKET_BYTES // 8)
        self._heads: Words = self._buckets[:, 0]
        self._mask = np.uint64(buckets - 1)
        self._probes_max = min(PROBES_MAX, buckets)

    def generation(self, slot: int) -> int:
        """Return the generation that a slot's record says, whatever its state."""
        return int(self._records[slot, _GENERATION])

    def lookup(self, namespace_id: bytes, keys: Sequence[bytes]) -> LookupResult:
        """Answer for every key, in order: HIT, PENDING while it is being written, or MISS.

        Raises `Malformed` for bytes that cannot be a namespace's id or a key.
        """
        if len(namespace_id) != NAMESPACE_BYTES:
            raise Malformed("namespace id", f"{len(namespace_id)} bytes, not {NAMESPACE_BYTES}")
        count = len(keys)
        columns = np.zeros((4, count), np.uint64)
        signed = columns.view(np.int64)
        states = np.full(count, Lookup.MISS, np.uint8)
        result = LookupResult(states, signed[0], columns[1], columns[2], signed[3])
        if count == 0:
            return result
        identities, tags = lookups_of(namespace_id, keys)
        lanes = np.arange(count)
        for _ in range(RETRIES_MAX):
            lanes = self._walk(lanes, tags, identities, result)
            if not len(lanes):
                break
        return result

    def _walk(self, lanes: Lanes, tags: Words, identities: Words, result: LookupResult) -> Lanes:
        """Search for some lanes from their homes on. Returns those whose bucket was in writing."""
        torn: list[Lanes] = []
        for probe in range(self._probes_max):
            asked = tags[lanes]
            buckets = (asked + np.uint64(probe) & self._mask).astype(np.intp)
            before = self._heads[buckets]
            match = self._search(buckets, asked, identities[lanes])
            steady = (before == self._heads[buckets]) & (before & _ODD == 0)
            if not steady.all():
                torn.append(lanes[~steady])
                match.found &= steady
            _store(result, lanes, match)
            onward = steady & (before > _SEQ_MAX)
            onward &= ~match.found
            lanes = lanes[onward]
            if not len(lanes):
                break
        return np.concatenate(torn) if torn else lanes[:0]

    def _search(self, buckets: Lanes, tags: Words, identities: Words) -> "_Match":
        """Look for each tag in its bucket, and compare what the entry names."""
        rows = self._buckets.take(buckets, axis=0)
        slots = rows.view("<u4")[:, _SLOTS]
        matches = rows[:, _TAGS] == tags[:, None]
        matches &= slots != 0
        every = np.arange(len(buckets))
        first = matches.argmax(axis=1)
        match = self._compare(slots[every, first], identities)
        named = matches[every, first]
        strangers = named > match.found
        match.found &= named
        for lane in np.flatnonzero(strangers) if strangers.any() else ():
            others = slots[lane, matches[lane]]
            other = self._compare(others, np.repeat(identities[lane : lane + 1], len(others), 0))
            for entry in np.flatnonzero(other.found)[:1]:
                match.take(lane, other, entry)
        return match

    def _compare(self, named: npt.NDArray[np.uint32], identities: Words) -> "_Match":
        """Read the records that entries name (slot + 1): the state first, then the rest."""
        slots = named.astype(np.intp)
        slots -= 1
        np.minimum(slots, self._slot_max, out=slots)
        states = self._states[slots]
        fields = self._records.take(slots, axis=0)
        # Eight flags are one word: comparing it to 0 takes half the time of `all(axis=1)`.
        differs = np.zeros((len(slots), 8), np.bool_)
        np.not_equal(fields[:, _IDENTITY], identities, out=differs[:, _IDENTITY])
        return _Match(differs.view(np.uint64)[:, 0] == 0, slots, states, fields)


@dataclass(slots=True)
class _Match:
    """What the entries of some lanes name; only where `found` is it what was asked for."""

    found: npt.NDArray[np.bool_]
    slots: Lanes
    states: Words
    fields: Words

    def take(self, lane: np.intp, other: "_Match", entry: np.intp) -> None:
        """Replace one lane."""
        self.found[lane] = True
        self.slots[lane] = other.slots[entry]
        self.states[lane] = other.states[entry]
        self.fields[lane] = other.fields[entry]


def _store(result: LookupResult, lanes: Lanes, match: _Match) -> None:
    """Write the answers of the lanes that were found."""
    ready = (match.states == _READY) & match.found
    chosen: Lanes | slice = slice(None)
    at: Lanes | slice = chosen
    if not ready.all():
        result.states[lanes[(match.states == _WRITING) & match.found]] = Lookup.PENDING
        chosen = np.flatnonzero(ready)
        at = lanes[chosen]
    elif len(lanes) < len(result.states):
        at = lanes
    result.states[at] = Lookup.HIT
    result.slots[at] = match.slots[chosen]
    result.generations[at] = match.fields[chosen, _GENERATION]
    result.checksums[at] = match.fields[chosen, _CHECKSUM]
    result.lengths[at] = match.fields[chosen, _LENGTH]
