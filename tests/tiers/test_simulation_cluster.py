"""A cluster on virtual time: pools, engines, tiers, peers and the router, with everything breaking.

Safety, at every step: no wrong byte under a pin that held; no byte written into a slot that is
somebody else's; all books balance; an awake pool answers in time. Liveness, once all has healed:
every request ends, no pin, no half-written and no quarantined slot remains, and the router's index
is what the pools have.
"""

import os
from dataclasses import replace

import msgspec
import pytest

from kvfabric.fabric.config import EventConfig, PeerConfig
from kvfabric.fabric.errors import Corrupt
from kvfabric.fabric.events import (
    SNAPSHOT_SEQ,
    EndOfReplay,
    decode_batch,
    decode_snapshot,
    parse_message,
    parse_reply,
    replay_request,
)
from kvfabric.fabric.metrics import NullRecorder
from kvfabric.fabric.namespace import Namespace
from kvfabric.fabric.types import Medium, Released
from kvfabric.fabric.wire import ReleaseReply, SourceRangeWire
from kvfabric.router.index import PrefixIndex
from kvfabric.router.stream import (
    Apply,
    AskReplay,
    AskSnapshot,
    Distrust,
    Drop,
    Load,
    SourceStream,
    StreamTimes,
    Trust,
)
from kvfabric.tiers.event_log import EventLog
from kvfabric.tiers.p2p.reads import Reads
from kvfabric.tiers.p2p.source import PullSource
from kvfabric.tiers.pool.directory import Directory
from kvfabric.tiers.pool.fetch import Fetches
from kvfabric.tiers.simulation import (
    CALM,
    Chaos,
    Disk,
    LinkKnobs,
    Network,
    Overdue,
    Process,
    Recorder,
    RemoteMemory,
    World,
    draw_knobs,
    log_uniform,
    seeds,
    true_key,
)
from kvfabric.tiers.simulation.engine import SimEngine, Workload
from kvfabric.tiers.simulation.pool import Node, NodeShape, SimPool
from kvfabric.tiers.simulation.sockets import Socket, pack, unpack

CHUNK_BYTES = 512
POOLS = ("pool-a", "pool-b", "pool-c")
ENGINES_PER_POOL = 2
DEPTH_MAX = 6
CHAOS_S, SOAK_CHAOS_S = 6.0, 30.0
QUIET_S = 45.0
"""After the chaos: longer than a lease, a suspicion, a router's back-off, a tier's job deadline."""
STEPS_MAX = 1_000_000
ROUTER = "router"
NAMESPACE = Namespace(
    model="m",
    weights_version="1",
    kv_dtype="bf16",
    kv_scales="none",
    rope="none",
    max_model_len="4096",
    layout="l",
    chunk_tokens="16",
    tokens_per_hash="16",
    hash_algorithm="sha256_cbor",
    hash_seed="0",
)


class RouterProgram:
    """The router's ingest on virtual time: one repaired stream per pool, into one index."""

    def __init__(self, process):
        self.process, self.connections = process, 0
        self.index = PrefixIndex()
        self.streams = {name: SourceStream(name, StreamTimes()) for name in POOLS}
        self.connection = dict.fromkeys(POOLS, 0)
        for stream in self.streams.values():
            self.do(stream.start(process.clock.now_s()))

    def on_message(self, source, frame):
        socket, connection, body = unpack(frame)
        stream, now_s = self.streams[source], self.process.clock.now_s()
        for frames in msgspec.msgpack.decode(body):
            if socket is Socket.EVENT:
                message = parse_message(frames)
                batch = decode_batch(message.payload)
                self.do(stream.on_live(message.epoch, message.seq, batch.ts, batch, now_s))
            elif connection == self.connection[source]:
                self.on_reply(stream, parse_reply(frames), now_s)

    def on_reply(self, stream, reply, now_s):
        if isinstance(reply, EndOfReplay):
            self.do(stream.on_end(now_s))
        elif reply.seq == SNAPSHOT_SEQ:
            snapshot = decode_snapshot(reply.payload)
            self.do(
                stream.on_snapshot(reply.epoch, snapshot.next_seq, snapshot.ts, snapshot, now_s)
            )
        else:
            batch = decode_batch(reply.payload)
            self.do(stream.on_replayed(reply.epoch, reply.seq, batch.ts, batch, now_s))

    def tick(self):
        for stream in self.streams.values():
            self.do(stream.tick(self.process.clock.now_s()))

    def do(self, actions):
        for action in actions:
            match action:
                case Apply(source, batch):
                    self.index.apply(source, batch.events)
                case Load(source, snapshot):
                    self.index.load(source, snapshot)
                case Drop(source):
                    self.index.drop_source(source)
                case Trust(source) | Distrust(source):
                    self.index.set_trust(source, trusted=isinstance(action, Trust))
                case AskReplay(source, start_seq, fresh):
                    self.ask(source, start_seq, fresh)
                case AskSnapshot(source, fresh):
                    self.ask(source, SNAPSHOT_SEQ, fresh)

    def ask(self, source, start_seq, fresh):
        if fresh or not self.connection[source]:
            self.connections += 1
            self.connection[source] = self.process.epoch << 32 | self.connections
        frame = pack(Socket.REPLAY, self.connection[source], replay_request(start_seq)[1])
        self.process.send(source, frame)


