"""Pools, router and workers on a real cluster of two raylets: started, killed, restarted, ended."""

import contextlib
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray import cloudpickle
from ray.actor import ActorMethod
from ray.exceptions import RayActorError
from ray.remote_function import RemoteFunction

from kvfabric.actors.cluster import CPUS_PER_NODE, OBJECT_STORE_BYTES, local_cluster
from kvfabric.actors.demo.planner import Planner
from kvfabric.actors.engines.reference import EngineSettings
from kvfabric.actors.fabric import Fabric
from kvfabric.actors.keeper import keep
from kvfabric.actors.nodes import NODE_LABEL
from kvfabric.actors.pool import PoolActor
from kvfabric.actors.worker import WorkerActor, WorkerShell
from kvfabric.fabric.clock import SystemClock
from kvfabric.fabric.config import PoolConfig, parse
from kvfabric.fabric.errors import ConfigError, FabricError, NamespaceMismatch, Refused
from kvfabric.fabric.namespace import Namespace
from kvfabric.fabric.types import Lookup, SourceRange, make_key
from kvfabric.fabric.wire import GroupGeometry
from kvfabric.kernels.reference.config import ModelConfig
from kvfabric.router.plan import Candidate
from kvfabric.tiers.pool.client import PoolClient

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(120)]

A, B = "node-a", "node-b"
CLOCK = SystemClock()
SLOT_BYTES = 64 * 1024
MODEL = ModelConfig(
    layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32, mlp_hidden=128, max_len=1024
)
SETTINGS = EngineSettings(MODEL, chunk_tokens=16, block_tokens=16, num_blocks=128)
BYTES = Namespace(
    model="bytes",
    weights_version="1",
    kv_dtype="uint8",
    kv_scales="none",
    rope="none",
    max_model_len="4096",
    layout="bytes",
    chunk_tokens="16",
    tokens_per_hash="16",
    hash_algorithm="sha256_cbor",
    hash_seed="",
)


def config(run, node, region_bytes=512 * SLOT_BYTES, **more):
    host = {"slot_bytes": SLOT_BYTES, "region_bytes": region_bytes}
    return parse(PoolConfig, {"node": node, "run": run, "host": host, **more})


def files_of(run):
    return sorted(path.name for path in Path("/dev/shm").glob(f"kvfabric-{run}-*"))


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def keys(first, number):
    return [make_key(n.to_bytes(32, "big"), 0) for n in range(first, first + number)]


