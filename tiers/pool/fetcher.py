"""Gets chunks that clients ask for into the host region, and copies new ones down to the tiers.

For each chunk: the host first, then the tiers in configured order, then the peers that the request
names. The first that has it serves it; whoever fails is not asked again for that request. Every
request is answered by its deadline, and what is still under way then goes on for later ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...fabric.types import (
    Chunk,
    ChunkKey,
    Committed,
    Lookup,
    NamespaceId,
    Reserved,
    SlotRef,
    SourceRange,
)
from ...fabric.wire import PinReply, SourceRangeWire
from ..base import Job, JobKind, JobResult, Tier
from .context import PoolContext
from .fetch import (
    NO_CHUNK,
    WAITERS_MAX,
    WANTED_MAX,
    Entry,
    Fetches,
    Stage,
    Waiter,
    Wanted,
    reply_at_once,
    reply_of,
    sources_of,
)
from .pulls import PullDone, Pulls
from .sessions import Session

WAIT_S_MAX = 30.0
"""The longest that a client may ask the pool to wait; it has recomputed by then."""
JOB_DEADLINE_S = 30.0
"""For a tier's job. Requests have shorter deadlines of their own; this one frees the slots."""

STORES_SHARE = 2
"""Where stores that wait for tiers pin one slot in so many, the next are dropped: a tier that is
slower than the engines, or stands still, must not keep new chunks out of the region."""


@dataclass(frozen=True, slots=True)
class PoolJob:
    """A tier's job and whom it serves."""

    owner: str
    tier: Tier
    kind: JobKind
    refs: tuple[SlotRef, ...]
    wanted: tuple[Wanted, ...]
    lengths: tuple[int, ...]