class Cluster:
    """Three nodes with engines, and a router."""

    def __init__(self, seed, knobs=None):
        self.world = World(seed)
        self.random = self.world.fork("cluster")
        self.knobs = knobs or draw_knobs(self.world.fork("knobs"), chunk_bytes=CHUNK_BYTES)
        self.recorder = Recorder(self.world)
        self.network = Network(self.world, self.knobs.link)
        self.streams = Network(
            self.world, replace(self.knobs.link, ordered=True, duplicate_share=0.0), "streams"
        )
        self.memory = RemoteMemory(self.world, self.knobs.memory)
        self.local = Network(self.world, LinkKnobs(delay_s=0.00005), "local")
        self.active = True
        self.conversations = self.random.randint(2, 20)
        self.processes, self.disks = {}, []
        self.pools = [self.add_pool(name) for name in POOLS]
        self.engines = [
            self.add_engine(pool, f"engine-{pool.name[-1]}{number}")
            for pool in self.pools
            for number in range(ENGINES_PER_POOL)
        ]
        self.router = self.add(Process(self.world, self.streams, ROUTER, RouterProgram))
        for process in self.processes.values():
            process.start()
        self.world.watch("engines", self.check_engines, every_steps=8)
        self.world.watch("books", self.check_books, every_steps=64)

    def add(self, process):
        self.processes[process.pid] = process
        return process

    def add_pool(self, name):
        random = self.random
        disk = Disk(self.world, self.knobs.disk, f"disk-{name[-1]}")
        self.disks.append(disk)
        shape = NodeShape(
            slots=random.randint(6, 32),
            slot_bytes=4096,
            lease_s=log_uniform(random, 0.5, 8.0),
            quarantine_slots_max=random.randint(1, 6),
            tier_bytes=random.choice((0, 10, 40)) * CHUNK_BYTES,
            peers=PeerConfig(
                lease_s=log_uniform(random, 0.05, 5.0),
                source_deadline_s=log_uniform(random, 0.1, 2.0),
                suspect_s=log_uniform(random, 0.2, 5.0),
            ),
            events=EventConfig(
                heartbeat_s=log_uniform(random, 0.2, 2.0), buffer_batches=random.randint(1, 100)
            ),
        )
        node = Node(
            shape=shape,
            local=self.local,
            streams=self.streams,
            memory=self.memory,
            disk=disk,
            metrics=NullRecorder(),
            readers=(ROUTER,),
            alive=self.is_alive,
        )
        process = Process(
            self.world, self.network, name, lambda p: SimPool(p, node), knobs=self.knobs.process
        )
        process.join(self.local)
        process.join(self.streams)
        return self.add(process)

    def add_engine(self, pool, name):
        work = Workload(
            namespace=NAMESPACE.fields(),
            chunk_bytes=CHUNK_BYTES,
            pick=self.pick,
            sources=lambda random, count: self.sources(pool.name, random, count),
            active=lambda: self.active,
        )
        process = Process(
            self.world,
            self.local,
            name,
            lambda p: SimEngine(p, self.local, pool, self.recorder, work),
            knobs=self.knobs.process,
        )
        return self.add(process)

    def is_alive(self, pid, started):
        return pid in self.processes and not self.processes[pid].is_gone(started)

    def pick(self, random):
        conversation = random.choice((0, random.randrange(self.conversations)))
        depth = random.randint(1, DEPTH_MAX)
        return [true_key(1000 * conversation + number) for number in range(depth)]

    def sources(self, own, random, count):
        others = [name for name in POOLS if name != own]
        random.shuffle(others)
        return [SourceRangeWire(name, name, 0, count) for name in others[: random.randint(1, 2)]]

    def programs(self, processes):
        return [process.program for process in processes if process.program is not None]

    def check_engines(self):
        for engine in self.programs(self.engines):
            engine.check()

    def check_books(self):
        for network in (self.network, self.local, self.streams):
            network.check()
        for pool in self.programs(self.pools):
            pool.check()
        for disk in self.disks:
            disk.check()

    def run(self, chaos_s):
        with self.world:
            chaos = Chaos(
                self.world,
                self.knobs,
                networks=[self.network, self.streams],
                processes=list(self.processes.values()),
                disks=self.disks,
                memory=self.memory,
            )
            chaos.until(chaos_s)
            self.world.at(chaos_s, self.stop)
            self.live(chaos_s + QUIET_S)
            self.check_quiet()
            self.restart_engines()
            self.live(chaos_s + QUIET_S + 10.0)
            self.check_empty_handed()
            self.check_router()
        return self.recorder

    def stop(self):
        self.active = False

    def live(self, until_s):
        self.world.run(until_s, STEPS_MAX)
        assert self.world.now_s() == until_s, "more steps than expected: something spins"

    def check_quiet(self):
        for engine in self.programs(self.engines):
            assert engine.quiet, engine.process.name
        for pool in self.programs(self.pools):
            stats = pool.directory.stats()
            assert stats.pinned == stats.condemned == stats.writing == 0, stats
            assert not pool.fetcher.busy
            assert not pool.peering.busy

    def restart_engines(self):
        for engine in self.engines:
            engine.kill()
            engine.start()

    def check_empty_handed(self):
        for pool in self.programs(self.pools):
            stats = pool.directory.stats()
            assert stats.quarantined == 0, stats
            assert stats.free + stats.ready == stats.slots, stats

    def check_router(self):
        router = self.router.program
        for pool in self.programs(self.pools):
            name = pool.process.name
            assert router.index.trusted(name), router.streams[name].counts
            truth = sorted(
                (key, medium)
                for medium in (Medium.CPU, Medium.STORAGE)
                for key in self.truth(pool, medium)
            )
            known = sorted(
                (int(value), Medium[section.medium])
                for section in router.index.dump(name)
                for value in section.array()
            )
            assert known == truth, name

    def truth(self, pool, medium):
        """Read from the pool's parts and not from its stream, so that the stream is tested too."""
        if medium is Medium.CPU:
            keys = [chunk.key for _, chunk in pool.directory.ready_chunks()]
        else:
            keys = [bytes.fromhex(name.split("-")[1]) for name in pool.node.disk.names()]
        return [int.from_bytes(key[-12:-4], "big") for key in keys]


