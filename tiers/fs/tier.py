"""The file tier: one chunk per file, `<root>/<namespace hex>/<first 2 hex>/<key hex>.kv`.

Ownership. The files are content-addressed records (`fabric.file_record`), mode 0600. The quota is
this instance's and counts what its files occupy, temporary ones included. Instances may share a
root: they serve and replace each other's files safely, each within its own quota.

Lifecycle. At the start a thread scans the directory in the background: until it is through, lookups
of unknown chunks answer PENDING (MISS after `SCAN_DEADLINE_S`) and jobs wait. Temporary files of
dead instances are swept. `close` drains, stops the threads and leaves the files for the next start.

Failure. A record is verified on every load. One that is corrupt, of the wrong length or gone is
removed, forgotten and a MISS; so is a read that fails twice. A store that fails leaves nothing;
after a full or read-only disk nothing is stored for `DISK_FULL_PAUSE_S`. All is counted. Files are
not synced: after a power cut the checksums tell which records survived.

Lookup answers from memory alone. A chunk that another instance wrote later than our scan is
therefore a MISS to `lookup`, yet a load of it succeeds, and a store of it adopts the file.

Threading. Readers take loads; writers take loads first, then stores. All calls of the file system
are made by these threads, none by the caller's, and copies and checksums release the interpreter
lock.
"""

import secrets
import threading
from collections.abc import Callable, Sequence
from functools import partial

from ...fabric.clock import Clock
from ...fabric.config import FileTierConfig
from ...fabric.errors import Closed, Refused
from ...fabric.file_record import BLOCK_BYTES
from ...fabric.types import ChunkKey, Lookup, Medium, NamespaceId
from ..base import Job, JobKind, JobResult, Tier, TierEvent, TierStats
from .index import FileIndex
from .jobs import MISSED, ActiveJob, Done, JobQueue
from .ops import FileOps
from .owner import Owner
from .records import IoMode, RecordFiles, Scratch
from .scan import Scan
from .transfers import Transfers

SCAN_DEADLINE_S = 10.0
"""How long lookups answer PENDING for a scan: a local disk lists a million files in less, and a
request that waits longer had better recompute."""
DRAIN_LOOK_S = 0.05
"""How often a drain looks at the handed-in clock for jobs past their deadline."""


