"""The worker's half: chunks into the engine's blocks and out of them.

Ownership. It owns two pool clients, one for loads and one for saves, each with a thread. Blocks are
the engine's: a load may write the blocks of its job until it is reported over, a save may read
those of its job until it is reported over or cancelled.

Lifecycle. Made when the engine has its cache, `take` once for each step, `close` at the end.

Failure. A chunk that does not come makes its request recompute; one that cannot be saved is not
saved. A pool that does not answer is reported and left alone for a while. A save that is cancelled
leaves no chunk.

Threading. All methods are for the engine's thread. Nothing there waits for the pool, but a
synchronous load, and, for at most `FLUSH_WAIT_S`, the copies out of blocks that a step overwrites.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ....fabric.checksum import checksum
from ....fabric.clock import Clock
from ....fabric.errors import Closed, FabricError, Unavailable
from ....fabric.types import ChunkKey, Lookup
from ....tiers.pool.client import PoolClient
from .copier import BlockCopier
from .geometry import CacheGeometry
from .link import Link
from .settings import FLUSH_WAIT_S, SAVE_SLICE_CHUNKS
from .transfers import NULL_BLOCK, ChunkRun, LoadJob, SaveJob, StepPlan, WorkerReport

LOG = logging.getLogger("kvfabric.vllm")

AttachFor = Callable[[int], PoolClient]
"""Attach under the namespace of so many resets."""


class Cancelled(FabricError):
    """The engine needs the blocks of a save: what was not committed is thrown away."""


@dataclass(slots=True)
class _Place:
    """Where a chunk lies in the engine's cache."""

    key: ChunkKey
    group: int
    depth: int
    block_ids: Sequence[int]


@dataclass(slots=True, eq=False)
class _Saving:
    job: SaveJob
    reset: int
    cancelled: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True)
class Finished:
    """What became of loads since the last step."""

    requests: set[str] = field(default_factory=set[str])
    failed: set[str] = field(default_factory=set[str])
    bad_blocks: set[int] = field(default_factory=set[int])