def run(seed, chaos_s=CHAOS_S):
    return Cluster(seed).run(chaos_s)


@pytest.mark.slow
def test_a_cluster_survives_everything():
    recorders = [run(seed) for seed in seeds(4, os.environ)]
    assert sum(recorder.hits for recorder in recorders) > 100


def test_a_cluster_does_the_same_for_the_same_seed():
    digests = []
    for _ in range(2):
        cluster = Cluster(3)
        cluster.live(5.0)
        digests.append(cluster.world.trace.digest())
    assert digests[0] == digests[1]


def test_a_writer_that_dies_before_it_attaches_again_is_noticed():
    cluster = Cluster(1, CALM)
    pool, engines = cluster.pools[0], cluster.engines[:ENGINES_PER_POOL]
    while pool.program.directory.stats().writing == 0:
        cluster.live(cluster.world.now_s() + 0.001)
    for engine in engines:
        engine.pause()
    pool.kill()
    pool.start()
    assert pool.program.directory.stats().quarantined > 0
    for engine in engines:
        engine.kill()
    cluster.live(cluster.world.now_s() + 1.0)
    assert pool.program.directory.stats().quarantined == 0
    pool.program.check()


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_cluster_survives_everything_for_long():
    for seed in seeds(300, os.environ, first=1000):
        run(seed, SOAK_CHAOS_S)


def lapse_frees(directory, owner):
    for entry in owner.writing.values():
        directory._slots.discard(entry)
    owner.writing.clear()
    directory._drop_pins(owner)


def overdue_only_when_decided(fetches, now_s):
    return [waiter for waiter in fetches.waiters if waiter.undecided == 0]


def expire_keeps_pins(source, peer, request, lease):
    peer.end(request, ReleaseReply([Released.LOST] * len(lease.refs)))


def append_without_removals(append):
    return lambda log, changes: append(log, [one for one in changes if not one.removed])


MUTANTS = {
    "a lapsed writer's slot is freed at once": (Directory, "_lapse", lapse_frees, Corrupt),
    "pulled bytes are not verified": (
        Reads,
        "_sum",
        lambda reads, arrivals: tuple(arrival.checksum for arrival in arrivals),
        Corrupt,
    ),
    "a waiter's deadline is not looked at": (
        Fetches,
        "overdue",
        overdue_only_when_decided,
        Overdue,
    ),
    "a peer's expired lease keeps its pins": (
        PullSource,
        "_expire",
        expire_keeps_pins,
        AssertionError,
    ),
    "an engine throws late answers away": (
        SimEngine,
        "_give_back",
        lambda engine, answer: None,
        AssertionError,
    ),
    "removals are not announced": (
        EventLog,
        "append",
        append_without_removals(EventLog.append),
        AssertionError,
    ),
}


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_simulation_finds(mutant, monkeypatch):
    owner, name, wrong, error = MUTANTS[mutant]
    monkeypatch.setattr(owner, name, wrong)
    for seed in seeds(40, {}):
        try:
            run(seed, SOAK_CHAOS_S)
        except error:
            return
    pytest.fail(f"no seed found that {mutant}")