class FileTier(Tier):
    """Chunks in files under `config.root_dir`."""

    def __init__(
        self,
        config: FileTierConfig,
        clock: Clock,
        *,
        ops: FileOps | None = None,
        mode: IoMode = IoMode.PROBE,
        instance: str = "",
    ) -> None:
        """Start the threads. Raises `Refused` if the directory cannot be made.

        `instance` names this tier's temporary files and must be unique; by default it is random.
        """
        self.name = "fs"
        self.medium = Medium.STORAGE
        self._config = config
        self._clock = clock
        self._ops = ops or FileOps()
        self._instance = instance or secrets.token_hex(8)
        root = config.root_dir.rstrip("/")
        try:
            self._ops.make_root(root)
        except OSError as error:
            raise Refused(
                "root_dir", str(error), "Name a directory that the pool's user may write."
            ) from error
        self._mode = mode
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._files = RecordFiles(root, self._instance, self._ops)
        self._transfers = Transfers(FileIndex(config.quota_bytes), self._files, clock, self._lock)
        self._queue = JobQueue(config.readers + config.writers)
        self._finished: list[JobResult] = []
        self._unfinished = 0
        self._scanning = True
        self._scan_deadline_s = clock.now_s() + SCAN_DEADLINE_S
        self._draining = False
        self._stopping = False
        self._owner = Owner(root, self._instance, self._ops)
        self._threads = [threading.Thread(target=self._scan, name="kvfabric-fs-scan", daemon=True)]
        for kind, count, stores in (
            ("reader", config.readers, False),
            ("writer", config.writers, True),
        ):
            self._threads += [
                threading.Thread(
                    target=self._serve,
                    kwargs={"stores": stores},
                    name=f"kvfabric-fs-{kind}-{number}",
                    daemon=True,
                )
                for number in range(count)
            ]
        for thread in self._threads:
            thread.start()

    def lookup(self, namespace: NamespaceId, keys: Sequence[ChunkKey]) -> Sequence[Lookup]:
        """Answer from memory, without the lock; PENDING for the unknown while the scan runs."""
        pending = self._scanning and self._clock.now_s() <= self._scan_deadline_s
        absent = Lookup.PENDING if pending else Lookup.MISS
        return self._transfers.index.lookup(namespace, keys, absent)

    def submit_store(self, job: Job) -> None:
        """Queue it, or answer MISS at once if `queue_jobs_max` stores wait. Raises `Closed`."""
        self._submit(job)

    def submit_load(self, job: Job) -> None:
        """Queue it. Raises `Closed`."""
        self._submit(job)

    def _submit(self, job: Job) -> None:
        now_s = self._clock.now_s()
        deadline_s = min(job.deadline_s, now_s + self._config.job_deadline_s)
        active = ActiveJob(job, now_s, deadline_s)
        with self._lock:
            if self._draining:
                raise Closed(f"tier {self.name}")
            self._unfinished += 1
            full = len(self._queue.stores) >= self._config.queue_jobs_max
            if full and job.kind is JobKind.STORE:
                self._transfers.counters["store_dropped"] += active.expire()
            if active.terminal:
                self._finish(active)
                return
            self._queue.put(active)
            self._work.notify_all()

    def get_finished_jobs(self) -> Sequence[JobResult]:
        """Return new results, among them those of jobs that their deadline has just ended."""
        with self._lock:
            self._expire()
            finished, self._finished = self._finished, []
        return finished

    def take_events(self) -> Sequence[TierEvent]:
        """Return all gains and losses since the last call: replayed, they are the contents."""
        with self._lock:
            return self._transfers.events.take()

    def drain(self) -> None:
        """Wait for all jobs. Queued ones end by their deadline; a system call has none."""
        with self._lock:
            while self._unfinished:
                self._idle.wait(DRAIN_LOOK_S)
                self._expire()

    def close(self) -> None:
        """Drain and stop the threads; the files stay."""
        with self._lock:
            self._draining = True
        self.drain()
        with self._lock:
            self._stopping = True
            self._work.notify_all()
        for thread in self._threads:
            thread.join()
        self._transfers.clear_litter()
        self._owner.release()

    def stats(self) -> TierStats:
        """Return gauges and counts; `direct_io` is 1 where files are opened with O_DIRECT."""
        with self._lock:
            index, transfers = self._transfers.index, self._transfers
            counters = dict(transfers.counters)
            counters["events_dropped"] = transfers.events.dropped
            counters["direct_io"] = int(self._files.direct)
            counters["scanning"] = int(self._scanning)
            counters["loads_waiting"] = len(self._queue.loads)
            counters["stores_waiting"] = len(self._queue.stores)
            return TierStats(index.used_bytes, index.quota_bytes, len(index.present), counters)

    def check(self) -> None:
        """Raise `Conservation` if the books do not balance."""
        with self._lock:
            self._transfers.index.check()

    def _expire(self) -> None:
        for active, chunks in self._queue.expire(self._clock.now_s()):
            self._transfers.counters["expired"] += chunks
            if active.terminal:
                self._finish(active)

    def _finish(self, active: ActiveJob) -> None:
        self._finished.append(active.result(self._clock.now_s()))
        self._unfinished -= 1
        self._idle.notify_all()

    def _decide(self, active: ActiveJob, position: int, done: Done) -> None:
        with self._lock:
            before = active.terminal
            active.decide(position, done)
            if active.terminal and not before:
                self._finish(active)

    def _scan(self) -> None:
        """The scanning thread: own the instance, probe, walk, and let the others begin."""
        transfers = self._transfers
        try:
            owned = self._owner.take()
            probed = self._files.probe(self._mode)
            scan = Scan(self._files.root, self._instance, self._ops, lambda: self._stopping)
            scanned = scan.run()
            with self._lock:
                if probed.left_path:
                    transfers.index.add_litter(probed.left_path, BLOCK_BYTES)
                surplus = transfers.index.fill(scanned.records)
            transfers.trim(surplus)
            with self._lock:
                transfers.index.trimmed()
                for record in transfers.index.present:
                    transfers.events.gained(record)
                transfers.counters["found"] += len(scanned.records)
                transfers.counters["swept"] += scanned.swept
                transfers.counters["corrupt"] += scanned.misshapen
                transfers.counters["scan_errors"] += scanned.errors + (not owned)
        except Exception:  # noqa: BLE001  the outermost loop of the thread: counted, tier starts cold
            self._count_internal_error()
        finally:
            with self._lock:
                self._scanning = False
                self._work.notify_all()

    def _serve(self, *, stores: bool) -> None:
        """A reader's or a writer's thread."""
        scratch = Scratch()
        while True:
            with self._lock:
                while self._scanning or not self._queue.has(stores=stores):
                    if self._stopping and not self._scanning:
                        return
                    self._work.wait()
                run = self._queue.take()
            for position in run.positions:
                try:
                    self._carry_out(run.active, position, scratch)
                except Exception:  # noqa: BLE001  the outermost loop of the thread: counted
                    self._count_internal_error()
                    self._decide(run.active, position, MISSED)

    def _carry_out(self, active: ActiveJob, position: int, scratch: Scratch) -> None:
        decide: Callable[[Done], None] = partial(self._decide, active, position)
        if self._clock.now_s() > active.deadline_s:
            with self._lock:
                self._transfers.counters["expired"] += 1
            decide(MISSED)
            return
        record, chunk, payload = active.chunk(position)
        if active.job.kind is JobKind.STORE:
            self._transfers.store(record, chunk, payload, scratch, decide)
        else:
            decide(self._transfers.load(record, payload, scratch))

    def _count_internal_error(self) -> None:
        with self._lock:
            self._transfers.counters["internal_errors"] += 1