def content(number):
    return memoryview((number + 1).to_bytes(8, "little") * (SLOT_BYTES // 8))


def attach(fabric, node, **fields):
    namespace = Namespace(**{**BYTES.fields(), **fields})
    endpoint = fabric.addresses(node).client
    return PoolClient.attach(endpoint, namespace, [GroupGeometry(0, 16, SLOT_BYTES)])


def load(client, first, number, wait_s=0.0, sources=()):
    into = [bytearray(SLOT_BYTES) for _ in range(number)]
    views = [memoryview(each) for each in into]
    statuses = client.load_bytes(keys(first, number), views, wait_s, sources).statuses
    return statuses, [into[n] == content(first + n) for n in range(number)]


@pytest.fixture(scope="module")
def cluster(private_network):
    with local_cluster((A, B)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def fabric(cluster, until) -> Iterator[Fabric]:
    run = f"rayt-{os.getpid()}"
    fabric = Fabric.start([config(run, A), config(run, B)])
    yield fabric
    for node in fabric.nodes:
        ray.get(fabric.pool(node).check.remote(), timeout=10)
    pids = [ray.get(fabric.pool(node).pid.remote(), timeout=10) for node in fabric.nodes]
    pids.append(ray.get(fabric.router_actor().pid.remote(), timeout=10))
    fabric.shutdown()
    fabric.shutdown()
    until(lambda: all(map(gone, pids)), 10, "pools and router have ended")
    assert files_of(run) == []
    assert not [one for one in ray.util.list_named_actors(all_namespaces=True) if run in str(one)]


def test_one_pool_per_node_by_label_and_a_second_start_joins(cluster, fabric):
    pids = {node: ray.get(fabric.pool(node).pid.remote(), timeout=30) for node in (A, B)}
    raylets = {
        node: raylet.all_processes["raylet"][0].process.pid
        for node, raylet in cluster.raylets.items()
    }
    assert {node: parent(pid) for node, pid in pids.items()} == raylets
    assert [fabric.addresses(node).node for node in (A, B)] == [A, B]
    assert not fabric.joined
    joining = Fabric.start([config(fabric.run, A), config(fabric.run, B)])
    assert joining.joined
    assert {node: ray.get(joining.pool(node).pid.remote(), timeout=30) for node in (A, B)} == pids
    assert joining.router() == fabric.router()
    assert not fabric.reconcile().add


def test_a_bad_config_is_raised_as_what_it_is_and_leaves_nothing(cluster, until):
    run = f"rayt-bad-{os.getpid()}"
    begun_s = CLOCK.now_s()
    with pytest.raises(Refused) as caught:
        Fabric.start([config(run, A), config(run, B, region_bytes=1 << 46)])
    assert caught.value.field == "host.region_bytes"
    assert "the machine has" in caught.value.problem
    assert caught.value.remedy
    assert CLOCK.now_s() - begun_s < 20
    until(
        lambda: (
            not [one for one in ray.util.list_named_actors(all_namespaces=True) if run in str(one)]
        ),
        10,
        "no actors are left",
    )
    until(lambda: not files_of(run), 5, "no files are left")


def test_what_a_pools_constructor_refuses_crosses_ray_and_nothing_restarts(cluster):
    values = config("rayt-worse", A).model_dump() | {"hoist": 1}
    pool = PoolActor.options(label_selector={NODE_LABEL: A}).remote(values)
    with pytest.raises(ConfigError) as caught:
        ray.get(pool.addresses.remote(), timeout=30)
    assert caught.value.field == "hoist"
    with pytest.raises(ConfigError):
        ray.get(pool.stats.remote(), timeout=10)
    ray.kill(pool)


def test_a_namespace_mismatch_crosses_ray_with_its_fields(fabric):
    endpoint = fabric.addresses(A).client
    here = WorkerActor.options(label_selector={NODE_LABEL: A})
    other = EngineSettings(MODEL, chunk_tokens=32, block_tokens=16, num_blocks=128)
    right, wrong = here.remote(SETTINGS, endpoint), here.remote(other, endpoint)
    assert not ray.get(right.generate.remote([1] * 40, 1, ()), timeout=60).faults
    with pytest.raises(NamespaceMismatch) as caught:
        ray.get(wrong.generate.remote([1] * 40, 1, ()), timeout=60)
    assert (caught.value.ours, caught.value.theirs) != ("", "")
    assert caught.value.field in ("chunk_tokens", "layout")
    for worker in (right, wrong):
        ray.kill(worker)


def test_a_killed_pool_comes_back_with_every_committed_chunk(cluster, fabric, until):
    before, pid = fabric.addresses(A), ray.get(fabric.pool(A).pid.remote(), timeout=30)
    stored: list[int] = []
    faults: Counter[str] = Counter()
    stop = threading.Event()

    def store() -> None:
        with attach(fabric, A) as client:
            number = 0
            while not stop.is_set() and number < 400:
                try:
                    done = client.store_bytes(keys(number, 1), [0], [content(number)])
                except FabricError as error:
                    faults[type(error).__name__] += 1
                    continue
                if done.committed:
                    stored.append(number)
                number += 1

    thread = threading.Thread(target=store)
    thread.start()
    try:
        until(lambda: len(stored) > 40, 20, "40 chunks are stored")
        os.kill(pid, signal.SIGKILL)
        at_kill = len(stored)
        until(lambda: len(stored) > at_kill + 40, 30, "the client goes on")
    finally:
        stop.set()
        thread.join()
    after, new_pid = fabric.addresses(A), ray.get(fabric.pool(A).pid.remote(), timeout=30)
    assert new_pid != pid
    assert parent(new_pid) == cluster.raylets[A].all_processes["raylet"][0].process.pid
    assert after.epoch > before.epoch
    assert (after.client, after.peer, after.events, after.replay) == (
        (before.client, before.peer, before.events, before.replay)
    )
    with attach(fabric, A) as client:
        for number in stored:
            assert load(client, number, 1) == ((Lookup.HIT,), [True])
    ray.get(fabric.pool(A).check.remote(), timeout=10)


def test_replicas_decide_while_the_router_is_away_and_agree_after(fabric, until):
    prompt = [n % 250 for n in range(24 * 16)]
    workers = [Candidate("worker", A)]
    with Planner(fabric, SETTINGS, CLOCK) as planner, attach(fabric, B) as client:
        prompt_keys = planner.keys(prompt)

        def sources():
            plan = planner.plan(prompt_keys, len(prompt), workers)
            planner.cancel(plan)
            return plan.sources

        def store(count):
            wanted = prompt_keys[:count]
            client.store_bytes(wanted, range(count), [content(n) for n in range(count)])

        store(16)
        expected = (SourceRange(B, fabric.addresses(B).peer, 0, 16),)
        until(lambda: sources() == expected, 10, "the replica knows what node B has")
        holdings = {node: int(values["ready"]) for node, values in fabric.stats().items()}
        until(
            lambda: ray.get(fabric.router_actor().holdings.remote(), timeout=30) == holdings,
            10,
            "the router knows what the pools have",
        )
        pid = ray.get(fabric.router_actor().pid.remote(), timeout=30)
        os.kill(pid, signal.SIGKILL)
        until(lambda: gone(pid), 5, "the router is gone")
        assert sources() == expected
        until(
            lambda: new_holdings(fabric, pid) == holdings, 30, "the new router knows what it knew"
        )
        assert sources() == expected
        store(20)
        longer = (SourceRange(B, fabric.addresses(B).peer, 0, 20),)
        until(lambda: sources() == longer, 10, "the replica follows the new router")
        assert planner.replica.synced


def new_holdings(fabric, old_pid):
    with contextlib.suppress(RayActorError):
        if ray.get(fabric.router_actor().pid.remote(), timeout=30) != old_pid:
            return ray.get(fabric.router_actor().holdings.remote(), timeout=30)
    return None


@contextlib.contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count the calls of Ray's API in this process."""
    calls: Counter[str] = Counter()
    places = [(ray, n) for n in ("get", "put", "wait", "get_actor", "kill", "nodes")]
    places += [(RemoteFunction, "_remote"), (ActorMethod, "_remote")]
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in places:
            original = getattr(owner, name)

            def counted(*args, _original=original, _name=f"{owner.__name__}.{name}", **named):
                calls[_name] += 1
                return _original(*args, **named)

            patch.setattr(owner, name, counted)
        yield calls


class CountingShell(WorkerShell):
    """A worker that counts the calls of Ray that its own requests make."""

    @ray.method
    def counted(self, tokens, sources):
        with counting() as calls:
            done = self._worker.generate(tokens, 2, sources)
        return done, dict(calls)

    @ray.method
    def planted(self):
        with counting() as calls:
            ray.get(ray.put(1))
            ray.wait([ray.remote(lambda: 1).remote()])
        return dict(calls)


def test_no_ray_call_on_a_requests_path(cluster, tmp_path, until):
    run = f"rayt-calls-{os.getpid()}"
    tier = {"type": "fs", "root_dir": str(tmp_path), "quota_bytes": 64 << 20}
    # Node A holds 8 chunks, so that a longer prompt drives the first one to files.
    small = config(run, A, region_bytes=8 * SLOT_BYTES, tiers=[tier])
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    fabric = Fabric.start([small, config(run, B)])
    try:
        counter = ray.remote(num_cpus=1)(CountingShell)
        workers = {
            node: counter.options(label_selector=fabric.place(node)).remote(
                SETTINGS, fabric.addresses(node).client
            )
            for node in (A, B)
        }
        assert ray.get(workers[A].planted.remote(), timeout=60) == {
            "ray.get": 1,
            "ray.put": 1,
            "ray.wait": 1,
            "RemoteFunction._remote": 1,
        }

        def generate(node, tokens, sources=()):
            done, calls = ray.get(workers[node].counted.remote(tokens, sources), timeout=60)
            assert calls == {}
            assert done.faults == {}
            return done.reused

        first, second = [1] * 100, [2] * 120
        pull = (SourceRange(B, fabric.addresses(B).peer, 0, 6),)
        assert generate(A, first) == {}
        assert generate(A, first) == {"host": 96}

        def from_files():
            generate(A, second)
            return generate(A, first).get("fs", 0)

        until(from_files, 20, "chunks come from files")
        third = [3] * 100
        assert generate(B, third) == {}
        assert generate(A, third, pull) == {"peer": 96}
        with Planner(fabric, SETTINGS, CLOCK) as planner, counting() as calls:
            wanted = planner.keys(third)
            plan = planner.plan(wanted, len(third), [Candidate("a", A), Candidate("b", B)])
            planner.handoff(plan.node, len(wanted))
            planner.settle(plan)
            assert calls == {}
            ray.get(ray.put(1))
            assert calls == {"ray.get": 1, "ray.put": 1}
        for worker in workers.values():
            ray.kill(worker)
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
        fabric.shutdown()


def test_a_dead_node_is_a_miss_then_dropped_and_welcome_again(cluster, fabric, until):
    """The last test: node B's raylet is killed, and a new one takes its place."""
    with attach(fabric, A) as here:
        with attach(fabric, B) as there:
            there.store_bytes(keys(900, 4), range(4), [content(n) for n in range(900, 904)])
        sources = (SourceRange(B, fabric.addresses(B).peer, 0, 2),)
        assert load(here, 900, 2, 2.0, sources) == ((Lookup.HIT,) * 2, [True] * 2)
        pid = ray.get(fabric.pool(B).pid.remote(), timeout=30)
        cluster.kill_node(B)
        # It begins while Ray still says that B is alive, and must not wait for B's pool for ever.
        # Found by its name from now on, as by an engine that knows nothing but the run.
        keeper = keep([config(fabric.run, A)], template=config(fabric.run, "template"))
        begun_s = CLOCK.now_s()
        statuses, _ = load(here, 902, 2, 2.0, sources)
        waited_s = CLOCK.now_s() - begun_s
        if set(statuses) == {Lookup.HIT}:
            # The pool outlives its raylet by a moment; what it gave meanwhile is right.
            until(lambda: gone(pid), 10, "the pool ends with its raylet")
            begun_s = CLOCK.now_s()
            statuses, _ = load(here, 904, 2, 2.0, sources)
            waited_s = CLOCK.now_s() - begun_s
        assert Lookup.HIT not in statuses
        assert waited_s < 2.0
    # With a deadline of its own: pytest's does not reach into `ray.get`.
    until(lambda: ray.get(keeper.nodes.remote(), timeout=20) == (A,), 20, "the keeper knows it")
    fabric.reconcile()
    assert fabric.nodes == (A,)
    assert set(ray.get(fabric.router_actor().holdings.remote(), timeout=30)) == {A}
    cluster.raylets[B] = cluster.cluster.add_node(
        num_cpus=CPUS_PER_NODE,
        include_dashboard=False,
        labels={NODE_LABEL: B},
        object_store_memory=OBJECT_STORE_BYTES,
    )
    until(lambda: ray.get(keeper.nodes.remote(), timeout=20) == (A, B), 20, "the new node's pool")
    until(lambda: fabric.reconcile().add, 20, "and everybody finds it")
    assert fabric.nodes == (A, B)
    with attach(fabric, B) as there:
        assert load(there, 900, 4) == ((Lookup.HIT,) * 4, [True] * 4)
    until(
        lambda: ray.get(fabric.router_actor().holdings.remote(), timeout=30).get(B, 0) >= 4,
        10,
        "the router follows it",
    )
