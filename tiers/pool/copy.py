"""Copies between a client's buffers and slots, with the checksum taken on the way.

A tile is copied and then summed while it is still in the core's cache, so that the sum costs a
fraction of a second pass. Tiles are shared out to a few threads: the copy and the sum both let go
of the GIL.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np

from ...fabric.checksum import PIECE_BYTES, combine_pieces, piece_digests

TILE_BYTES = 8 * PIECE_BYTES
"""Fits a core's second-level cache (1 MiB or more on servers). Two threads move 9.0 GB/s with this,
8.1 with half of it: the sum of a 64 KiB piece holds the GIL, and a shorter copy waits for it."""
THREADS = 2
"""A pool's host has more cores, but they are the engine's; two fill a memory channel pair."""


def copy_summed(target: memoryview, source: memoryview) -> int:
    """Copy `source` over `target` (equal length, contiguous) and return its checksum."""
    into, out_of = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
    digests: list[bytes] = []
    for start in range(0, source.nbytes, TILE_BYTES):
        end = start + TILE_BYTES
        np.copyto(into[start:end], out_of[start:end])
        digests.append(piece_digests(target[start:end]))
    return combine_pieces(b"".join(digests))


class Copier:
    """Runs one function over many chunks on a few threads."""

    def __init__(self, threads: int = THREADS) -> None:
        self._workers = threads
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kvfabric-copy")

    def map(self, work: Callable[[int], int], count: int) -> list[int]:
        """Return `[work(0), ..., work(count - 1)]`; the order of execution is free.

        When it raises, because a piece of work did, no other runs any more or begins later: whoever
        gives the slots back must know that nothing writes them.
        """
        if count <= 1:
            return [work(index) for index in range(count)]
        results = [0] * count
        left = iter(range(count))  # shared: the GIL gives each number to one thread
        stop = threading.Event()

        def run() -> None:
            try:
                for index in left:
                    if stop.is_set():
                        return
                    results[index] = work(index)
            except BaseException:
                stop.set()
                raise

        # One future for each piece of work would cost more than to copy 64 KiB.
        futures = [self._threads.submit(run) for _ in range(min(self._workers, count))]
        try:
            for future in futures:
                future.result()
        except BaseException:
            stop.set()
            for future in futures:
                future.cancel()
            wait(futures)
            raise
        return results

    def copy(self, targets: Sequence[memoryview], sources: Sequence[memoryview]) -> list[int]:
        """Copy each source over its target and return the checksums of what was copied."""
        return self.map(lambda index: copy_summed(targets[index], sources[index]), len(targets))

    def close(self) -> None:
        """Stop the threads when they are idle."""
        self._threads.shutdown(wait=True)
