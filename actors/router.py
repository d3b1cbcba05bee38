"""The Ray actor that follows every pool's events and feeds the replicas that decide.

A shell: what it knows is in `router.replica.Authority`, how it learns it in `router.ingest`.
Nothing on a request's path calls it: replicas follow its stream and decide in their own process.
"""

import logging
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import ray
import zmq
from ray.exceptions import RayActorError, RayTaskError

from ..fabric.clock import SystemClock
from ..fabric.errors import FabricError
from ..fabric.metrics import PrometheusRecorder
from ..router.delta_socket import AuthoritySocket
from ..router.ingest import Ingest, SourceEndpoints
from ..router.replica import Authority
from ..tiers.pool.sockets import PoolAddresses, usual_port
from .pool import POOL_NAME

LOG = logging.getLogger("kvfabric.router")

ROUTER_NAME = "kvfabric-router/{run}"
"""The actor is found by this name in the fabric's Ray namespace."""
INGEST_POLL_MS = 20
"""How long a request of a replica may wait while events are awaited."""
FIND_POOLS_S = 5.0
"""What a restarted router waits for pools to say where they are: longer than one's restart."""


@dataclass(frozen=True, slots=True)
class RouterAddresses:
    """Where replicas follow the authority."""

    publish: str
    replay: str


class RouterShell:
    """One per fabric. Started again when it dies; the pools' snapshots then tell it everything.

    It asks Ray which pools there are: the arguments of its constructor are those of its first life.
    """

    def __init__(self, run: str, pools: Sequence[PoolAddresses], *, loopback: bool = True) -> None:
        self._clock = SystemClock()
        self._recorder = PrometheusRecorder()
        self._context: zmq.Context[Any] = zmq.Context()
        # Milliseconds since 1970: larger than in any earlier life, as the protocol asks.
        epoch = int(self._clock.unix_s() * 1000)
        self._authority = Authority(f"router-{run}", epoch, self._clock)
        host = "127.0.0.1" if loopback else ray.util.get_node_ip_address()
        self._socket = _bound(self._context, self._authority, run, host)
        self._ingest = Ingest(self._context, self._authority, self._clock)
        self._lock = threading.Lock()
        self._pools: dict[str, PoolAddresses] = {}
        for pool in find_pools(run, pools):
            self._add(pool)
        self._thread = threading.Thread(target=self._run, name="kvfabric-router", daemon=True)
        self._thread.start()

    @ray.method
    def addresses(self) -> RouterAddresses:
        """Where replicas read."""
        endpoints = self._socket.endpoints
        return RouterAddresses(endpoints.publish, endpoints.replay)

    @ray.method
    def sources(self, add: Sequence[PoolAddresses], remove: Sequence[str]) -> None:
        """Follow these pools, and no longer those of these nodes. Those followed already stay."""
        with self._lock:
            for node in remove:
                self._forget(node)
            for pool in add:
                if self._pools.get(pool.node) != pool:
                    self._forget(pool.node)
                    self._add(pool)

    @ray.method
    def holdings(self) -> dict[str, int]:
        """How many chunks each source is known to hold."""
        with self._lock:
            index = self._authority.index
            return {
                source: sum(len(section.array()) for section in index.dump(source))
                for source in index.sources
            }

    @ray.method
    def metrics(self) -> bytes:
        """All metrics in Prometheus' text form."""
        return self._recorder.exposition()

    @ray.method
    def pid(self) -> int:
        """The process, for tests that kill it."""
        return os.getpid()

    def _add(self, pool: PoolAddresses) -> None:
        self._pools[pool.node] = pool
        self._ingest.add_source(pool.node, SourceEndpoints(pool.events, pool.replay))
        self._authority.set_pool(pool.node, pool.peer)

    def _forget(self, node: str) -> None:
        self._pools.pop(node, None)
        self._ingest.remove_source(node)
        self._authority.set_pool(node, "")

    def _run(self) -> None:
        while True:
            try:
                with self._lock:
                    self._ingest.poll(INGEST_POLL_MS)
                    self._socket.poll(0)
            except FabricError:
                self._recorder.count("kvfabric_loop_errors_total", loop="router")
                LOG.exception("an error escaped; the router goes on")
            except Exception:  # the thread's outermost loop: a router that stops tells nobody
                self._recorder.count("kvfabric_loop_errors_total", loop="router")
                LOG.exception("an unexpected error escaped; the router goes on")


def find_pools(run: str, known: Iterable[PoolAddresses]) -> list[PoolAddresses]:
    """Return the pools of a run that Ray knows now, where they say they are.

    One that does not answer in time is taken to be where it was known to be: its ports are the same
    after a restart.
    """
    prefix = POOL_NAME.format(run=run, node="")
    # Ray's annotation is that of the call for one namespace: names only.
    named = cast("list[dict[str, str]]", ray.util.list_named_actors(all_namespaces=True))
    asked = {
        one["name"].removeprefix(prefix): ray.get_actor(one["name"], one["namespace"])
        for one in named
        if one["name"].startswith(prefix)
    }
    answers: dict[str, ray.ObjectRef[PoolAddresses]] = {
        node: actor.addresses.remote() for node, actor in asked.items()
    }
    found = {pool.node: pool for pool in known if pool.node in answers}
    if not answers:
        return []
    answered, _ = ray.wait(list(answers.values()), num_returns=len(answers), timeout=FIND_POOLS_S)
    for node, answer in answers.items():
        if answer in answered:
            try:
                found[node] = ray.get(answer)
            except (RayActorError, RayTaskError):
                LOG.exception("the pool of node %s did not start", node)
    return list(found.values())


def _bound(
    context: "zmq.Context[Any]", authority: Authority, run: str, host: str
) -> AuthoritySocket:
    """Bind where the router was before, so that replicas find it again; else anywhere."""
    usual = [f"tcp://{host}:{usual_port(run, what)}" for what in ("deltas", "replay")]
    try:
        return AuthoritySocket(context, authority, *usual)
    except FabricError:
        return AuthoritySocket(context, authority, f"tcp://{host}:*", f"tcp://{host}:*")


RouterActor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=3)(RouterShell)