class Fetcher:
    """Decides where each wanted chunk comes from, and acts. One thread calls everything."""

    def __init__(
        self,
        context: PoolContext,
        tiers: Sequence[Tier],
        pulls: Pulls,
    ) -> None:
        self.directory = context.directory
        self.memory = context.memory
        self.tiers = tuple(tiers)
        self.pulls = pulls
        self.recorder = context.recorder
        self.clock = context.clock
        self.chunk_bytes: Callable[[NamespaceId, int], int | None] = _unknown_length
        """Set by the core: how long a group's chunks are."""
        self.fetches = Fetches()
        self._process = context.process
        self._jobs: dict[int, PoolJob] = {}
        self._pulling: dict[int, tuple[Wanted, ...]] = {}
        self._serial = 0
        self._storing_max = max(1, context.directory.stats().slots // STORES_SHARE)
        self._storing = 0
        """Chunks in jobs that store."""
        self._writers_changed = False

    @property
    def busy(self) -> bool:
        """Whether anything is under way, so that the shell should look often."""
        return bool(self._jobs or self._pulling or self._writers_changed)

    def pin(
        self,
        session: Session,
        request: int,
        keys: Sequence[ChunkKey],
        wait_s: float,
        sources: Sequence[SourceRangeWire],
    ) -> PinReply | None:
        """Pin what is here. Returns the answer, or None if it comes later by `take_answers`.

        Raises `Malformed` for more sources than `SOURCES_PER_CHUNK_MAX`.
        """
        named = sources_of(len(keys), sources)
        now_s = self.clock.now_s()
        pinned = self.directory.pin(session.client, session.namespace, keys, now_s)
        if wait_s <= 0 or all(one.status is Lookup.HIT for one in pinned):
            return reply_at_once(pinned)
        entries = [
            Entry(one.status, one.chunk if one.status is Lookup.HIT else NO_CHUNK, "host")
            for one in pinned
        ]
        if len(self.fetches.waiters) >= WAITERS_MAX:
            for entry in entries:
                entry.status = entry.status if entry.status is Lookup.HIT else Lookup.BUSY
            return reply_of(entries)
        undecided = [i for i, entry in enumerate(entries) if entry.status is not Lookup.HIT]
        written = {i for i in undecided if entries[i].status is Lookup.PENDING}
        for index in undecided:
            entries[index].status = Lookup.PENDING
        deadline_s = now_s + min(wait_s, WAIT_S_MAX)
        waiter = Waiter(session, request, entries, len(undecided), deadline_s)
        self.fetches.waiters[waiter] = None
        self._decide(
            [
                wanted
                for index in undecided
                if (wanted := self._want(waiter, index, keys[index], named[index])) is not None
                and not self._awaits_writer(wanted, written=index in written)
            ]
        )
        return None

    def _want(
        self, waiter: Waiter, index: int, key: ChunkKey, sources: Sequence[SourceRange]
    ) -> Wanted | None:
        """Let a waiter wait for a chunk; return it if nobody waited for it before."""
        address = (waiter.session.namespace, key)
        known = self.fetches.wanted.get(address)
        if known is None and len(self.fetches.wanted) >= WANTED_MAX:
            waiter.decide(index, Lookup.BUSY, NO_CHUNK, "")
            return None
        wanted = known or self.fetches.want(*address)
        for source in sources:
            wanted.add_source(source)
        self.fetches.join(waiter, index, wanted)
        return wanted if known is None else None

    def _awaits_writer(self, wanted: Wanted, *, written: bool) -> bool:
        if written:
            self.fetches.move(wanted, Stage.WRITER)
        return written

    def _decide(self, batch: Sequence[Wanted]) -> None:
        """Choose where each chunk comes from next, and begin."""
        for namespace in dict.fromkeys(wanted.namespace for wanted in batch):
            self._decide_here([w for w in batch if w.namespace == namespace], namespace)

    def _decide_here(self, batch: Sequence[Wanted], namespace: NamespaceId) -> None:
        left = list(batch)
        for number, tier in enumerate(self.tiers):
            asked = [w for w in left if w.tiers_asked <= number]
            if not asked:
                continue
            answers = tier.lookup(namespace, [w.key for w in asked])
            hits: list[Wanted] = []
            decided: set[Wanted] = set()
            for wanted, answer in zip(asked, answers, strict=True):
                if answer is Lookup.HIT:
                    hits.append(wanted)
                elif answer is Lookup.PENDING:
                    self.fetches.move(wanted, Stage.TIER_ANSWER)
                else:
                    wanted.tiers_asked = number + 1
                    continue
                decided.add(wanted)
            left = [wanted for wanted in left if wanted not in decided]
            if hits:
                self._load(tier, namespace, hits)
        self._pull_or_miss(left, namespace)

    def _pull_or_miss(self, batch: Sequence[Wanted], namespace: NamespaceId) -> None:
        by_source: dict[tuple[str, str], list[Wanted]] = {}
        for wanted in batch:
            if not wanted.sources:
                self._settle(wanted, found=False, origin="")
                continue
            source = wanted.sources.pop(0)
            by_source.setdefault((source.node, source.endpoint), []).append(wanted)
        for (node, endpoint), group in by_source.items():
            pull_id = self._next_serial()
            for wanted in group:
                self.fetches.move(wanted, Stage.PEER_PULL)
            self._pulling[pull_id] = tuple(group)
            source = SourceRange(node, endpoint, 0, len(group))
            self.pulls.pull(pull_id, source, namespace, [w.key for w in group])

    def _next_serial(self) -> int:
        self._serial += 1
        return self._serial

    def _open_job_owner(self) -> tuple[int, str]:
        job_id = self._next_serial()
        owner = f"job:{job_id}"
        self.directory.open_owner(owner, float("inf"), *self._process, self.clock.now_s())
        return job_id, owner

    def _load(self, tier: Tier, namespace: NamespaceId, hits: Sequence[Wanted]) -> None:
        now_s = self.clock.now_s()
        lengths = [self.chunk_bytes(namespace, int.from_bytes(w.key[-4:], "big")) for w in hits]
        job_id, owner = self._open_job_owner()
        got = self.directory.reserve(
            owner,
            namespace,
            [w.key for w in hits],
            list(range(len(hits))),
            [length or 0 for length in lengths],
            now_s,
        )
        mine: list[tuple[Wanted, SlotRef, int]] = []
        for wanted, one, length in zip(hits, got, lengths, strict=True):
            if one.status is Reserved.GRANTED and length:
                self.fetches.move(wanted, Stage.TIER_LOAD)
                mine.append((wanted, one.slot, length))
            elif one.status is Reserved.PRESENT:
                self._settle(wanted, found=True, origin="host")
            elif one.status is Reserved.PENDING:
                self.fetches.move(wanted, Stage.WRITER)
            else:
                wanted.busy = True
                self._settle(wanted, found=False, origin="")
        if not mine:
            self.directory.owner_gone(owner)
            return
        chunks, views = self._chunks([(w.key, ref, length, 0) for w, ref, length in mine])
        self._jobs[job_id] = PoolJob(
            owner,
            tier,
            JobKind.LOAD,
            tuple(ref for _, ref, _ in mine),
            tuple(w for w, _, _ in mine),
            tuple(length for _, _, length in mine),
        )
        tier.submit_load(
            Job(job_id, JobKind.LOAD, namespace, chunks, views, now_s + JOB_DEADLINE_S)
        )

    def _chunks(
        self, items: Sequence[tuple[ChunkKey, SlotRef, int, int]]
    ) -> tuple[tuple[Chunk, ...], tuple[memoryview, ...]]:
        chunks = tuple(Chunk(*item) for item in items)
        views = tuple(self.memory.view(c.slot.slot, c.length_bytes) for c in chunks)
        return chunks, views

    def cascade(self, namespace: NamespaceId, refs: Sequence[SlotRef]) -> None:
        """Copy chunks that a client has just committed to every tier that lacks them.

        Dropped, where too many slots are pinned for that already.
        """
        now_s = self.clock.now_s()
        committed = [chunk for ref in refs if (chunk := self.directory.chunk(ref)) is not None]
        keys = [chunk.key for chunk in committed]
        moved = sum(chunk.length_bytes for chunk in committed)
        self.recorder.count("kvfabric_stored_bytes_total", moved, path="host")
        for tier in self.tiers if keys else ():
            answers = tier.lookup(namespace, keys)
            lacking = [k for k, a in zip(keys, answers, strict=True) if a is not Lookup.HIT]
            if not lacking:
                continue
            if self._storing >= self._storing_max:
                self.recorder.count(
                    "kvfabric_tier_jobs_total", tier=tier.name, kind="store", outcome="dropped"
                )
                continue
            job_id, owner = self._open_job_owner()
            pinned = self.directory.pin(owner, namespace, lacking, now_s)
            chunks = tuple(one.chunk for one in pinned if one.status is Lookup.HIT)
            if not chunks:
                self.directory.owner_gone(owner)
                continue
            self._jobs[job_id] = PoolJob(
                owner,
                tier,
                JobKind.STORE,
                tuple(chunk.slot for chunk in chunks),
                (),
                tuple(chunk.length_bytes for chunk in chunks),
            )
            self._storing += len(chunks)
            views = tuple(self.memory.view(c.slot.slot, c.length_bytes) for c in chunks)
            tier.submit_store(
                Job(job_id, JobKind.STORE, namespace, chunks, views, now_s + JOB_DEADLINE_S)
            )

    def writers_changed(self) -> None:
        """Somebody committed, aborted or died: look again at the chunks that wait for a writer."""
        self._writers_changed = True

    def leave(self, identity: bytes) -> None:
        """A client is gone: nobody answers it any more."""
        self.fetches.leave(identity)

    def step(self) -> None:
        """Take in what tiers and peers have finished, and go on with what they failed."""
        for tier in self.tiers:
            for result in tier.get_finished_jobs():
                self._job_done(result)
        for done in self.pulls.take_done():
            self._pull_done(done)
        self._decide(self.fetches.in_stage(Stage.TIER_ANSWER))
        if self._writers_changed:
            self._writers_changed = False
            self._recheck_writers()

    def _job_done(self, result: JobResult) -> None:
        job = self._jobs.pop(result.job_id)
        name = job.tier.name
        moved = sum(
            length
            for length, outcome in zip(job.lengths, result.outcomes, strict=True)
            if outcome is Lookup.HIT
        )
        self._count_job(job, result, moved)
        if job.kind is JobKind.STORE:
            self._storing -= len(job.refs)
            self.directory.release(job.owner, job.refs, self.clock.now_s())
            self.directory.owner_gone(job.owner)
            return
        hits = [outcome is Lookup.HIT for outcome in result.outcomes]
        good = [i for i, hit in enumerate(hits) if hit]
        statuses = self.directory.commit(
            job.owner,
            [job.refs[i] for i in good],
            [result.checksums[i] for i in good],
            self.clock.now_s(),
        )
        self.directory.abort(
            job.owner, [ref for ref, hit in zip(job.refs, hits, strict=True) if not hit]
        )
        ready = {i for i, s in zip(good, statuses, strict=True) if s is Committed.READY}
        again: list[Wanted] = []
        for index, wanted in enumerate(job.wanted):
            if index in ready:
                self._settle(wanted, found=True, origin=name)
            else:
                wanted.tiers_asked = self.tiers.index(job.tier) + 1
                again.append(wanted)
        self.directory.owner_gone(job.owner)
        self._decide(again)

    def _count_job(self, job: PoolJob, result: JobResult, moved: int) -> None:
        name = job.tier.name
        hits = result.outcomes.count(Lookup.HIT)
        outcome = "done" if hits == len(job.refs) else "partial" if hits else "failed"
        kind = "store" if job.kind is JobKind.STORE else "load"
        self.recorder.count("kvfabric_tier_jobs_total", tier=name, kind=kind, outcome=outcome)
        direction = "stored" if job.kind is JobKind.STORE else "loaded"
        self.recorder.count(f"kvfabric_{direction}_bytes_total", moved, path=name)

    def _pull_done(self, done: PullDone) -> None:
        again: list[Wanted] = []
        for wanted, outcome in zip(self._pulling.pop(done.pull_id), done.outcomes, strict=True):
            if outcome is Lookup.HIT:
                self._settle(wanted, found=True, origin="peer")
            elif outcome is Lookup.PENDING:
                self.fetches.move(wanted, Stage.WRITER)
                self._writers_changed = True
            else:
                wanted.busy = wanted.busy or outcome is Lookup.BUSY
                again.append(wanted)
        self._decide(again)

    def _recheck_writers(self) -> None:
        again: list[Wanted] = []
        for wanted in self.fetches.in_stage(Stage.WRITER):
            status = self.directory.look(wanted.namespace, wanted.key)
            if status is Lookup.HIT:
                self._settle(wanted, found=True, origin="host")
            elif status is Lookup.MISS:
                again.append(wanted)
        self._decide(again)

    def _settle(self, wanted: Wanted, *, found: bool, origin: str) -> None:
        """Answer everybody who waits for a chunk."""
        self.fetches.drop(wanted)
        now_s = self.clock.now_s()
        failed = Lookup.BUSY if wanted.busy else Lookup.MISS
        for waiter, indices in wanted.waiting.items():
            if not found:
                for index in indices:
                    waiter.decide(index, failed, NO_CHUNK, "")
                continue
            owner = waiter.session.client
            keys = [wanted.key] * len(indices)
            pinned = self.directory.pin(owner, wanted.namespace, keys, now_s)
            for index, one in zip(indices, pinned, strict=True):
                if one.status is Lookup.HIT:
                    waiter.decide(index, Lookup.HIT, one.chunk, origin)
                else:
                    waiter.decide(index, Lookup.MISS, NO_CHUNK, "")

    def take_answers(self, now_s: float) -> Sequence[tuple[bytes, int, PinReply]]:
        """Return the requests that are decided or out of time, as identity, request, answer."""
        answers: list[tuple[bytes, int, PinReply]] = []
        for waiter in self.fetches.overdue(now_s):
            for entry in waiter.entries:
                if entry.status is Lookup.PENDING:
                    entry.status = Lookup.MISS
            answers.append((waiter.session.identity, waiter.request, reply_of(waiter.entries)))
            self.fetches.remove(waiter)
        return answers

    def stats(self) -> dict[str, float]:
        """Return gauges and counts of the directory, the tiers and the pulls, by name."""
        directory = self.directory.stats()
        values = {
            name: float(getattr(directory, name)) for name in type(directory).__dataclass_fields__
        }
        for tier in self.tiers:
            stats = tier.stats()
            values[f"{tier.name}_used_bytes"] = float(stats.used_bytes)
            values[f"{tier.name}_quota_bytes"] = float(stats.quota_bytes)
            values[f"{tier.name}_chunks"] = float(stats.chunks)
            for name, count in stats.counters.items():
                values[f"{tier.name}_{name}"] = float(count)
        return values | self.pulls.stats()

    def check(self) -> None:
        """Raise `Conservation` if the directory or a tier does not balance."""
        self.directory.check()
        for tier in self.tiers:
            tier.check()


def _unknown_length(_namespace: NamespaceId, _group: int) -> int | None:
    return None
