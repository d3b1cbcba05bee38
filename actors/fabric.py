"""The fabric on a Ray cluster: one pool per node, a router actor, and their addresses.

Ownership. Pools and the router are named, detached actors: they outlive the job that started them
and are ended by `Fabric.shutdown`. Which node gets a pool is decided by `plan_pools` (pure);
`reconcile` carries it out and may be called at any time, by anyone.
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorProxy
from ray.exceptions import GetTimeoutError, RayActorError

from ..fabric.config import PoolConfig
from ..fabric.errors import Unavailable
from ..tiers.pool.sockets import PoolAddresses
from .cluster import NODE_LABEL
from .pool import POOL_NAME, PoolActor, PoolShell
from .router import ROUTER_NAME, RouterActor, RouterAddresses, RouterShell

NAMESPACE = "kvfabric"
START_S = 60.0
"""A pool reserves its region's pages at start: about a second for each 2 GB."""
SHUTDOWN_S = 15.0
"""A pool drains its tiers; past this it is killed and its files are swept."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """Which nodes get a pool and which pools go."""

    add: tuple[str, ...]
    remove: tuple[str, ...]


def plan_pools(nodes: Iterable[str], pools: Iterable[str]) -> PoolPlan:
    """Compare the nodes that are alive with those that have a pool."""
    alive, have = set(nodes), set(pools)
    return PoolPlan(tuple(sorted(alive - have)), tuple(sorted(have - alive)))


def labelled_nodes() -> list[str]:
    """Return the fabric's nodes that Ray says are alive."""
    labels = (node["Labels"].get(NODE_LABEL) for node in ray.nodes() if node["Alive"])
    return sorted(label for label in labels if label)


class Fabric:
    """A running fabric. Make it with `start`; end it with `shutdown`."""

    def __init__(self, config: Mapping[str, PoolConfig]) -> None:
        self._config = dict(config)
        self._run = next(iter(self._config.values())).run
        self._pools: dict[str, ActorProxy[PoolShell]] = {}
        self._router: ActorProxy[RouterShell] | None = None

    @classmethod
    def start(cls, configs: Sequence[PoolConfig]) -> "Fabric":
        """Start a pool per node and the router. Raises `Unavailable`, leaving nothing."""
        fabric = cls({config.node: config for config in configs})
        try:
            fabric.reconcile()
            fabric.router()
        except BaseException:
            fabric.shutdown()
            raise
        return fabric

    def reconcile(self) -> PoolPlan:
        """Add pools for nodes that lack one and forget those of dead nodes; say what was done."""
        plan = plan_pools(set(labelled_nodes()) & set(self._config), self._pools)
        for node in plan.remove:
            _end(self._pools.pop(node))
        for node in plan.add:
            self._pools[node] = PoolActor.options(
                name=POOL_NAME.format(run=self._run, node=node),
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                label_selector={NODE_LABEL: node},
            ).remote(self._config[node].model_dump())
        addresses = [self.addresses(node) for node in plan.add]
        if self._router is not None and (addresses or plan.remove):
            ray.get(self._router.sources.remote(addresses, list(plan.remove)), timeout=START_S)
        return plan

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that have a pool."""
        return tuple(sorted(self._pools))

    def pool(self, node: str) -> ActorProxy[PoolShell]:
        """The pool actor of a node."""
        return self._pools[node]

    def addresses(self, node: str) -> PoolAddresses:
        """Where the pool of a node is reached. Raises `Unavailable`."""
        try:
            return ray.get(self._pools[node].addresses.remote(), timeout=START_S)
        except GetTimeoutError as error:
            raise Unavailable(
                f"the pool of node {node}", START_S, "See its actor's log."
            ) from error

    def router(self) -> RouterAddresses:
        """Start the router if it does not run yet, and say where replicas read from it."""
        if self._router is None:
            self._router = RouterActor.options(
                name=ROUTER_NAME.format(run=self._run),
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
            ).remote(self._run, [self.addresses(node) for node in self.nodes])
        return ray.get(self._router.addresses.remote(), timeout=START_S)

    def router_actor(self) -> ActorProxy[RouterShell]:
        """The router actor. Start it first with `router`."""
        assert self._router is not None
        return self._router

    def stats(self) -> dict[str, dict[str, float]]:
        """Gauges and counts of every pool that answers, by node."""
        stats: dict[str, dict[str, float]] = {}
        for node, pool in self._pools.items():
            with contextlib.suppress(RayActorError, GetTimeoutError):
                stats[node] = ray.get(pool.stats.remote(), timeout=2.0)
        return stats

    def shutdown(self) -> None:
        """End the router and the pools and remove their files. Safe to call twice."""
        for pool in self._pools.values():
            with contextlib.suppress(RayActorError, GetTimeoutError):
                ray.get(pool.shutdown.remote(), timeout=SHUTDOWN_S)
            _end(pool)
        self._pools.clear()
        if self._router is not None:
            _end(self._router)
            self._router = None


def _end(actor: Any) -> None:
    """End an actor for good; it may be dead already."""
    with contextlib.suppress(ValueError):
        ray.kill(actor, no_restart=True)
