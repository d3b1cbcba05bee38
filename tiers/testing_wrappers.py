"""Tiers that misbehave within the contract, and a clock that a test turns by hand.

They wrap any real tier, so that what stands above tiers can be tried with jobs that fail or take
long, without waiting and without luck.
"""

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

from ..fabric.clock import Clock
from ..fabric.types import ChunkKey, Lookup, NamespaceId
from .base import Job, JobKind, JobResult, Tier, TierEvent, TierStats


class ManualClock:
    """A clock that moves when told; sleeping moves it."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        """Return the time."""
        return self._now_s

    def unix_s(self) -> float:
        """Return the same time: it counts from the epoch as well as from anything else."""
        return self._now_s

    def sleep_s(self, seconds: float) -> None:
        """Move on at once."""
        self._now_s += seconds


class _Wrapper(Tier):
    """Hands everything on."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.name = tier.name
        self.medium = tier.medium

    def lookup(self, namespace: NamespaceId, keys: Sequence[ChunkKey]) -> Sequence[Lookup]:
        """Ask the tier."""
        return self.tier.lookup(namespace, keys)

    def submit_store(self, job: Job) -> None:
        """Hand it on."""
        self.tier.submit_store(job)

    def submit_load(self, job: Job) -> None:
        """Hand it on."""
        self.tier.submit_load(job)

    def get_finished_jobs(self) -> Sequence[JobResult]:
        """Return the tier's results."""
        return list(self.tier.get_finished_jobs())

    def take_events(self) -> Sequence[TierEvent]:
        """Return the tier's events."""
        return self.tier.take_events()

    def drain(self) -> None:
        """Drain the tier."""
        self.tier.drain()

    def close(self) -> None:
        """Close the tier."""
        self.tier.close()

    def stats(self) -> TierStats:
        """Return the tier's gauges and counts."""
        return self.tier.stats()

    def check(self) -> None:
        """Check the tier."""
        self.tier.check()


class Fault(Enum):
    """What `FaultyTier` does to the job that it picks."""

    JOB = "job"
    """No chunk is carried out."""
    CHUNK = "chunk"
    """All but the last chunk are carried out."""


class FaultyTier(_Wrapper):
    """Answers MISS for all or part of the `fail_nth` submitted job (from 1), and works otherwise.

    A test runs its scenario with fail_nth 1, 2, 3... until `faults` stays 0.
    """

    def __init__(self, tier: Tier, fail_nth: int, fault: Fault = Fault.JOB) -> None:
        super().__init__(tier)
        self.faults = 0
        """Jobs that were made to fail."""
        self._fail_nth = fail_nth
        self._fault = fault
        self._submitted = 0
        self._shortened: set[int] = set()
        self._refused: list[JobResult] = []

    def submit_store(self, job: Job) -> None:
        """Hand it on, or fail it."""
        self._submit(job)

    def submit_load(self, job: Job) -> None:
        """Hand it on, or fail it."""
        self._submit(job)

    def _submit(self, job: Job) -> None:
        submit = self.tier.submit_store if job.kind is JobKind.STORE else self.tier.submit_load
        self._submitted += 1
        if self._submitted != self._fail_nth:
            submit(job)
            return
        self.faults += 1
        if self._fault is Fault.CHUNK and job.chunks:
            self._shortened.add(job.job_id)
            submit(replace(job, chunks=job.chunks[:-1], views=job.views[:-1]))
        else:
            count = len(job.chunks)
            self._refused.append(
                JobResult(job.job_id, (Lookup.MISS,) * count, (0,) * count, 0, 0.0)
            )

    def get_finished_jobs(self) -> Sequence[JobResult]:
        """Return the tier's results, and those of the jobs that failed."""
        results, self._refused = self._refused, []
        for result in self.tier.get_finished_jobs():
            if result.job_id in self._shortened:
                self._shortened.remove(result.job_id)
                results.append(
                    replace(
                        result,
                        outcomes=(*result.outcomes, Lookup.MISS),
                        checksums=(*result.checksums, 0),
                    )
                )
            else:
                results.append(result)
        return results


class SlowTier(_Wrapper):
    """Holds every result until `delay_s` have passed on the clock since it was seen finished."""

    def __init__(self, tier: Tier, clock: Clock, delay_s: float) -> None:
        super().__init__(tier)
        self._clock = clock
        self._delay_s = delay_s
        self._held: list[tuple[float, JobResult]] = []

    def get_finished_jobs(self) -> Sequence[JobResult]:
        """Return the results whose time has come."""
        now_s = self._clock.now_s()
        ready_s = now_s + self._delay_s
        self._held += [(ready_s, result) for result in self.tier.get_finished_jobs()]
        ready = [result for due_s, result in self._held if due_s <= now_s]
        self._held = [held for held in self._held if held[0] > now_s]
        return ready

    def drain(self) -> None:
        """Drain the tier, then sleep on the clock until everything held is due."""
        self.tier.drain()
        now_s = self._clock.now_s()
        self._held += [(now_s + self._delay_s, result) for result in self.tier.get_finished_jobs()]
        if self._held:
            self._clock.sleep_s(max(0.0, max(due_s for due_s, _ in self._held) - now_s))

    def close(self) -> None:
        """Drain and close; the results still surface."""
        self.drain()
        self.tier.close()
