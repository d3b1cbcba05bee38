"""The Ray actor that owns a node's pool. A shell: everything is in `tiers.pool.server`."""

import os
from collections.abc import Mapping
from typing import Any

import ray

from ..fabric.clock import SystemClock
from ..fabric.config import PoolConfig, parse
from ..tiers.pool.server import PoolServer
from ..tiers.pool.sockets import PoolAddresses

POOL_NAME = "kvfabric-pool-{run}-{node}"
"""Actors are found by this name in the fabric's Ray namespace."""


class PoolShell:
    """Owns the host region, directory and tiers of one node.

    When it dies, Ray starts it again on the same node; it then adopts the region as it lies, so
    that committed chunks serve at once. Methods may run again after a restart and change nothing
    twice.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._server = PoolServer(parse(PoolConfig, config), SystemClock())
        self._server.start()

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
        self._server.stop(unlink=True)


PoolActor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=3)(PoolShell)
