"""One chunk's store or load: the books, the files and the events, moved together.

Runs on the tier's threads. The lock guards books, events and counters, and is never held over a
call of the file system; in between, the books say `claimed` or `leaving`. What was seen before
such a call is believed after it only if the book's entry is still the same object.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence

from ...fabric.checksum import checksum
from ...fabric.clock import Clock
from ...fabric.file_record import PAYLOAD_BYTES_MAX, record_bytes
from ...fabric.types import Chunk, Lookup
from ..tier_events import RecordId, TierEventLog
from .index import NOTHING, UNKNOWN_CHECKSUM, Claim, Claimed, Entry, FileIndex, Granted
from .jobs import MISSED, Done
from .records import ReadCase, RecordFiles, Scratch, WriteCase

COUNTERS = (
    "stored", "store_skipped", "store_failed", "store_paused", "store_dropped", "loaded",
    "load_missed", "load_failed", "corrupt", "vanished", "evicted", "adopted", "expired", "found",
    "swept", "scan_errors", "disk_full", "internal_errors",
)  # fmt: skip
"""Chunks by what became of them; then files at the start, and faults."""
DISK_FULL_PAUSE_S = 5.0
"""How long nothing is stored after the disk refused: long enough that a full disk costs nearly
nothing, short enough that its end is used."""
TOUCH_S = 60.0
"""A file's time is renewed at most this often: it only orders evictions after a restart."""
READ_FAILURES_MAX = 2
"""Reads of one file that fail in a row before it is given up: the first may be the system's passing
trouble, and a chunk that is looked up as HIT and never loads would be asked for for ever."""