class WorkerSide:
    """All copies of one rank."""

    def __init__(
        self, geometry: CacheGeometry, copier: BlockCopier, attach: AttachFor, clock: Clock
    ) -> None:
        self._geometry = geometry
        self._copier = copier
        self._place = {group.engine_group: at for at, group in enumerate(geometry.groups)}
        self._lock = threading.Lock()
        self._report = WorkerReport()
        self._finished = Finished()
        self._savings: dict[int, _Saving] = {}
        self._reset = 0
        self._closing = False
        self._loads: queue.SimpleQueue[tuple[int, LoadJob] | None] = queue.SimpleQueue()
        """Bounded by the engine's requests, each of which has one load."""
        self._saves: queue.SimpleQueue[_Saving | None] = queue.SimpleQueue()
        """Bounded by `SAVES_WAITING_MAX` of the scheduler."""
        self._loading = _Lane(attach, clock)
        self._saving = _Lane(attach, clock)
        self._threads = [
            threading.Thread(target=self._run_loads, name="kvfabric-load", daemon=True),
            threading.Thread(target=self._run_saves, name="kvfabric-save", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def take(self, plan: StepPlan) -> None:
        """Begin what the plan says, before the step computes. Waits for what it overwrites."""
        self._reset = plan.reset
        for job in plan.saves:
            saving = _Saving(job, plan.reset)
            self._savings[job.job] = saving
            self._saves.put(saving)
        self._flush(plan.flush)

    def start_loads(self, plan: StepPlan) -> None:
        """Begin the plan's loads; they end between steps."""
        for job in plan.loads:
            self._loads.put((plan.reset, job))

    def load_now(self, plan: StepPlan) -> None:
        """Load before the step computes; blocks that did not come are in `finished`."""
        for job in plan.loads:
            self._load(plan.reset, job)

    def finished(self) -> Finished:
        """Return what became of loads since the last call."""
        with self._lock:
            finished, self._finished = self._finished, Finished()
        return finished

    def report(self) -> WorkerReport | None:
        """Return what the scheduler must know; None if there is nothing."""
        with self._lock:
            if self._report.empty:
                return None
            report, self._report = self._report, WorkerReport()
        for job in report.saved:
            self._savings.pop(job, None)
        return report

    def close(self) -> None:
        """End both threads; saves that did not begin are dropped."""
        self._closing = True
        for saving in self._savings.values():
            saving.cancelled.set()
        self._loads.put(None)
        self._saves.put(None)
        for thread in self._threads:
            thread.join()
        self._loading.close()
        self._saving.close()

    def _flush(self, jobs: Iterable[int]) -> None:
        """Wait for saves that read what is about to be overwritten, or cancel them."""
        waiting = [self._savings[job] for job in jobs if job in self._savings]
        for saving in waiting:
            if not saving.over.wait(FLUSH_WAIT_S / len(waiting)):
                saving.cancelled.set()

    def _run_loads(self) -> None:
        while (item := self._loads.get()) is not None:
            self._load(*item)

    def _run_saves(self) -> None:
        while (saving := self._saves.get()) is not None:
            silent = False
            try:
                if not saving.cancelled.is_set():
                    silent = self._save(saving)
            except (Cancelled, Closed):
                LOG.debug("save %d was thrown away", saving.job.job)
            except FabricError as error:
                LOG.warning("save %d: %s", saving.job.job, error)
            except Exception:  # of a copy, say: whoever waits for this thread would wait for ever
                LOG.exception("save %d", saving.job.job)
            saving.over.set()
            with self._lock:
                self._report.saved.append(saving.job.job)
                self._report.silent |= silent

    def _load(self, reset: int, job: LoadJob) -> None:
        places = self._places(job.runs)
        missing, silent = list(range(len(places))), False
        try:
            client = self._loading.client(reset)
            if client is not None and not self._closing:
                missing = self._fill(client, places)
        except Unavailable as error:
            LOG.warning("load of %s: %s", job.request_id, error)
            self._loading.silence()
            silent = True
        except FabricError as error:
            LOG.warning("load of %s: %s", job.request_id, error)
        except Exception:  # of a copy, say: the request would wait for ever
            LOG.exception("load of %s", job.request_id)
        with self._lock:
            self._finished.requests.add(job.request_id)
            self._report.silent |= silent
            if missing:
                self._report.failed_loads.append(job.request_id)
                self._finished.failed.add(job.request_id)
                self._finished.bad_blocks.update(
                    block for at in missing for block in places[at].block_ids if block != NULL_BLOCK
                )

    def _fill(self, client: PoolClient, places: Sequence[_Place]) -> list[int]:
        """Load chunks into their blocks; return those that did not come."""

        def drain(index: int, slot: memoryview, expected: int) -> int:
            found = checksum(slot)
            if found == expected:
                self._copier.unpack(places[index].group, places[index].block_ids, slot)
            return found

        loaded = client.load([place.key for place in places], drain)
        return [at for at, status in enumerate(loaded.statuses) if status is not Lookup.HIT]

    def _save(self, saving: _Saving) -> bool:
        """Store a job's chunks slice by slice; say whether the pool was silent."""
        client = self._saving.client(saving.reset)
        if client is None:
            return False
        places = self._places(saving.job.runs)
        try:
            for first in range(0, len(places), SAVE_SLICE_CHUNKS):
                self._store(client, places[first : first + SAVE_SLICE_CHUNKS], saving.cancelled)
        except Unavailable as error:
            LOG.warning("%s", error)
            self._saving.silence()
            return True
        return False

    def _store(
        self, client: PoolClient, places: Sequence[_Place], cancelled: threading.Event
    ) -> None:
        def fill(index: int, slot: memoryview) -> int:
            if cancelled.is_set():
                raise Cancelled("the engine needs the blocks")
            self._copier.pack(places[index].group, places[index].block_ids, slot)
            found = checksum(slot)
            if cancelled.is_set():
                raise Cancelled("the engine needs the blocks")
            return found

        client.store([place.key for place in places], [place.depth for place in places], fill)

    def _places(self, runs: Iterable[ChunkRun]) -> list[_Place]:
        places: list[_Place] = []
        for run in runs:
            group = self._place[run.engine_group]
            for at, key in enumerate(run.keys(self._geometry.index(group))):
                places.append(_Place(key, group, run.first + at, run.blocks_of(at)))
        return places


class _Lane:
    """The pool client of one thread, for the namespace of the latest reset."""

    def __init__(self, attach: AttachFor, clock: Clock) -> None:
        self._attach_for = attach
        self._clock = clock
        self._reset = -1
        self._link: Link | None = None

    def client(self, reset: int) -> PoolClient | None:
        """Return a client for a reset, the same as long as that does not change."""
        if reset < self._reset:
            return None  # a job of before the reset: nobody is to find it
        if self._link is None or reset != self._reset:
            self.close()
            self._reset = reset
            self._link = Link(lambda: self._attach_for(reset), self._clock)
            self._link.open()
        return self._link.client

    def silence(self) -> None:
        """Leave the pool alone for a while."""
        if self._link is not None:
            self._link.silence()

    def close(self) -> None:
        """Let go of the client."""
        if self._link is not None:
            self._link.close()
            self._link = None
