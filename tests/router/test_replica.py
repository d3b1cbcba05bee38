"""Authority and replicas: equal answers through loss, restarts and rebuilds from pools."""

import random

import pytest

from kvfabric.fabric.errors import Malformed
from kvfabric.fabric.events import (
    SNAPSHOT_SEQ,
    AllBlocksCleared,
    BlockStored,
    chunks_removed,
    chunks_stored,
)
from kvfabric.fabric.types import Medium, make_key
from kvfabric.router import delta
from kvfabric.router.delta import DeltaCodec
from kvfabric.router.feed import EventCodec, Feed
from kvfabric.router.plan import Candidate, Prompt
from kvfabric.router.replica import Authority, Replica
from kvfabric.router.stream import AskSnapshot, StreamTimes
from kvfabric.tiers.event_log import Change, EventLog, Resident

TIMES = StreamTimes()
NODES = ("a", "b", "c")
WORKERS = [Candidate(f"w-{node}", node) for node in NODES]


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


class Link:
    """Between an authority and one replica; loses what the test says."""

    def __init__(self, authority, clock):
        self.authority = authority
        self.clock = clock
        self.replica = Replica()
        self.feed = Feed("authority", DeltaCodec(), self.replica, TIMES)
        self.carry(self.feed.start(clock.now_s()))

    def live(self, frames):
        self.carry(self.feed.on_live(frames, self.clock.now_s()))

    def tick(self):
        self.carry(self.feed.tick(self.clock.now_s()))

    def carry(self, requests):
        for _ in range(50):
            if not requests:
                return
            more = []
            for request in requests:
                start = SNAPSHOT_SEQ if isinstance(request, AskSnapshot) else request.start_seq
                for reply in self.authority.replay(start):
                    more += self.feed.on_reply(reply, self.clock.now_s())
                    if any(one.fresh for one in more):
                        break  # A new connection: what the old one still brings is lost.
            requests = more
        raise AssertionError("the feed asks without end")


def state(index):
    return {source: (index.trusted(source), index.dump(source)) for source in index.sources}


def prompt(hashes):
    return Prompt(hashes, len(hashes) * 16 + 3, 16, 1 << 20)


def answers(decider):
    """Costs of some prompts on all workers, and pulls to all nodes. Nothing is reserved."""
    asked = [prompt(range(start, start + 40)) for start in (0, 20, 60, 500)]
    return [
        (decider.costs(ask, WORKERS, 0.0), [decider.plan_pull(node, ask) for node in NODES])
        for ask in asked
    ]


def disturb(authority, rng):
    source = rng.choice(NODES)
    kind = rng.randrange(12)
    hashes = [rng.randrange(100) for _ in range(rng.randrange(8))]
    medium = rng.choice(list(Medium))
    if kind < 7:
        authority.apply(source, (chunks_stored(hashes, rng.randrange(2), medium, 16),))
    elif kind < 9:
        authority.apply(source, (chunks_removed(hashes, 0, medium), AllBlocksCleared()))
    elif kind == 9:
        authority.set_trust(source, trusted=rng.random() < 0.8)
    elif kind == 10:
        authority.drop_source(source)
        authority.set_trust(source, trusted=True)
    else:
        authority.set_pool(source, rng.choice(["", f"tcp://{source}"]))


@pytest.mark.parametrize("seed", range(10))
def test_a_replica_answers_as_the_authority_whatever_was_lost(seed):
    rng = random.Random(seed)
    clock = FakeClock()
    authority = Authority("router", 1, clock)
    for _ in range(30):
        disturb(authority, rng)
    authority.take_frames()
    link = Link(authority, clock)
    assert state(link.replica.index) == state(authority.index)
    for _ in range(200):
        clock.time_s += 0.01
        disturb(authority, rng)
        for frames in authority.take_frames():
            if rng.random() < 0.9:
                link.live(frames)
    clock.time_s += 3
    link.tick()
    assert link.replica.synced
    assert state(link.replica.index) == state(authority.index)
    assert answers(link.replica.decider) == answers(authority.decider)
    assert link.replica.decider.pools == authority.decider.pools
    link.replica.index.check()


class Fleet:
    """Pools with their logs, followed by whatever authority lives."""

    def __init__(self, clock):
        self.clock = clock
        self.logs = {node: EventLog(node, 1, 100, 1.0, clock) for node in NODES}
        self.held = {node: set() for node in NODES}
        self.feeds = {}

    def store(self, node, numbers, medium=Medium.CPU):
        self.clock.time_s += 0.01
        keys = [make_key(bytes(24) + n.to_bytes(8, "big"), 0) for n in numbers]
        self.held[node] |= {(key, medium) for key in keys}
        changes = [Change(key, medium, removed=False, chunk_tokens=16) for key in keys]
        for frames in self.logs[node].append(changes):
            if node in self.feeds:
                assert self.feeds[node].on_live(frames, self.clock.now_s()) == []

    def follow(self, authority):
        for node, log in self.logs.items():
            authority.set_pool(node, f"tcp://{node}")
            feed = self.feeds[node] = Feed(node, EventCodec(), authority, TIMES)
            requests = feed.start(self.clock.now_s())
            assert requests == [AskSnapshot(node, fresh=False)]
            manifest = [Resident(key, medium, 16) for key, medium in self.held[node]]
            for reply in log.replay(SNAPSHOT_SEQ, manifest):
                assert feed.on_reply(reply, self.clock.now_s()) == []


