"""The keeper's loop, without a cluster: what fails is counted and tried again."""

import threading

from kvfabric.actors import keeper
from kvfabric.actors.fabric import Fabric
from kvfabric.actors.nodes import PoolPlan
from kvfabric.fabric.config import PoolConfig, parse
from kvfabric.fabric.errors import Unavailable

HOST = {"slot_bytes": 4096, "region_bytes": 4096}
CONFIG = parse(PoolConfig, {"node": "a", "run": "keeper", "host": HOST})


def test_a_node_that_is_dead_at_the_start_does_not_stop_the_keeper(monkeypatch) -> None:
    """The constructor returns at once; what fails, in whatever way, is tried again."""
    tried = iter([Unavailable("the pool of node b", 1.0, "Its node died."), OSError("Ray's own")])
    may_try, done = threading.Event(), threading.Event()
    routed = []

    def reconcile(_fabric) -> PoolPlan:
        assert may_try.wait(10)
        for error in tried:
            raise error
        if routed:
            done.set()
            threading.Event().wait()  # the loop has no end of its own
        return PoolPlan((), ())

    monkeypatch.setattr(keeper, "PERIOD_S", 0.001)
    monkeypatch.setattr(Fabric, "reconcile", reconcile)
    monkeypatch.setattr(Fabric, "router", lambda _fabric: routed.append(1))
    monkeypatch.setattr(Fabric, "nodes", property(lambda _fabric: ("a",)))
    kept = keeper.KeeperShell([CONFIG], None)
    assert kept.nodes() == ()
    may_try.set()
    assert done.wait(10)
    assert kept.nodes() == ("a",)
    assert b'kvfabric_loop_errors_total{loop="keeper"} 2.0' in kept.metrics()
