"""The fabric on a Ray cluster: one pool per node, a router actor, and their addresses.

Ownership. Pools and the router are named, detached actors: they outlive the job that started them
and are ended by `Fabric.shutdown`. A second job that starts a fabric of the same run joins it.
Which node gets a pool is decided by `nodes.plan_pools` (pure); `reconcile` carries it out and may
be called at any time, by anyone.

Failure. What a pool's constructor refuses reaches the caller of `start` as the error it is, and
nothing that this call started is left.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray import ObjectRef
from ray.actor import ActorProxy
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from ..fabric.clock import SystemClock
from ..fabric.config import PoolConfig
from ..fabric.errors import FabricError, Unavailable
from ..tiers.pool.sockets import PoolAddresses
from ..tiers.pool.sweep import sweep
from .nodes import FabricNode, PoolPlan, fabric_nodes, listen_addresses, plan_pools
from .pool import POOL_NAME, PoolActor, PoolShell
from .router import ROUTER_NAME, RouterActor, RouterAddresses, RouterShell

NAMESPACE = "kvfabric"
KEEPER_NAME = "kvfabric-keeper-{run}"
"""The actor of `keeper`, if somebody started it."""
START_S = 60.0
"""A pool reserves its region's pages at start: about a second for each 2 GB."""
NODE_LOOK_S = 1.0
"""While a pool is waited for: Ray says that a node is alive for seconds after it died."""
SHUTDOWN_S = 15.0
"""A pool drains its tiers; past this it is killed and its files are swept."""
SWEEP_S = 5.0
"""A killed process lets go of its files within a second; the rest is for a busy machine."""
SWEEP_PERIOD_S = 0.1

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunningPool:
    """A node's pool actor."""

    node: FabricNode
    actor: ActorProxy[PoolShell]
    joined: bool
    """Whether it ran before this fabric was started."""


