"""What engines say of their own caches: the books, the messages, and the stream that repeats it."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pool_world import World, key

from kvfabric.fabric import wire
from kvfabric.fabric.errors import Conservation
from kvfabric.fabric.events import (
    SNAPSHOT_SEQ,
    BlockStored,
    Snapshot,
    decode_batch,
    decode_snapshot,
    parse_message,
)
from kvfabric.fabric.types import Medium, NamespaceId, key_low64, make_key
from kvfabric.tiers.event_log import EventLog
from kvfabric.tiers.pool.gpu import GpuBook
from kvfabric.tiers.pool.stream import PoolStream

NAMESPACE = NamespaceId(b"n" * 16)


class Listener:
    """Reads a pool's stream as a router does: counts residencies of the GPU."""

    def __init__(self, world: World) -> None:
        log = EventLog("a", 7, 100, 1.0, world.clock)
        self.stream = PoolStream(log, world.context, ())
        self.stream.chunk_tokens = world.core.namespaces.chunk_tokens
        self.held: Counter[int] = Counter()
        self.tokens: set[int] = set()

    def listen(self) -> dict[int, int]:
        for frames in self.stream.take_frames():
            for event in decode_batch(parse_message(frames).payload).events:
                if event.medium != Medium.GPU.name:
                    continue
                stored = isinstance(event, BlockStored)
                if stored:
                    self.tokens.add(event.block_size)
                for value in event.block_hashes:
                    self.held[value] += 1 if stored else -1
                    assert self.held[value] >= 0
        return dict(+self.held)

    def snapshot(self) -> Snapshot:
        reply, _end = self.stream.replay(SNAPSHOT_SEQ)
        return decode_snapshot(reply[-1])

    def snapshot_of_gpus(self) -> dict[int, int]:
        found: Counter[int] = Counter()
        for section in self.snapshot().sections:
            if section.medium == Medium.GPU.name:
                found.update(section.array().tolist())
        return dict(found)


def told(world: World, who: bytes, stored=(), removed=(), *, whole: bool = False):
    body = wire.OnGpu(whole, [key(n) for n in stored], [key(n) for n in removed])
    return world.say(who, body)


def test_what_engines_say_is_published_once_for_each(clock) -> None:
    world = World(clock)
    ear = Listener(world)
    for who in (b"c", b"d"):
        world.attach(who)
    assert told(world, b"c", [1, 2, 3]) == wire.Ok()
    assert told(world, b"d", [3]) == wire.Ok()
    assert ear.listen() == {1: 1, 2: 1, 3: 2} == ear.snapshot_of_gpus()
    assert ear.tokens == {16}
    assert {section.chunk_tokens for section in ear.snapshot().sections} == {16}
    told(world, b"c", [4], [3, 1])
    assert ear.listen() == {2: 1, 3: 1, 4: 1} == ear.snapshot_of_gpus()
    world.core.gpu.check()


def test_what_is_said_twice_changes_nothing(clock) -> None:
    world = World(clock)
    ear = Listener(world)
    world.attach(b"c")
    for _ in range(2):
        told(world, b"c", [1, 2, 2])
        told(world, b"c", [3], [1, 9])
    told(world, b"c", [2], [2])
    assert ear.listen() == {2: 1, 3: 1}
    sent = ear.stream.log.next_seq
    told(world, b"c", [2, 3], [1], whole=True)
    assert ear.listen() == {2: 1, 3: 1}
    assert ear.stream.log.next_seq == sent


def test_the_whole_replaces_what_was_said_before(clock) -> None:
    world = World(clock)
    ear = Listener(world)
    for who in (b"c", b"d"):
        world.attach(who)
        told(world, who, [1, 2])
    told(world, b"c", [2, 3], whole=True)
    assert ear.listen() == {1: 1, 2: 2, 3: 1} == ear.snapshot_of_gpus()
    told(world, b"c", whole=True)
    assert ear.listen() == {1: 1, 2: 1}


