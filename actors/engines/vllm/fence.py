"""Blocks that a save still reads, and who is about to overwrite them.

The engine frees blocks without asking and hands them out again. A save whose blocks are handed out
must be over, or thrown away, before the engine writes them.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class _Reading:
    blocks: frozenset[int]
    ranks_left: int


class Fence:
    """All saves that were issued and are not over on every rank."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._jobs: dict[int, _Reading] = {}
        self._readers: Counter[int] = Counter()
        """Block and how many jobs read it."""

    def __len__(self) -> int:
        return len(self._jobs)

    def issue(self, job: int, blocks: Iterable[int]) -> None:
        """Note that a job reads these blocks from now on."""
        reading = _Reading(frozenset(blocks), self._ranks)
        self._jobs[job] = reading
        self._readers.update(reading.blocks)

    def over(self, job: int) -> None:
        """Note that one rank is done with a job. Jobs that are not known are over long ago."""
        reading = self._jobs.get(job)
        if reading is None:
            return
        reading.ranks_left -= 1
        if reading.ranks_left > 0:
            return
        del self._jobs[job]
        for block in reading.blocks:
            self._readers[block] -= 1
            if not self._readers[block]:
                del self._readers[block]

    def readers(self, written: Iterable[int]) -> tuple[int, ...]:
        """Return the jobs that read any of the blocks."""
        blocks = set(written)
        if self._readers.keys().isdisjoint(blocks):
            return ()
        return tuple(job for job, each in self._jobs.items() if not blocks.isdisjoint(each.blocks))
