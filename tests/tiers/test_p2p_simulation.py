"""Both roles on virtual time: pools that pull from each other while everything goes wrong.

Bytes are real (a bytearray per node and life), time is not. Messages are lost, late, duplicated and
overtake each other; nodes freeze and restart; slots are evicted and rewritten as soon as no pin
forbids it; reads copy each chunk at some moment of their own, and go on after their pull is over.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

import pytest

from kvfabric.fabric.checksum import checksum
from kvfabric.fabric.config import PeerConfig
from kvfabric.fabric.types import (
    Chunk,
    ChunkKey,
    Lookup,
    NamespaceId,
    Released,
    Reserved,
    SlotRef,
    make_key,
)
from kvfabric.fabric.wire import decode
from kvfabric.tiers.p2p.actions import (
    AbortSlots,
    Action,
    Connect,
    Disconnect,
    Finished,
    Landing,
    Pull,
    RemovePeer,
    ReserveSlots,
    SendTo,
    StartRead,
    StartVerify,
)
from kvfabric.tiers.p2p.consumer import PullConsumer
from kvfabric.tiers.p2p.source import Placed, PullSource, Send, SourceDescription
from kvfabric.tiers.p2p.transport import ReadState, Segment

SLOT_BYTES = 96
SLOTS = 24
KEYS = [make_key(index.to_bytes(16, "big"), 0) for index in range(40)]
NAMESPACE = NamespaceId(b"n" * 16)
CONFIG = PeerConfig(lease_s=1.0, source_deadline_s=1.5, suspect_s=2.0, peers_max=24)
SHORT = PeerConfig(lease_s=0.06, source_deadline_s=1.5, suspect_s=2.0, peers_max=3)
"""Leases end under most reads, and peers get in each other's way."""


def content(key: ChunkKey) -> bytes:
    return random.Random(key).randbytes(40 + key[15])


@dataclass
class Slot:
    generation: int = 0
    key: ChunkKey | None = None
    state: str = "free"  # free, writing, ready
    length: int = 0
    checksum: int = 0


@dataclass
class Pool:
    """Slots, pins and reservations of one life of a node."""

    memory: bytearray
    slots: list[Slot] = field(default_factory=lambda: [Slot() for _ in range(SLOTS)])
    pins: dict[bytes, list[SlotRef]] = field(default_factory=dict)

    def pinned(self, index: int) -> bool:
        return any(ref.slot == index for refs in self.pins.values() for ref in refs)

    def pin(self, owner, namespace, keys, lease_s, now_s):
        assert owner not in self.pins, "a lease was pinned twice"
        answers: list[Placed | Lookup] = []
        for key in keys:
            found = Lookup.MISS
            for index, slot in enumerate(self.slots):
                if slot.key == key and namespace == NAMESPACE:
                    ref = SlotRef(index, slot.generation)
                    chunk = Chunk(key, ref, slot.length, slot.checksum)
                    ready = slot.state == "ready"
                    found = Placed(chunk, 0, index * SLOT_BYTES) if ready else Lookup.PENDING
            answers.append(found)
        refs = [answer.chunk.slot for answer in answers if isinstance(answer, Placed)]
        if refs:
            self.pins[owner] = refs
        return answers

    def release(self, owner, refs):
        held = self.pins.get(owner, [])
        answers = [Released.HELD if ref in held else Released.LOST for ref in refs]
        self.pins[owner] = [ref for ref in held if ref not in refs]
        return answers

    def forget(self, owner):
        self.pins.pop(owner, None)

    def take(self, rng: random.Random) -> int | None:
        """Return a slot to write, evicting what is not pinned."""
        indices = [
            index
            for index, slot in enumerate(self.slots)
            if slot.state == "free" or (slot.state == "ready" and not self.pinned(index))
        ]
        if not indices:
            return None
        index = rng.choice(indices)
        slot = self.slots[index]
        slot.generation, slot.key, slot.state = slot.generation + 1, None, "writing"
        return index

    def store(self, key: ChunkKey, rng: random.Random) -> None:
        """An engine's own chunk, written at once."""
        if any(slot.key == key for slot in self.slots):
            return
        if (index := self.take(rng)) is not None:
            slot, data = self.slots[index], content(key)
            self.memory[index * SLOT_BYTES : index * SLOT_BYTES + len(data)] = data
            slot.key, slot.state, slot.length, slot.checksum = (
                key,
                "ready",
                len(data),
                checksum(data),
            )

    def reserve(self, keys, rng, base: int):
        places: list[Landing | Reserved] = []
        for key in keys:
            having = [slot for slot in self.slots if slot.key == key]
            if having:
                ready = having[0].state == "ready"
                places.append(Reserved.PRESENT if ready else Reserved.PENDING)
            elif (index := self.take(rng)) is not None:
                self.slots[index].key = key
                view = memoryview(self.memory)[index * SLOT_BYTES : (index + 1) * SLOT_BYTES]
                ref = SlotRef(index, self.slots[index].generation)
                places.append(Landing(ref, base + index * SLOT_BYTES, view))
            else:
                places.append(Reserved.BUSY)
        if Reserved.BUSY in places:
            self.abort([place.ref for place in places if isinstance(place, Landing)])
            return tuple(Reserved.BUSY for _ in places)
        return tuple(places)

    def commit(self, chunk: Chunk) -> None:
        slot = self.slots[chunk.slot.slot]
        assert (slot.state, slot.generation) == ("writing", chunk.slot.generation)
        start = chunk.slot.slot * SLOT_BYTES
        assert self.memory[start : start + chunk.length_bytes] == content(chunk.key), "wrong bytes"
        slot.key, slot.state = chunk.key, "ready"
        slot.length, slot.checksum = chunk.length_bytes, chunk.checksum

    def abort(self, refs) -> None:
        for ref in refs:
            slot = self.slots[ref.slot]
            assert (slot.state, slot.generation) == ("writing", ref.generation)
            slot.state, slot.key = "free", None


