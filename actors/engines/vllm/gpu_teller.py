"""Telling the pool what the engine's own cache holds, beside the engine's steps.

Ownership. `GpuNews` owns the set of all chunks that the engine has and what of it the pool was not
told; the pool client belongs to whoever hands it in.

Lifecycle. `GpuTeller.start`, changes as they come, `close`. The pool forgets everything when the
client detaches, so nothing is withdrawn at the end.

Failure. The pool is told everything anew (`whole`) where it may lack something: it is another one,
or the client has attached again, or a message was not answered, or more than `NEWS_WAITING_MAX`
changes waited. A pool that is away is asked again every `PAUSE_S`.

Threading. `GpuNews.change` and `GpuTeller.wake` are for the scheduler's thread and never wait for a
socket: what they may wait for is the copy of one list. `turn` is for the teller's thread.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from ....fabric.errors import FabricError
from ....fabric.types import ChunkKey
from ....fabric.wire import BATCH_CHUNKS_MAX
from .gpu_chunks import GpuChange
from .settings import NEWS_WAITING_MAX, PAUSE_S, TELL_EVERY_S

LOG = logging.getLogger("kvfabric.vllm")


class GpuListener(Protocol):
    """What is used of a pool client."""

    attachments: int
    on_attach: Callable[[], object]

    def tell_gpu(
        self, stored: Sequence[ChunkKey], removed: Sequence[ChunkKey], *, whole: bool
    ) -> None:
        """Say it, and wait for the answer."""
        ...


@dataclass(frozen=True, slots=True)
class GpuReport:
    """One message."""

    whole: bool
    stored: Sequence[ChunkKey]
    removed: Sequence[ChunkKey]


class GpuNews:
    """What the engine has, and what of it is news to the pool."""

    def __init__(self, waiting_max: int = NEWS_WAITING_MAX) -> None:
        self._waiting_max = waiting_max
        self._lock = threading.Lock()
        self._held: dict[ChunkKey, None] = {}
        self._waiting: dict[ChunkKey, bool] = {}
        """Whether the chunk was gained, by key: of several changes the last."""
        self._whole = True

    def change(self, change: GpuChange) -> None:
        """Take in what the engine's cache gained and lost."""
        with self._lock:
            for key in change.lost:
                self._held.pop(key, None)
            self._held.update(dict.fromkeys(change.gained))
            if self._whole:
                return
            self._waiting.update(dict.fromkeys(change.lost, False))
            self._waiting.update(dict.fromkeys(change.gained, True))
            self._whole = len(self._waiting) > self._waiting_max
            if self._whole:
                self._waiting.clear()

    def resync(self) -> None:
        """The pool may know nothing, or something else: all is news."""
        with self._lock:
            self._whole = True
            self._waiting.clear()

    def take(self) -> Sequence[GpuReport]:
        """Return the messages that bring the pool up to date."""
        with self._lock:
            whole, self._whole = self._whole, False
            waiting, self._waiting = self._waiting, {}
            held = list(self._held) if whole else []
        if whole:
            starts = range(0, max(len(held), 1), BATCH_CHUNKS_MAX)
            return [GpuReport(at == 0, held[at : at + BATCH_CHUNKS_MAX], ()) for at in starts]
        if not waiting:
            return []
        stored = [key for key, gained in waiting.items() if gained]
        removed = [key for key, gained in waiting.items() if not gained]
        return [GpuReport(whole=False, stored=stored, removed=removed)]


class Turn(Enum):
    """What a turn of the teller came to."""

    IDLE = 0
    """The pool knows everything."""
    TOLD = 1
    AWAY = 2
    """There is no pool, or it did not answer."""


class GpuTeller:
    """The thread that tells."""

    def __init__(self, news: GpuNews, client: Callable[[], GpuListener | None]) -> None:
        self._news = news
        self._client = client
        self._told: tuple[GpuListener, int] | None = None
        """The client that was told everything, and its attachment."""
        self._silent = False
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to tell."""
        self._thread = threading.Thread(target=self._run, name="kvfabric-gpu", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There may be news, or another pool."""
        self._wake.set()

    def turn(self) -> Turn:
        """Tell what is news."""
        client = self._client()
        if client is None:
            return Turn.AWAY
        client.on_attach = self.wake
        attached = (client, client.attachments)
        if attached != self._told:
            self._news.resync()
        reports = self._news.take()
        try:
            for report in reports:
                client.tell_gpu(report.stored, report.removed, whole=report.whole)
        except FabricError as error:
            if not self._silent:
                LOG.warning("the pool was not told what is on the GPU, for now: %s", error)
            self._told, self._silent = None, True
            return Turn.AWAY
        self._told, self._silent = attached, False
        return Turn.TOLD if reports else Turn.IDLE

    def close(self) -> None:
        """End the thread. Waits for a message that is under way."""
        self._closing.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wake.clear()
            turn = self.turn()
            if turn is Turn.IDLE:
                self._wake.wait()
            else:
                self._closing.wait(TELL_EVERY_S if turn is Turn.TOLD else PAUSE_S)