class Transfers:
    """What the threads of a file tier do."""

    def __init__(
        self, index: FileIndex, files: RecordFiles, clock: Clock, lock: threading.RLock
    ) -> None:
        self.index = index
        self.files = files
        self.events = TierEventLog()
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._clock = clock
        self._lock = lock
        self._paused_until_s = float("-inf")

    def store(
        self,
        record: RecordId,
        chunk: Chunk,
        payload: memoryview,
        scratch: Scratch,
        decide: Callable[[Done], None],
    ) -> None:
        """Store a chunk and call `decide` once, now or when another writer of it is through."""
        self._learn_checksum(record, payload.nbytes, scratch)
        with self._lock:
            granted = self._ask(record, payload.nbytes)
            if granted.case is Claimed.IN_FLIGHT:
                granted.claim.waiters.append(lambda entry: decide(self._skip(entry)))
                return
            if granted.case is Claimed.PRESENT:
                self.index.use(record)
                decide(self._skip(self.index.present[record]))
                return
        if granted.case is Claimed.NO_ROOM:
            decide(MISSED)
        else:
            decide(self._fill(granted.claim, chunk, payload, scratch))

    def _ask(self, record: RecordId, payload_bytes: int) -> Granted:
        """Claim room, unless the tier has stopped storing for a while. Under the lock."""
        refused = Granted(Claimed.NO_ROOM, Claim(record, 0))
        paused = self._clock.now_s() < self._paused_until_s
        if paused and record not in self.index.present:
            self.counters["store_paused"] += 1
            return refused
        if payload_bytes <= PAYLOAD_BYTES_MAX:
            granted = self.index.claim(record, record_bytes(payload_bytes))
        else:
            granted = refused
        self.counters["store_failed"] += granted.case is Claimed.NO_ROOM
        return granted

    def _skip(self, entry: Entry) -> Done:
        """Answer a store of what is there already, or was being written. Under the lock.

        What could not be looked into may be there or not: the store failed.
        """
        if entry.checksum == UNKNOWN_CHECKSUM:
            self.counters["store_failed"] += 1
            return MISSED
        self.counters["store_skipped"] += 1
        return Done(Lookup.HIT, entry.checksum)

    def _learn_checksum(self, record: RecordId, payload_bytes: int, scratch: Scratch) -> None:
        """Before a store is skipped for a file that is known by name only, look into it."""
        with self._lock:
            entry = self.index.present.get(record, NOTHING)
        if entry is NOTHING or entry.checksum != UNKNOWN_CHECKSUM:
            return
        read = self.files.peek(record, payload_bytes, scratch)
        if read.case is ReadCase.VERIFIED:
            entry.checksum = read.checksum
        else:
            self._give_up(record, entry, read.case)

    def _fill(self, claim: Claim, chunk: Chunk, payload: memoryview, scratch: Scratch) -> Done:
        """Evict, write, and settle the claim, whatever happens."""
        entry = NOTHING
        moved_bytes = 0
        try:
            self.clear_litter()
            if self._evict_for(claim):
                found = self.files.peek(claim.record, payload.nbytes, scratch)
                if found.case is ReadCase.VERIFIED:
                    entry = self._entry(claim.need_bytes, found.checksum)
                else:
                    entry = self._write(claim, chunk, payload, scratch)
                    moved_bytes = payload.nbytes
        finally:
            self._settle(claim, entry, moved_bytes)
        return MISSED if entry is NOTHING else Done(Lookup.HIT, entry.checksum, moved_bytes)

    def _entry(self, occupied_bytes: int, digest: int) -> Entry:
        return Entry(occupied_bytes, digest, touched_s=self._clock.now_s())

    def _evict_for(self, claim: Claim) -> bool:
        """Remove the claim's victims; return whether it holds all it needs."""
        for record, _ in claim.victims:
            removed = self._remove_file(record)
            with self._lock:
                if not removed:
                    self.index.stay(record)
                    continue
                self.index.left_for(claim, record)
                self.events.lost(record)
                self.counters["evicted"] += 1
        return claim.held_bytes == claim.need_bytes

    def trim(self, victims: Sequence[tuple[RecordId, Entry]]) -> None:
        """Remove what a scan found beyond the quota."""
        for record, _ in victims:
            removed = self._remove_file(record)
            with self._lock:
                if removed:
                    self.index.left(record)
                    self.counters["evicted"] += 1
                else:
                    self.index.stay(record)

    def _remove_file(self, record: RecordId) -> bool:
        try:
            self.files.remove(record)
        except OSError:
            return False
        return True

    def _write(self, claim: Claim, chunk: Chunk, payload: memoryview, scratch: Scratch) -> Entry:
        digest = chunk.checksum or checksum(payload)
        written = self.files.write(claim.record, payload, digest, scratch)
        if written.case is WriteCase.WRITTEN:
            return self._entry(claim.need_bytes, digest)
        claim.left_path = written.left_path
        with self._lock:
            if written.case is WriteCase.FULL:
                self.counters["disk_full"] += 1
                self._paused_until_s = self._clock.now_s() + DISK_FULL_PAUSE_S
        return NOTHING

    def _settle(self, claim: Claim, entry: Entry, moved_bytes: int) -> None:
        with self._lock:
            if entry is NOTHING:
                self.index.release(claim)
                self.counters["store_failed"] += 1
            else:
                self.index.commit(claim, entry)
                self.events.gained(claim.record)
                self.counters["stored" if moved_bytes else "adopted"] += 1
            for waiter in claim.waiters:
                waiter(entry)

    def clear_litter(self) -> None:
        """Try again to remove files whose removal failed."""
        with self._lock:
            paths, records = list(self.index.litter), list(self.index.stuck)
        for path in paths:
            if self.files.discard(path):
                with self._lock:
                    self.index.litter_gone(path)
        for record in records:
            if self._remove_file(record):
                with self._lock:
                    self.index.unstick(record)

    def load(self, record: RecordId, payload: memoryview, scratch: Scratch) -> Done:
        """Load a chunk into `payload` and verify it. A file that the books lack is tried too."""
        now_s = self._clock.now_s()
        with self._lock:
            entry = self.index.present.get(record, NOTHING)
            touch = entry is not NOTHING and now_s - entry.touched_s >= TOUCH_S
        read = self.files.read(record, payload, scratch, touch=touch)
        if read.case is ReadCase.VERIFIED:
            with self._lock:
                self.counters["loaded"] += 1
                if entry is NOTHING:
                    self._adopt(record, record_bytes(payload.nbytes), read.checksum)
                else:
                    entry.checksum, entry.failures = read.checksum, 0
                    self.index.use(record)
                if touch:
                    entry.touched_s = now_s
            return Done(Lookup.HIT, read.checksum, payload.nbytes)
        with self._lock:
            self.counters["load_missed"] += 1
        self._give_up(record, entry, read.case)
        return MISSED

    def _adopt(self, record: RecordId, occupied_bytes: int, digest: int) -> None:
        """Take in a file that another instance wrote, where the quota has room for it."""
        if self.index.adopt(record, self._entry(occupied_bytes, digest)):
            self.counters["adopted"] += 1
            self.events.gained(record)

    def _give_up(self, record: RecordId, entry: Entry, case: ReadCase) -> None:
        """Draw the consequence of a read that did not verify.

        `entry` is what the books said before the read: if they say something else by now, the file
        has been replaced or evicted meanwhile, and what was seen is no news of it.
        """
        with self._lock:
            ours = entry is not NOTHING and self.index.present.get(record) is entry
            if not self._must_go(entry, case, ours=ours):
                return
            if ours:
                self.index.leave(record)
                self.events.lost(record)
            elif case is not ReadCase.CORRUPT or self.index.knows(record):
                return
        removed = case is ReadCase.ABSENT or self._remove_file(record)
        if ours:
            with self._lock:
                if removed:
                    self.index.left(record)
                else:
                    self.index.stuck.add(record)

    def _must_go(self, entry: Entry, case: ReadCase, *, ours: bool) -> bool:
        if case is ReadCase.OTHER_LENGTH:
            return False
        if case is ReadCase.FAILED:
            self.counters["load_failed"] += 1
            entry.failures += ours
            return entry.failures >= READ_FAILURES_MAX
        if case is ReadCase.CORRUPT:
            self.counters["corrupt"] += 1
        else:
            self.counters["vanished"] += ours
        return True