class Fabric:
    """A running fabric. Make it with `start`; end it with `shutdown`."""

    def __init__(self, configs: Sequence[PoolConfig], template: PoolConfig | None = None) -> None:
        self._config = {config.node: config for config in configs}
        self._template = template
        self.run = configs[0].run
        self._pools: dict[str, RunningPool] = {}
        self._router: ActorProxy[RouterShell] | None = None
        self._joined_router = False

    @classmethod
    def start(cls, configs: Sequence[PoolConfig], template: PoolConfig | None = None) -> "Fabric":
        """Start a pool per node and the router, or join those that run already.

        With a `template`, nodes that no configuration names get a pool made after it.
        Raises `Unavailable`, or what a pool's constructor raises, and leaves nothing of its own.
        """
        fabric = cls(configs, template)
        try:
            fabric.reconcile()
            fabric.router()
        except BaseException:
            fabric._shutdown(started_only=True)
            raise
        return fabric

    def reconcile(self) -> PoolPlan:
        """Add pools for nodes that lack one and forget those of dead nodes; say what was done.

        Raises what `start` raises, and then leaves the nodes that were to be added without a pool.
        """
        alive = fabric_nodes(ray.nodes())
        self._configure(alive)
        alive = [node for node in alive if node.name in self._config]
        plan = plan_pools(alive, [pool.node for pool in self._pools.values()])
        for node in plan.remove:
            end_actor(self._pools.pop(node.name).actor)
        for node in plan.add:
            self._pools[node.name] = self._start_pool(node)
        try:
            addresses = [self.addresses(node.name) for node in plan.add]
        except FabricError:
            added = [self._pools.pop(node.name) for node in plan.add]
            self._stop([pool for pool in added if not pool.joined])
            raise
        if self._router is not None and (addresses or plan.remove):
            gone = [node.name for node in plan.remove]
            _answer(self._router.sources.remote(addresses, gone), "the router")
        return plan

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that have a pool."""
        return tuple(sorted(self._pools))

    @property
    def joined(self) -> bool:
        """Whether somebody else started it: then it is not this job's to shut down."""
        return self._joined_router or any(pool.joined for pool in self._pools.values())

    def place(self, node: str) -> dict[str, str]:
        """Return the `label_selector` that puts an actor beside a node's pool."""
        return self._pools[node].node.selector

    def pool(self, node: str) -> ActorProxy[PoolShell]:
        """The pool actor of a node."""
        return self._pools[node].actor

    def addresses(self, node: str) -> PoolAddresses:
        """Where the pool of a node is reached. Raises `Unavailable`, or why it did not start."""
        pool, who = self._pools[node], f"the pool of node {node}"
        answer = pool.actor.addresses.remote()
        for looked in range(1, int(START_S / NODE_LOOK_S)):
            if ray.wait([answer], timeout=NODE_LOOK_S)[0]:
                break
            if pool.node not in fabric_nodes(ray.nodes()):
                raise Unavailable(who, looked * NODE_LOOK_S, "Its node died.")
        return _answer(answer, who, NODE_LOOK_S)

    def router(self) -> RouterAddresses:
        """Start the router if it does not run yet, and say where replicas read from it."""
        if self._router is None:
            name = ROUTER_NAME.format(run=self.run)
            self._joined_router = _exists(name)
            nodes = [pool.node for pool in self._pools.values()]
            loopback = set(listen_addresses(nodes).values()) == {"127.0.0.1"}
            self._router = RouterActor.options(
                name=name, namespace=NAMESPACE, lifetime="detached", get_if_exists=True
            ).remote(self.run, [self.addresses(node) for node in self.nodes], loopback=loopback)
        return _answer(self._router.addresses.remote(), "the router")

    def router_actor(self) -> ActorProxy[RouterShell]:
        """The router actor. Start it first with `router`."""
        assert self._router is not None
        return self._router

    def stats(self) -> dict[str, dict[str, float]]:
        """Gauges and counts of every pool that answers, by node."""
        stats: dict[str, dict[str, float]] = {}
        for node, pool in list(self._pools.items()):
            with contextlib.suppress(RayActorError, RayTaskError, GetTimeoutError):
                stats[node] = ray.get(pool.actor.stats.remote(), timeout=2.0)
        return stats

    def shutdown(self) -> None:
        """End keeper, router and pools and remove their files. Safe to call twice."""
        with contextlib.suppress(ValueError):
            end_actor(ray.get_actor(KEEPER_NAME.format(run=self.run), namespace=NAMESPACE))
        self._shutdown(started_only=False)

    def _configure(self, nodes: Sequence[FabricNode]) -> None:
        """Give nodes that no configuration names one after the template."""
        if self._template is None:
            return
        for name, address in listen_addresses(nodes).items():
            if name not in self._config:
                listen = f"tcp://{address}:*"
                template = self._template
                self._config[name] = template.model_copy(
                    update={
                        "node": name,
                        "peers": template.peers.model_copy(update={"listen": listen}),
                        "events": template.events.model_copy(
                            update={"publish": listen, "replay": listen}
                        ),
                    }
                )

    def _start_pool(self, node: FabricNode) -> RunningPool:
        name = POOL_NAME.format(run=self.run, node=node.name)
        joined = _exists(name)
        actor = PoolActor.options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            label_selector=node.selector,
        ).remote(self._config[node.name].model_dump())
        return RunningPool(node, actor, joined)

    def _shutdown(self, *, started_only: bool) -> None:
        if self._router is not None and not (started_only and self._joined_router):
            end_actor(self._router)
        self._router = None
        pools = [p for p in self._pools.values() if not (started_only and p.joined)]
        self._pools.clear()
        self._stop(pools)

    def _stop(self, pools: Sequence[RunningPool]) -> None:
        """End pools, and remove the files of those whose node is alive."""
        alive = set(fabric_nodes(ray.nodes())) if pools else set[FabricNode]()
        asked = [(pool, pool.actor.shutdown.remote()) for pool in pools if pool.node in alive]
        for pool, answer in asked:
            try:
                ray.get(answer, timeout=SHUTDOWN_S)
            except (RayActorError, RayTaskError, GetTimeoutError):
                end_actor(pool.actor)
                self._sweep(pool.node)
        for pool in pools:
            end_actor(pool.actor)

    def _sweep(self, node: FabricNode) -> None:
        """Remove what a pool left that had to be killed; without its node nobody can."""
        directory = self._config[node.name].host.directory
        with contextlib.suppress(RayTaskError, GetTimeoutError):
            sweeper = SweepTask.options(label_selector=node.selector)
            ray.get(sweeper.remote(directory, self.run), timeout=2 * SWEEP_S)


def sweep_until_gone(directory: str, run: str) -> None:
    """Remove what a run's pools left on this machine as soon as the killed one lets go of it."""
    clock = SystemClock()
    deadline_s = clock.now_s() + SWEEP_S
    while not sweep(directory, run) and clock.now_s() < deadline_s:
        clock.sleep_s(SWEEP_PERIOD_S)


SweepTask = ray.remote(num_cpus=0, max_retries=0)(sweep_until_gone)


def _answer(reference: "ObjectRef[T]", who: str, wait_s: float = START_S) -> T:
    """Wait for an answer. Raises the fabric's own error, or `Unavailable`."""
    try:
        return ray.get(reference, timeout=wait_s)
    except GetTimeoutError as error:
        raise Unavailable(who, START_S, "See its actor's log.") from error
    except RayActorError as error:
        raise Unavailable(who, START_S, f"Its actor died: {error}") from error
    except RayTaskError as error:
        if isinstance(error.cause, FabricError):
            raise error.cause from error
        raise


def _exists(name: str) -> bool:
    try:
        ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return False
    return True


def end_actor(actor: Any) -> None:
    """End an actor for good; it may be dead already."""
    with contextlib.suppress(ValueError):
        ray.kill(actor, no_restart=True)
