"""Verifies in the background what a restarted pool adopted, so that corruption is found before use.

Nothing is pinned: a chunk that was evicted meanwhile has another generation afterwards, and its sum
says nothing. Readers verify what they load in any case. One thread calls everything; the sum is
taken on the executor's.
"""

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Executor, Future

from ...fabric.checksum import checksum
from ...fabric.types import Chunk
from .context import PoolContext

SCRUB_BYTES_S = 256 << 20
"""A fiftieth of what a core can sum: a region of 256 GB takes a quarter of an hour and nobody
notices."""


class Scrubber:
    """Sums chunks one after the other, at a bounded rate."""

    def __init__(
        self, context: PoolContext, executor: Executor, chunks: Iterable[Chunk] = ()
    ) -> None:
        self._context = context
        self._executor = executor
        self._left = deque(chunks)
        self._summing: tuple[Chunk, Future[int]] | None = None
        self._next_s = float("-inf")

    def next_deadline_s(self) -> float:
        """Return when `step` has something to do; infinity when all is verified."""
        return self._next_s if self._left or self._summing else float("inf")

    def step(self) -> None:
        """Take in a sum, and begin the next one if it is due."""
        now_s = self._context.clock.now_s()
        if now_s < self._next_s:
            return
        if self._summing is not None:
            chunk, future = self._summing
            if not future.done():
                return
            self._summing = None
            self._judge(chunk, future.result())
        while self._left and self._summing is None:
            chunk = self._left.popleft()
            if self._still_there(chunk):
                view = self._context.memory.view(chunk.slot.slot, chunk.length_bytes)
                self._summing = chunk, self._executor.submit(checksum, view)
                self._next_s = now_s + chunk.length_bytes / SCRUB_BYTES_S

    def _still_there(self, chunk: Chunk) -> bool:
        return self._context.directory.chunk(chunk.slot) == chunk

    def _judge(self, chunk: Chunk, found: int) -> None:
        if found != chunk.checksum and self._still_there(chunk):
            self._context.directory.drop([chunk.slot])
            self._context.recorder.count("kvfabric_checksum_failures_total", path="host")
