"""The way to the pool of this node: attached, being attached, or left alone for a while.

Ownership. A link owns one pool client and closes it.

Lifecycle. `open` tries once and, where the pool does not answer, goes on trying in a thread of its
own until it does or the link is closed. A link that was opened may be closed from any thread.

Failure. A refusal (another namespace, a layout that is not supported) is raised by `open`; one that
comes later is logged, and the engine goes on without a pool. After `silence` the client is not
given out for `PAUSE_S`, so that a dead pool costs one wait in a second.
"""

import logging
import threading
from collections.abc import Callable

from ....fabric.clock import Clock
from ....fabric.errors import FabricError, Unavailable
from ....tiers.pool.client import PoolClient
from .settings import PAUSE_S

LOG = logging.getLogger("kvfabric.vllm")


class Link:
    """One side's way to the pool."""

    def __init__(self, attach: Callable[[], PoolClient], clock: Clock) -> None:
        self._attach = attach
        self._clock = clock
        self._lock = threading.Lock()
        self._client: PoolClient | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._silent_until_s = 0.0

    def open(self) -> None:
        """Attach, or begin to try. Raises what the pool refuses."""
        try:
            self._client = self._attach()
        except Unavailable as error:
            LOG.warning("%s The engine computes everything itself until then.", error)
            self._thread = threading.Thread(target=self._retry, name="kvfabric-link", daemon=True)
            self._thread.start()

    @property
    def client(self) -> PoolClient | None:
        """The client, unless there is none or the pool is left alone."""
        if self._clock.now_s() < self._silent_until_s:
            return None
        return self._client

    def silence(self) -> None:
        """The pool did not answer: leave it alone for a while."""
        self._silent_until_s = self._clock.now_s() + PAUSE_S

    def close(self) -> None:
        """Let go of the client. Waits for a try that is under way."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _retry(self) -> None:
        while not self._closing.wait(PAUSE_S):
            try:
                self._client = self._attach()
            except Unavailable:
                continue
            except FabricError as error:
                LOG.error("The pool refuses this engine, which goes on without: %s", error)  # noqa: TRY400 - the message says it all
            return
