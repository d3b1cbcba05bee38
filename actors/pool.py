"""The Ray actor that owns a node's pool. A shell: everything is in `tiers.pool.server`."""

import os
from collections.abc import Mapping
from typing import Any

import ray

from ..fabric.clock import SystemClock
from ..fabric.config import PoolConfig, parse
from ..fabric.errors import FabricError
from ..tiers.pool.process import own_process
from ..tiers.pool.server import PoolServer
from ..tiers.pool.sockets import PoolAddresses

POOL_NAME = "kvfabric-pool/{run}/{node}"
"""Actors are found by this name in the fabric's Ray namespace."""


class PoolShell:
    """Owns the host region, directory and tiers of one node.

    When it dies, Ray starts it again on the same node; it then adopts the region as it lies, so
    that committed chunks serve at once. Methods may run again after a restart and change nothing
    twice.

    An error of the constructor would reach callers as text, without its class and fields. So it is
    kept, and every method raises it; whoever started the actor then ends it.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        own_process()
        self._started: PoolServer | FabricError
        try:
            server = PoolServer(parse(PoolConfig, config), SystemClock())
            server.start()
            self._started = server
        except FabricError as error:
            self._started = error

    @property
    def _server(self) -> PoolServer:
        if isinstance(self._started, FabricError):
            raise self._started
        return self._started

    @ray.method
    def addresses(self) -> PoolAddresses:
        """Where clients, peers and event readers reach this pool."""
        return self._server.addresses

    @ray.method
    def stats(self) -> dict[str, float]:
        """Gauges and counts by name."""
        return self._server.stats()

    @ray.method
    def metrics(self) -> bytes:
        """All metrics in Prometheus' text form."""
        return self._server.metrics()

    @ray.method
    def check(self) -> None:
        """Raise `Conservation` if the pool's books do not balance."""
        self._server.check()

    @ray.method
    def pid(self) -> int:
        """The process, for tests that kill it."""
        return os.getpid()

    @ray.method
    def shutdown(self) -> None:
        """Drain, remove the files, and be ready to be killed."""
        if isinstance(self._started, PoolServer):
            self._started.stop(unlink=True)


PoolActor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=3)(PoolShell)
