"""The reconciler: nodes that join get a pool and dead ones lose theirs, without anybody asking.

A named, detached actor that joins the fabric and calls `Fabric.reconcile` again and again.

Failure. What a reconciliation raises (a node too small for its region, say) is counted and logged,
and tried again. That holds for the first as well, so the constructor waits for nobody: Ray does not
end an actor whose constructor failed while it still waits for a pool that cannot come, and whoever
asks that actor waits for ever.
"""

import logging
import threading
from collections.abc import Sequence

import ray
from ray.actor import ActorProxy

from ..fabric.config import PoolConfig
from ..fabric.metrics import PrometheusRecorder
from .fabric import KEEPER_NAME, NAMESPACE, Fabric

LOG = logging.getLogger("kvfabric.keeper")

PERIOD_S = 1.0
"""Ray itself notices a dead node after about 2 s with `cluster.HEALTH_CHECKS`, 16 s without."""


class KeeperShell:
    """One per fabric. Ray starts it again when it dies, and it joins what runs."""

    def __init__(self, configs: Sequence[PoolConfig], template: PoolConfig | None) -> None:
        self._recorder = PrometheusRecorder()
        self._fabric = Fabric(configs, template)
        self._routed = False
        self._nodes: tuple[str, ...] = ()
        threading.Thread(target=self._run, name="kvfabric-keeper", daemon=True).start()

    @ray.method
    def nodes(self) -> tuple[str, ...]:
        """The nodes that have a pool, as of the last reconciliation that succeeded."""
        return self._nodes

    @ray.method
    def metrics(self) -> bytes:
        """All metrics in Prometheus' text form."""
        return self._recorder.exposition()

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            try:
                self._reconcile()
            except Exception:  # the thread's outermost loop: a keeper that stops tells nobody
                self._recorder.count("kvfabric_loop_errors_total", loop="keeper")
                LOG.exception("a reconciliation failed; the keeper tries again")
            pause.wait(PERIOD_S)

    def _reconcile(self) -> None:
        plan = self._fabric.reconcile()
        if not self._routed:
            self._fabric.router()
            self._routed = True
        self._nodes = self._fabric.nodes
        if plan.add or plan.remove:
            LOG.info("pools added: %s, removed: %s", plan.add, plan.remove)


KeeperActor = ray.remote(num_cpus=0, max_restarts=-1)(KeeperShell)


def keep(
    configs: Sequence[PoolConfig], template: PoolConfig | None = None
) -> ActorProxy[KeeperShell]:
    """Start the keeper of a fabric, or find it. `Fabric.shutdown` ends it.

    With a `template`, nodes that no configuration names get a pool made after it.
    """
    return KeeperActor.options(
        name=KEEPER_NAME.format(run=configs[0].run),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
    ).remote(configs, template)