@dataclass
class Life:
    """One life of a node, from start to kill."""

    node: str
    number: int
    pool: Pool
    source: PullSource
    consumer: PullConsumer
    base: int
    alive: bool = True
    frozen_until_s: float = -inf
    identities: dict[str, bytes] = field(default_factory=dict)
    running: dict[int, StartRead] = field(default_factory=dict)
    pulls: dict[int, Pull] = field(default_factory=dict)


class World:
    def __init__(self, seed: int, *, trouble: float, config: PeerConfig = CONFIG) -> None:
        self.config = config
        self.read_s_max = 0.4 if config is SHORT else 0.05
        self.rng = random.Random(seed)
        self.trouble = trouble
        self.now_s = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.lives: list[Life] = []
        self.nodes: dict[str, Life] = {}
        self.outcomes: list[Lookup] = []
        self.corrupt = self.aborted_late = 0
        for name in ("a", "b", "c"):
            self.start(name)

    def at(self, delay_s: float, what: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (self.now_s + delay_s, self.count, what))

    def start(self, name: str) -> None:
        number = len(self.lives) + 1
        base = number << 32
        pool = Pool(bytearray(SLOTS * SLOT_BYTES))
        agent = f"{name}.{number}".encode()
        segments = (Segment(base, SLOTS * SLOT_BYTES),)
        description = SourceDescription(name, number, agent, segments, SLOT_BYTES)
        life = Life(
            name, number, pool, PullSource(description, pool, self.config),
            PullConsumer(name, agent, SLOT_BYTES, self.config), base,
        )  # fmt: skip
        for key in self.rng.sample(KEYS, SLOTS - 8):
            pool.store(key, self.rng)
        self.lives.append(life)
        self.nodes[name] = life

    def chance(self, share: float) -> bool:
        return self.rng.random() < share * self.trouble

    def post(self, deliver: Callable[[], None]) -> None:
        """Carry a message: lost, late, twice, or out of order."""
        if self.chance(0.05):
            return
        for _ in range(2 if self.chance(0.1) else 1):
            delay_s = self.rng.uniform(0.001, 0.02)
            self.at(self.rng.uniform(0.0, 2.0) if self.chance(0.04) else delay_s, deliver)

    def awake(self, life: Life, what: Callable[[], None]) -> None:
        """Run something on a node: never if it is dead, later if it is frozen."""
        if not life.alive:
            return
        if self.now_s < life.frozen_until_s:
            self.at(life.frozen_until_s - self.now_s, lambda: self.awake(life, what))
        else:
            what()

    def to_source(self, life: Life, endpoint: str, frame: bytes, identity: bytes) -> None:
        target = self.nodes[endpoint]

        def deliver() -> None:
            for send in target.source.handle(identity, decode(frame), self.now_s):
                self.answer(life, endpoint, send)
            target.source.check()

        self.awake(target, deliver)

    def answer(self, life: Life, endpoint: str, send: Send) -> None:
        envelope = decode(send.frame)

        def deliver() -> None:
            if life.identities.get(endpoint) == send.identity:
                self.do(life, life.consumer.on_message(endpoint, envelope, self.now_s))

        self.post(lambda: self.awake(life, deliver))

    def do(self, life: Life, actions: tuple[Action, ...]) -> None:
        for action in actions:
            match action:
                case Connect(endpoint):
                    self.count += 1
                    life.identities[endpoint] = f"{life.number}/{self.count}".encode()
                case Disconnect(endpoint):
                    del life.identities[endpoint]
                case SendTo(endpoint=endpoint):
                    frame, identity = action.frame, life.identities[endpoint]
                    self.post(lambda e=endpoint, f=frame, i=identity: self.to_source(life, e, f, i))
                case ReserveSlots(pull=pull):
                    places = life.pool.reserve(action.keys, self.rng, life.base)
                    delay_s = self.rng.choice((0.0, 0.01))
                    self.at(
                        delay_s,
                        lambda p=pull, s=places: self.awake(
                            life,
                            lambda: self.do(life, life.consumer.reserved(p.pull_id, s, self.now_s)),
                        ),
                    )
                case StartRead():
                    self.read(life, action)
                case StartVerify():
                    self.at(self.rng.uniform(0, 0.01), lambda a=action: self.verify(life, a))
                case RemovePeer(agent):
                    assert all(read.agent != agent for read in life.running.values())
                case Finished():
                    self.finish(life, action)
                case AbortSlots(refs=refs):
                    life.pool.abort(refs)
                    self.aborted_late += 1
        life.consumer.check()

    def read(self, life: Life, action: StartRead) -> None:
        life.running[action.read_id] = action
        source = next(
            one
            for one in self.lives
            if one.pool and one.source and action.agent == f"{one.node}.{one.number}".encode()
        )
        takes_s = self.rng.uniform(0.001, self.read_s_max)
        if self.chance(0.1):
            takes_s = self.rng.uniform(0.5, 4.0)
        failed = []

        def copy(arrival) -> None:
            if not life.alive:
                return
            ref = arrival.landing.ref
            slot = life.pool.slots[ref.slot]
            assert (slot.state, slot.generation) == ("writing", ref.generation), (
                "reused under a read"
            )
            if not source.alive:
                failed.append(arrival)
                return
            offset = arrival.remote_address - source.base
            arrival.landing.view[: arrival.length_bytes] = source.pool.memory[
                offset : offset + arrival.length_bytes
            ]

        def done() -> None:
            del life.running[action.read_id]
            state = ReadState.FAILED if failed or self.chance(0.02) else ReadState.DONE
            self.do(life, life.consumer.on_read_done(action.read_id, state, self.now_s))

        for arrival in action.arrivals:
            self.at(self.rng.uniform(0, takes_s), lambda a=arrival: copy(a))
        self.at(takes_s, lambda: self.awake(life, done))

    def verify(self, life: Life, action: StartVerify) -> None:
        sums = tuple(
            checksum(arrival.landing.view[: arrival.length_bytes]) for arrival in action.arrivals
        )
        self.awake(
            life, lambda: self.do(life, life.consumer.on_verified(action.read_id, sums, self.now_s))
        )

    def finish(self, life: Life, action: Finished) -> None:
        pull = life.pulls.pop(action.pull.pull_id)
        assert len(action.outcomes) == len(pull.keys)
        if life.frozen_until_s < pull.deadline_s:
            assert self.now_s <= max(pull.deadline_s, life.frozen_until_s) + 1e-9, (
                "past its deadline"
            )
        for chunk in action.commits:
            assert action.outcomes[pull.keys.index(chunk.key)] == Lookup.HIT
            life.pool.commit(chunk)
        life.pool.abort(action.aborts)
        reading = {
            arrival.landing.ref for read in life.running.values() for arrival in read.arrivals
        }
        assert reading.isdisjoint(action.aborts)
        assert reading.issuperset(action.doomed)
        self.outcomes += action.outcomes

    def want(self, life: Life) -> None:
        others = [name for name in self.nodes if name != life.node] + [life.node]
        name = self.rng.choices(others, (5, 5, 1))[0]
        self.count += 1
        keys = tuple(self.rng.sample(KEYS, self.rng.randint(0, 6)))
        deadline_s = self.now_s + self.rng.choice((0.02, 0.5, 2.0, 3.0))
        pull = Pull(self.count, name, name, NAMESPACE, keys, deadline_s)
        life.pulls[pull.pull_id] = pull
        self.do(life, life.consumer.want(pull, self.now_s))

    def churn(self) -> None:
        """Something happens: a pull, an engine's store, a freeze, a death."""
        life = self.rng.choice(list(self.nodes.values()))
        if self.chance(0.01):
            life.alive = False
            self.start(life.node)
        elif self.chance(0.02):
            life.frozen_until_s = self.now_s + self.rng.uniform(0.1, 3.0)
        elif self.rng.random() < 0.5:
            self.awake(life, lambda: self.want(life))
        else:
            for key in self.rng.sample(KEYS, 6):
                life.pool.store(key, self.rng)

    def tick(self, life: Life) -> None:
        self.do(life, life.consumer.tick(self.now_s))
        life.source.tick(self.now_s)

    def due_s(self, life: Life) -> float:
        if not life.alive:
            return inf
        due_s = min(life.consumer.next_deadline_s(), life.source.next_deadline_s())
        return max(due_s, life.frozen_until_s, self.now_s) if due_s < inf else inf

    def run(self, until_s: float) -> None:
        while True:
            life = min(self.nodes.values(), key=self.due_s)
            event_s = self.events[0][0] if self.events else inf
            due_s = self.due_s(life)
            if min(event_s, due_s) > until_s:
                break
            if due_s <= event_s:
                self.now_s = due_s
                self.tick(life)
            else:
                self.now_s, _, what = heapq.heappop(self.events)
                what()

    def play(self, events: int) -> None:
        for index in range(events):
            self.at(index * 0.02, self.churn)
        self.run(events * 0.02)
        self.trouble = 0.0
        self.run(self.now_s + 20.0)
        for life in self.nodes.values():
            assert not life.pulls, "a pull never finished"
            assert not any(life.pool.pins.values()), "pins were left"
            assert all(slot.state != "writing" for slot in life.pool.slots), "a slot was lost"
            assert life.consumer.stats().doomed_chunks == 0


@pytest.mark.parametrize("seed", range(24))
def test_nothing_wrong_is_committed_and_everything_ends(seed):
    world = World(seed, trouble=(0.3, 1.0)[seed % 2])
    world.play(600)
    assert world.outcomes.count(Lookup.HIT) > 50


def test_leases_that_end_under_a_read_cost_only_misses():
    corrupt = lost = 0
    for seed in range(12):
        world = World(seed, trouble=0.5, config=SHORT)
        world.play(600)
        stats = [life.consumer.stats() for life in world.lives]
        corrupt += sum(one.corrupt for one in stats)
        lost += sum(one.lost_leases for one in stats)
    assert corrupt > 5
    assert lost > 5


def test_without_trouble_everything_that_is_there_arrives():
    world = World(1, trouble=0.0)
    world.play(600)
    stats = [life.consumer.stats() for life in world.lives]
    assert sum(one.silent + one.failed_reads + one.unanswered for one in stats) == 0
    assert sum(one.corrupt + one.lost_leases for one in stats) == 0
    assert sum(one.chunks for one in stats) > 100


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1400))
def test_soak(seed):
    World(seed, trouble=2.0, config=(CONFIG, SHORT)[seed % 2]).play(2000)