def test_a_killed_authority_is_rebuilt_from_pool_snapshots_to_equal_answers():
    clock = FakeClock()
    fleet = Fleet(clock)
    fleet.store("a", range(50))
    first = Authority("router", 1, clock)
    fleet.follow(first)
    fleet.store("b", range(70))
    fleet.store("c", range(30, 60), Medium.STORAGE)
    first.take_frames()
    link = Link(first, clock)
    fleet.store("a", range(60, 100))
    for frames in first.take_frames():
        link.live(frames)
    before = answers(first.decider)
    assert answers(link.replica.decider) == before

    fleet.feeds.clear()
    del first
    assert answers(link.replica.decider) == before
    clock.time_s += 5
    second = Authority("router", 2, clock)
    fleet.follow(second)
    assert answers(second.decider) == before
    assert answers(link.replica.decider) == before
    link.authority = second
    for frames in second.take_frames():
        link.live(frames)
    assert link.replica.synced
    assert link.feed.stream.epoch == 2
    assert answers(link.replica.decider) == before
    fleet.store("c", range(10))
    for frames in second.take_frames():
        link.live(frames)
    assert answers(link.replica.decider) == answers(second.decider) != before


def test_while_the_authority_is_away_a_replica_decides_and_says_that_it_is_not_synced():
    clock = FakeClock()
    authority = Authority("router", 1, clock)
    authority.apply("a", (chunks_stored(range(40), 0, Medium.CPU, 16),))
    authority.set_trust("a", trusted=True)
    link = Link(authority, clock)
    authority.take_frames()

    class Gone:
        def replay(self, _start):
            return []

    link.authority = Gone()
    for _ in range(10):
        clock.time_s += 2
        link.tick()
    assert not link.replica.synced
    plan = link.replica.decider.decide(prompt(range(40)), WORKERS, clock.now_s())
    assert plan.worker == "w-a"
    link.authority = Authority("router", 2, clock)
    link.live(link.authority._log.append(delta.encode(delta.DeltaBatch(clock.now_s(), ()))))
    assert link.replica.synced
    assert link.replica.index.sources == ()


def test_heartbeats_come_from_silence_only():
    clock = FakeClock()
    authority = Authority("router", 1, clock)
    assert authority.take_frames() == []
    clock.time_s += 1
    (beat,) = authority.take_frames()
    assert DeltaCodec().batch(beat[2]) == (101.0, ())
    authority.set_pool("a", "tcp://a")
    clock.time_s += 0.5
    assert len(authority.take_frames()) == 1
    assert authority.take_frames() == []
    with pytest.raises(Malformed):
        Authority("router", 0, clock)


def test_golden_deltas():
    event = BlockStored((1, 2), 7, (5, 6), 16, None, "CPU", None, group_idx=3)
    ops = (
        delta.op_of("a", event),
        delta.op_of("a", chunks_removed([1], 0, Medium.GPU)),
        delta.op_of("a", AllBlocksCleared()),
        delta.Dropped("a"),
        delta.Trusted("a", trusted=True),
        delta.PoolAt("a", "tcp://h:1"),
    )
    payload = delta.encode(delta.DeltaBatch(1.5, ops))
    assert payload.hex() == (
        "92cb3ff800000000000096"
        "96a153a16103a343505510c41001000000000000000200000000000000"
        "95a152a16100a3475055c4080100000000000000"
        "92a143a161"
        "92a144a161"
        "93a154a161c3"
        "93a150a161a97463703a2f2f683a31"
    )
    assert DeltaCodec().batch(payload) == (1.5, ops)
    assert delta.event_of(ops[0]) == chunks_stored([1, 2], 3, Medium.CPU, 16)


def test_large_loads_are_cut_and_malformed_deltas_refused(monkeypatch):
    monkeypatch.setattr(delta, "HASHES_MAX", 16)
    clock = FakeClock()
    authority = Authority("router", 1, clock)
    link = Link(authority, clock)
    keys = [make_key(bytes(24) + n.to_bytes(8, "big"), 0) for n in range(50)]
    log = EventLog("a", 1, 4, 1.0, clock)
    authority.load("a", log.snapshot([Resident(key, Medium.CPU, 16) for key in keys]))
    frames = authority.take_frames()
    assert len(frames) == 1 + 4 + 1
    for one in frames:
        link.live(one)
    assert state(link.replica.index) == state(authority.index)
    codec = DeltaCodec()
    for payload in (b"", b"\xc1", delta.encode(delta.DeltaBatch(1.0, ())) + b"x"):
        with pytest.raises(Malformed):
            codec.batch(payload)
        with pytest.raises(Malformed):
            codec.snapshot(payload)
    odd = delta.Stored("a", 0, "CPU", 16, b"123")
    with pytest.raises(Malformed):
        codec.batch(delta.encode(delta.DeltaBatch(1.0, (odd,))))
    with pytest.raises(Malformed):
        delta.event_of(odd)
