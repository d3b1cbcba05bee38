"""The socket shells over loopback TCP: live, late join, loss, restart, removal, replica."""

import pytest
import zmq

from kvfabric.fabric.errors import Closed, ConfigError
from kvfabric.fabric.events import parse_replay_request
from kvfabric.fabric.types import Medium, make_key
from kvfabric.router.delta_socket import AuthoritySocket, ReplicaSocket
from kvfabric.router.ingest import Ingest, SourceEndpoints
from kvfabric.router.replica import Authority, Replica
from kvfabric.router.stream import StreamTimes
from kvfabric.tiers.event_log import Change, EventLog, Resident

TURNS_MAX = 400
"""Of 10 ms: what a loaded machine may take to carry a message over loopback."""


class FakeClock:
    """Time that moves when the test says so."""

    def __init__(self):
        self.time_s = 100.0

    def now_s(self):
        return self.time_s

    def unix_s(self):
        return self.time_s

    def sleep_s(self, seconds):
        self.time_s += seconds


class KeepingContext(zmq.Context):
    """Keeps its sockets until it is destroyed, so that a failed test closes them too."""

    kept = ()

    def socket(self, *args, **options):
        made = super().socket(*args, **options)
        self.kept = (*self.kept, made)
        return made


@pytest.fixture
def context():
    made = KeepingContext()
    yield made
    made.destroy(linger=0)


class PoolSockets:
    """The publisher's side, as a pool has it."""

    def __init__(self, context, clock, node, epoch=1, held=()):
        self.clock = clock
        self.log = EventLog(node, epoch, 100, 1.0, clock)
        self.held = list(held)
        self.publisher = context.socket(zmq.PUB)
        self.router = context.socket(zmq.ROUTER)
        self.publisher.bind("tcp://127.0.0.1:*")
        self.router.bind("tcp://127.0.0.1:*")
        self.endpoints = SourceEndpoints(
            self.publisher.getsockopt_string(zmq.LAST_ENDPOINT),
            self.router.getsockopt_string(zmq.LAST_ENDPOINT),
        )

    def store(self, *numbers, lost=False):
        self.clock.time_s += 0.001
        keys = [make_key(bytes(24) + n.to_bytes(8, "big"), 0) for n in numbers]
        self.held += keys
        for frames in self.log.append([Change(k, Medium.CPU, removed=False, chunk_tokens=16)
                                       for k in keys]):  # fmt: skip
            if not lost:
                self.publisher.send_multipart(frames)

    def restart(self, epoch):
        self.log = EventLog(self.log.node, epoch, 100, 1.0, self.clock)

    def serve(self):
        while self.router.poll(0):
            identity, *request = self.router.recv_multipart()
            manifest = [Resident(key, Medium.CPU, 16) for key in self.held]
            for reply in self.log.replay(parse_replay_request(request), manifest):
                self.router.send_multipart([identity, *reply])


def until(condition, *steps):
    for _ in range(TURNS_MAX):
        if condition():
            return
        for step in steps:
            step()
    raise AssertionError("it did not happen")


def prefix(index, source, chunks=100):
    found = {one.source: one.prefix for one in index.longest_prefix(range(chunks))}
    return found.get(source, 0)


def test_ingest_follows_pools_through_loss_restart_and_removal(context):
    clock = FakeClock()
    authority = Authority("router", 1, clock)
    index = authority.index
    pools = [PoolSockets(context, clock, node) for node in ("a", "b")]
    a, b = pools
    a.store(*range(10))
    with Ingest(context, authority, clock, StreamTimes(answer_s=30.0)) as ingest:
        ingest.add_source("a", a.endpoints)
        ingest.add_source("b", b.endpoints)
        turn = (lambda: ingest.poll(10), a.serve, b.serve)
        until(lambda: prefix(index, "a") == 10 and index.trusted("b"), *turn)
        a.store(10, lost=True)
        a.store(11)
        b.store(0)
        beat = lambda: (a.publisher.send_multipart(a.log.heartbeat()),  # noqa: E731
                        b.publisher.send_multipart(b.log.heartbeat()))  # fmt: skip
        until(lambda: prefix(index, "a") == 12 and prefix(index, "b") == 1, beat, *turn)
        assert {name: feed.stream.trusted for name, feed in ingest.feeds.items()} == {
            "a": True, "b": True,
        }  # fmt: skip
        a.restart(2)
        a.store(12)
        until(lambda: prefix(index, "a") == 13, beat, *turn)
        assert ingest.feeds["a"].stream.epoch == 2
        ingest.remove_source("a")
        ingest.remove_source("nobody")
        assert prefix(index, "a") == 0
        assert prefix(index, "b") == 1
        ingest.add_source("a", a.endpoints)
        until(lambda: prefix(index, "a") == 13, *turn)
        with pytest.raises(ConfigError):
            ingest.add_source("a", a.endpoints)
        with pytest.raises(ConfigError, match="publish"):
            ingest.add_source("bad", SourceEndpoints("nonsense", "tcp://127.0.0.1:1"))
        with pytest.raises(ConfigError, match="replay"):
            ingest.add_source("bad", SourceEndpoints("tcp://127.0.0.1:1", "nonsense"))
        assert set(ingest.feeds) == {"a", "b"}
    with pytest.raises(Closed):
        ingest.poll(0)
    with pytest.raises(Closed):
        ingest.add_source("c", a.endpoints)
    index.check()