@pytest.mark.parametrize("end", ["detach", "killed", "anew"])
def test_an_engine_that_goes_takes_all_along(clock, end: str) -> None:
    world = World(clock)
    ear = Listener(world)
    for who, pid in ((b"c", 100), (b"d", 101)):
        world.attach(who, pid)
        told(world, who, [1, 2])
    assert ear.listen() == {1: 2, 2: 2}
    if end == "detach":
        world.say(b"c", wire.Detach())
    elif end == "killed":
        world.core.process_gone(100, 5)
    else:
        world.attach(b"c", 100)
    assert ear.listen() == {1: 1, 2: 1} == ear.snapshot_of_gpus()
    world.core.gpu.check()


def test_an_engine_that_is_silent_keeps_its_cache(clock) -> None:
    world = World(clock)
    ear = Listener(world)
    world.attach(b"c")
    told(world, b"c", [1])
    clock.sleep_s(100.0)
    world.turn()
    assert ear.listen() == {1: 1}


def test_a_stranger_or_one_of_another_epoch_is_told_so(clock) -> None:
    world = World(clock)
    assert told(world, b"c", [1]) == wire.Stale()
    world.attach(b"c")
    assert world.say(b"c", wire.OnGpu(False, [key(1)], []), epoch=6) == wire.Stale()
    assert world.core.gpu.chunks == 0


@pytest.mark.parametrize(
    "body",
    [
        wire.OnGpu(False, [b"short"], []),
        wire.OnGpu(False, [], [b"short"]),
        wire.OnGpu(False, [make_key(bytes(32), 5)], []),
        wire.OnGpu(False, [key(1)] * 40_000, [key(2)] * 40_000),
    ],
    ids=["key", "removed", "group", "many"],
)
def test_what_cannot_be_is_refused_and_leaves_no_trace(clock, body) -> None:
    world = World(clock)
    world.attach(b"c")
    assert isinstance(world.say(b"c", body), wire.Refused)
    assert world.core.gpu.chunks == 0


def test_what_has_no_room_is_not_announced() -> None:
    book = GpuBook(chunks_max=3)

    def tell(client: str, stored, removed=(), *, whole: bool = False) -> int:
        return book.tell(
            client,
            NAMESPACE,
            whole=whole,
            stored=[key(n) for n in stored],
            removed=[key(n) for n in removed],
        )

    assert tell("c", [1, 2]) == 0
    assert tell("d", [1, 2, 3]) == 2
    book.check()
    assert tell("c", [4], [1]) == 0
    assert tell("d", [], [2, 3]) == 0
    assert [(key_low64(one.key), one.removed) for one in book.take_changes()] == [
        (1, False),
        (2, False),
        (1, False),
        (1, True),
        (4, False),
    ]
    assert tell("d", [1, 5, 6], whole=True) == 2
    book.leave("c")
    assert tell("d", [1, 5, 6], whole=True) == 0
    assert book.chunks == 3
    book.check()
    book.chunks = 4
    with pytest.raises(Conservation):
        book.check()


CHUNKS = st.lists(st.integers(0, 5), max_size=4)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from("cd"), st.booleans(), CHUNKS, CHUNKS),
        st.tuples(st.sampled_from("cd"), st.just(None)),
    ),
    max_size=30,
)


@given(STEPS, st.integers(1, 8))
def test_changes_add_up_to_what_is_resident(steps, chunks_max: int) -> None:
    book = GpuBook(chunks_max)
    held: Counter[int] = Counter()
    for client, whole, *lists in steps:
        if whole is None:
            book.leave(client)
        else:
            stored, removed = ([key(n) for n in each] for each in lists)
            book.tell(client, NAMESPACE, whole=whole, stored=stored, removed=removed)
        for change in book.take_changes():
            held[key_low64(change.key)] += -1 if change.removed else 1
        book.check()
        assert +held == Counter(key_low64(each) for _, each in book.residents())
        assert book.chunks <= chunks_max
