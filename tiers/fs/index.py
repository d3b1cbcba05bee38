"""The books of the file tier: which chunks are there, how much they occupy, and who goes first.

Pure: no files, no clock, no lock. Bytes are those of whole records (`file_record.record_bytes`),
which is what a file occupies. They are in one of four places, whose sum never passes the quota:

* present: files with their final name, in the order of their last use;
* leaving: chosen to be removed, no longer found, and still on the disk;
* claimed: room for a record that is being written under a temporary name;
* litter: temporary files whose removal failed.

A store claims its room first. When room is short, the least recently used records are set leaving
and each hands its bytes to the claim once its file is gone, so the disk never holds more than the
books say.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from ...fabric.errors import Conservation
from ...fabric.types import ChunkKey, Lookup, NamespaceId
from ..tier_events import RecordId

UNKNOWN_CHECKSUM = 0
"""Of a record found by name only; a real checksum is never 0."""


@dataclass(slots=True)
class Entry:
    """A record on the disk."""

    record_bytes: int
    checksum: int = UNKNOWN_CHECKSUM
    failures: int = 0
    """Reads that failed in a row."""
    touched_s: float = 0.0
    """When its file's time was last set, on the tier's clock."""


NOTHING = Entry(0)
"""Stands for the entry of a claim that was released."""


class Claimed(IntEnum):
    """What the index answers to a claim."""

    GRANTED = 0
    PRESENT = 1
    IN_FLIGHT = 2
    """Another writer has claimed the same chunk."""
    NO_ROOM = 3
    """Larger than the quota, or too much is claimed or leaving, or its old file is leaving."""


@dataclass(slots=True)
class Claim:
    """Room for one record, and whom to evict for it."""

    record: RecordId
    need_bytes: int
    held_bytes: int = 0
    victims: list[tuple[RecordId, Entry]] = field(default_factory=list)
    waiters: list[Callable[[Entry], None]] = field(default_factory=list)
    """Stores of the same chunk, told what was committed (`NOTHING` if nothing was)."""
    left_path: str = ""
    """The temporary file, if its removal failed."""


@dataclass(frozen=True, slots=True)
class Granted:
    """An answer to a claim; with GRANTED the caller's own, with IN_FLIGHT the other's."""

    case: Claimed
    claim: Claim


class FileIndex:
    """The books. Its tier guards it with a lock; `lookup` alone needs none."""

    def __init__(self, quota_bytes: int) -> None:
        self.quota_bytes = quota_bytes
        self.present: OrderedDict[RecordId, Entry] = OrderedDict()
        self._leaving: dict[RecordId, Entry] = {}
        self._claims: dict[RecordId, Claim] = {}
        self._present_bytes = 0
        self._leaving_bytes = 0
        self._claimed_bytes = 0
        self.stuck: set[RecordId] = set()
        """Records that are leaving and whose removal failed; to be tried again."""
        self.litter: dict[str, int] = {}
        """Path and bytes of temporary files that are still to be removed."""
        self._litter_bytes = 0
        self._found_bytes = 0
        """What the scan found; it may be over a quota that was lowered, until trimmed."""

    @property
    def used_bytes(self) -> int:
        """Return all bytes that may be on the disk."""
        return self._present_bytes + self._leaving_bytes + self._claimed_bytes + self._litter_bytes

    def lookup(
        self, namespace: NamespaceId, keys: Sequence[ChunkKey], absent: Lookup
    ) -> list[Lookup]:
        """Return HIT for what is present and `absent` for the rest."""
        present = self.present
        return [Lookup.HIT if (namespace, key) in present else absent for key in keys]

    def use(self, record: RecordId) -> None:
        """Make it the most recently used, if it is present."""
        if record in self.present:
            self.present.move_to_end(record)

    def fill(self, found: Iterable[tuple[RecordId, Entry]]) -> list[tuple[RecordId, Entry]]:
        """Take over what a scan found, least recent first, before anything else happens.

        Returns what must be removed to come within the quota; it is leaving.
        """
        self.present.update(found)
        self._present_bytes = sum(entry.record_bytes for entry in self.present.values())
        self._found_bytes = self.used_bytes
        return self._evict(min(self._found_bytes - self.quota_bytes, self._present_bytes))

    def trimmed(self) -> None:
        """What `fill` returned is gone, or could not be removed: the limit from now on."""
        self._found_bytes = self.used_bytes

    def claim(self, record: RecordId, need_bytes: int) -> Granted:
        """Ask for room. With GRANTED the caller removes the victims, then commits or releases."""
        claim = Claim(record, need_bytes)
        if record in self.present:
            return Granted(Claimed.PRESENT, claim)
        if record in self._claims:
            return Granted(Claimed.IN_FLIGHT, self._claims[record])
        short_bytes = need_bytes - (self.quota_bytes - self.used_bytes)
        if record in self._leaving or short_bytes > self._present_bytes:
            return Granted(Claimed.NO_ROOM, claim)
        claim.victims = self._evict(short_bytes)
        freed_bytes = sum(entry.record_bytes for _, entry in claim.victims)
        self._claims[record] = claim
        self._hold(claim, max(0, need_bytes - freed_bytes))
        return Granted(Claimed.GRANTED, claim)

    def _evict(self, short_bytes: int) -> list[tuple[RecordId, Entry]]:
        victims: list[tuple[RecordId, Entry]] = []
        while short_bytes > 0:
            record = next(iter(self.present))
            entry = self.leave(record)
            victims.append((record, entry))
            short_bytes -= entry.record_bytes
        return victims

    def _hold(self, claim: Claim, held_bytes: int) -> None:
        self._claimed_bytes += held_bytes - claim.held_bytes
        claim.held_bytes = held_bytes

    def leave(self, record: RecordId) -> Entry:
        """Take a present record out of sight; its bytes count until `left`."""
        entry = self.present.pop(record)
        self._present_bytes -= entry.record_bytes
        self._leaving[record] = entry
        self._leaving_bytes += entry.record_bytes
        return entry

    def left(self, record: RecordId) -> None:
        """Its file is gone."""
        self._leaving_bytes -= self._leaving.pop(record).record_bytes

    def unstick(self, record: RecordId) -> None:
        """The file of a stuck record is gone now; saying so twice does no harm."""
        if record in self.stuck:
            self.stuck.remove(record)
            self.left(record)

    def left_for(self, claim: Claim, record: RecordId) -> None:
        """Its file is gone, and the claim gets what it still lacks."""
        freed_bytes = self._leaving[record].record_bytes
        self.left(record)
        lacking_bytes = claim.need_bytes - claim.held_bytes
        self._hold(claim, claim.held_bytes + min(freed_bytes, lacking_bytes))

    def stay(self, record: RecordId) -> None:
        """Its file could not be removed: present again, and the last to be chosen next."""
        entry = self._leaving.pop(record)
        self._leaving_bytes -= entry.record_bytes
        self.present[record] = entry
        self._present_bytes += entry.record_bytes

    def commit(self, claim: Claim, entry: Entry) -> None:
        """Its file has its final name."""
        self._drop(claim)
        self.present[claim.record] = entry
        self._present_bytes += entry.record_bytes

    def release(self, claim: Claim) -> None:
        """It was not written."""
        self._drop(claim)
        if claim.left_path:
            self.add_litter(claim.left_path, claim.need_bytes)

    def _drop(self, claim: Claim) -> None:
        self._hold(claim, 0)
        del self._claims[claim.record]

    def add_litter(self, path: str, size_bytes: int) -> None:
        """A temporary file could not be removed."""
        self.litter[path] = size_bytes
        self._litter_bytes += size_bytes

    def litter_gone(self, path: str) -> None:
        """It is gone now; saying so twice does no harm."""
        self._litter_bytes -= self.litter.pop(path, 0)

    def knows(self, record: RecordId) -> bool:
        """Return whether the books speak of it at all."""
        return record in self.present or record in self._claims or record in self._leaving

    def adopt(self, record: RecordId, entry: Entry) -> bool:
        """Take in a file that another instance wrote, if there is free room and it is new."""
        if self.knows(record) or self.used_bytes + entry.record_bytes > self.quota_bytes:
            return False
        self.present[record] = entry
        self._present_bytes += entry.record_bytes
        return True

    def check(self) -> None:
        """Raise `Conservation` unless every sum equals its parts and the quota holds."""
        claims = self._claims.values()
        sums = (
            sum(entry.record_bytes for entry in self.present.values()),
            sum(entry.record_bytes for entry in self._leaving.values()),
            sum(claim.held_bytes for claim in claims),
            sum(self.litter.values()),
        )
        books = (
            self._present_bytes, self._leaving_bytes, self._claimed_bytes, self._litter_bytes
        )  # fmt: skip
        limit_bytes = max(self.quota_bytes, self._found_bytes)
        overfull = any(claim.held_bytes > claim.need_bytes for claim in claims)
        if sums != books or self.used_bytes > limit_bytes or overfull:
            raise Conservation(
                "file tier",
                f"present, leaving, claimed, litter {books} against {sums}, limit {limit_bytes}",
            )