def test_a_dead_source_loses_credit(context):
    clock = FakeClock()
    authority = Authority("router", 1, clock)
    pool = PoolSockets(context, clock, "a")
    pool.store(*range(5))
    with Ingest(context, authority, clock) as ingest:
        ingest.add_source("a", pool.endpoints)
        until(lambda: prefix(authority.index, "a") == 5, lambda: ingest.poll(10), pool.serve)
        clock.time_s += 3
        ingest.poll(0)
        assert prefix(authority.index, "a") == 5
        clock.time_s += 1.1
        ingest.poll(0)
        assert prefix(authority.index, "a") == 0
        clock.time_s += 3
        until(lambda: prefix(authority.index, "a") == 5, lambda: ingest.poll(10), pool.serve)


def test_an_engine_that_connects_is_bound_for(context):
    clock = FakeClock()
    authority = Authority("router", 1, clock)
    pool = PoolSockets(context, clock, "a")
    probe = context.socket(zmq.PUB)
    port = probe.bind_to_random_port("tcp://127.0.0.1")
    probe.close(linger=0)
    endpoints = SourceEndpoints(f"tcp://127.0.0.1:{port}", pool.endpoints.replay, bind=True)
    with Ingest(context, authority, clock) as ingest:
        until(lambda: _added(ingest, endpoints), lambda: None)
        pool.publisher.connect(f"tcp://127.0.0.1:{port}")
        pool.store(0, 1, 2)
        until(lambda: prefix(authority.index, "a") == 3, lambda: ingest.poll(10), pool.serve)


def _added(ingest, endpoints):
    try:
        ingest.add_source("a", endpoints)
    except ConfigError:
        return False
    return True


def test_replica_follows_and_outlives_the_authority(context):
    clock = FakeClock()
    pool = PoolSockets(context, clock, "a")
    pool.store(*range(20))
    authority = Authority("router", 1, clock)
    server = AuthoritySocket(context, authority)
    replica = Replica()
    with Ingest(context, authority, clock) as ingest:
        ingest.add_source("a", pool.endpoints)
        client = ReplicaSocket(context, replica, server.endpoints, clock)
        turn = (
            lambda: ingest.poll(2), pool.serve, lambda: server.poll(2), lambda: client.poll(2),
        )  # fmt: skip
        until(lambda: replica.synced and prefix(replica.index, "a") == 20, *turn)
        pool.store(20)
        until(lambda: prefix(replica.index, "a") == 21, *turn)
        addresses = server.endpoints
        server.close()
        client.poll(0)
        assert prefix(replica.index, "a") == 21
    clock.time_s += 2
    second = Authority("router", 2, clock)
    with Ingest(context, second, clock) as ingest:
        made = []

        def bind():
            if not made:
                try:
                    made.append(
                        AuthoritySocket(context, second, addresses.publish, addresses.replay)
                    )
                except ConfigError:
                    return

        until(lambda: made, bind, lambda: client.poll(10))
        ingest.add_source("a", pool.endpoints)
        pool.store(21)

        def beat():
            clock.time_s += 0.1

        until(
            lambda: replica.synced and prefix(replica.index, "a") == 22,
            lambda: ingest.poll(2), pool.serve, lambda: made[0].poll(2), lambda: client.poll(2),
            beat,
        )  # fmt: skip
        assert client.feed.stream.epoch == 2
        made[0].close()
    client.close()


def test_requests_out_of_form_are_ignored(context):
    clock = FakeClock()
    server = AuthoritySocket(context, Authority("router", 1, clock))
    dealer = context.socket(zmq.DEALER)
    dealer.connect(server.endpoints.replay)
    dealer.send_multipart([b"no empty frame"])
    until(lambda: server.refused == 1, lambda: server.poll(10))
    with pytest.raises(ConfigError, match="router address"):
        AuthoritySocket(context, server.authority, server.endpoints.publish)
    server.close()
