"""Frames in, index out: a pool's log through a feed, and a real engine's captured stream."""

import collections
import struct
from pathlib import Path

import msgspec
import pytest

from kvfabric.fabric import events
from kvfabric.fabric.events import (
    SNAPSHOT_SEQ,
    AllBlocksCleared,
    BlockStored,
    EndOfReplay,
    EventBatch,
    format_topic,
)
from kvfabric.fabric.replay_log import ReplayLog
from kvfabric.fabric.types import Medium, make_key
from kvfabric.router.feed import EventCodec, Feed
from kvfabric.router.index import PrefixIndex
from kvfabric.router.stream import AskReplay, AskSnapshot, StreamTimes
from kvfabric.tiers.event_log import Change, EventLog, Resident

CAPTURES = sorted((Path(__file__).parents[1] / "golden" / "vllm_events").glob("*.bin"))
TIMES = StreamTimes()


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


class Pool:
    """A pool's directory and log, as the pool process keeps them."""

    def __init__(self, clock, node="a", epoch=1, held=()):
        self.log = EventLog(node, epoch, 4, 1.0, clock)
        self.clock = clock
        self.held = set(held)

    def change(self, number, medium=Medium.CPU):
        self.clock.time_s += 0.01
        key = make_key(bytes(24) + number.to_bytes(8, "big"), 0)
        entry = (key, medium)
        self.held ^= {entry}
        change = Change(key, medium, removed=entry not in self.held, chunk_tokens=16)
        return self.log.append([change])[0]

    def answer(self, request):
        start = SNAPSHOT_SEQ if isinstance(request, AskSnapshot) else request.start_seq
        return self.log.replay(start, [Resident(key, medium, 16) for key, medium in self.held])


def serve(pool, feed, requests):
    """Carry requests and answers until nothing is asked any more."""
    for _ in range(50):
        if not requests:
            return
        more = []
        for request in requests:
            for reply in pool.answer(request):
                more += feed.on_reply(reply, pool.clock.now_s())
                if any(one.fresh for one in more):
                    break  # A new connection: what the old one still brings is lost.
        requests = more
    raise AssertionError("the feed asks without end")


def follow(pool):
    index = PrefixIndex()
    feed = Feed("a", EventCodec(), index, TIMES)
    serve(pool, feed, feed.start(pool.clock.now_s()))
    return index, feed


def truth(pool):
    found = collections.defaultdict(set)
    for key, medium in pool.held:
        found[medium.name].add(int.from_bytes(key[24:32], "big"))
    return dict(found)


def known(index):
    return {part.medium: set(part.array().tolist()) for part in index.dump("a")}


def test_a_pool_is_followed_through_loss_restart_and_rubbish():
    pool = Pool(FakeClock())
    for number in range(5):
        pool.change(number)
    index, feed = follow(pool)
    assert feed.stream.trusted
    assert known(index) == truth(pool) == {"CPU": {0, 1, 2, 3, 4}}
    serve(pool, feed, feed.on_live(pool.change(5, Medium.STORAGE), 100.0))
    assert known(index) == truth(pool)
    pool.change(2)
    serve(pool, feed, feed.on_live(pool.change(3), 100.0))
    assert known(index) == truth(pool)
    for number in range(40, 60):
        pool.change(number)
    pool.clock.time_s += 10
    serve(pool, feed, feed.on_live(pool.log.heartbeat(), pool.clock.now_s()))
    assert known(index) == truth(pool)
    assert index.trusted("a")

    adopted = Pool(pool.clock, epoch=2, held=pool.held)
    pool.clock.time_s += 10
    requests = feed.on_live(adopted.change(77), pool.clock.now_s())
    assert not index.trusted("a")
    assert known(index) == {}
    serve(adopted, feed, requests)
    assert known(index) == truth(adopted)
    assert index.trusted("a")

    pool.clock.time_s += 10
    good = adopted.change(78)
    requests = feed.on_live([good[0], good[1], b"rubbish"], pool.clock.now_s())
    assert not index.trusted("a")
    serve(adopted, feed, requests)
    assert known(index) == truth(adopted)
    assert index.trusted("a")
    assert feed.malformed == 1
    index.check()


def test_rubbish_of_every_kind_is_counted_and_harmless():
    pool = Pool(FakeClock())
    index, feed = follow(pool)
    pool.clock.time_s += 10
    for frames in ([], [b"t"], [b"\xff", bytes(8), b""]):
        feed.on_live(frames, pool.clock.now_s())
    feed.on_reply([b"x"], pool.clock.now_s())
    feed.on_reply([b"", b"t", struct.pack(">Q", SNAPSHOT_SEQ), b"?"], pool.clock.now_s())
    assert feed.malformed == 5
    assert not index.trusted("a")
    pool.clock.time_s += 10
    for _ in range(3):
        pool.clock.time_s += 2
        serve(pool, feed, feed.tick(pool.clock.now_s()))
    assert index.trusted("a")


def test_silence_is_probed_and_answered():
    pool = Pool(FakeClock())
    index, feed = follow(pool)
    pool.change(9)
    requests = feed.tick(pool.clock.now_s() + TIMES.silence_s)
    assert requests == [AskReplay("a", 0, fresh=False)]
    serve(pool, feed, requests)
    assert known(index) == truth(pool)


def records(path):
    data = path.read_bytes()
    frames, at = [], 0
    while at < len(data):
        (length,) = struct.unpack_from(">I", data, at)
        frames.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    step = 4 if "replay" in path.name else 3
    return [frames[i : i + step] for i in range(0, len(frames), step)]


def engine(path, feed):
    """Play a capture into a feed as an engine without snapshots would."""
    requests = feed.start(0.0)
    end = [b"", b"", b"\xff" * 8, b""]
    messages = records(path)
    if "replay" in path.name:
        assert requests == [AskSnapshot("a", fresh=False)]
        assert feed.on_reply(end, 0.0) == [AskReplay("a", 0, fresh=False)]
        for frames in messages:
            assert feed.on_reply(frames, 0.0) == []
        return
    feed.on_reply(end, 0.0)
    for frames in messages:
        feed.on_live(frames, 0.0)
    feed.on_reply(end, 0.0)


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.stem)
def test_captures_lead_to_what_a_plain_count_says(path):
    count = collections.Counter()
    for frames in records(path):
        if frames[-1] == b"":
            continue
        for event in events.decode_batch(frames[-1]).events:
            if isinstance(event, AllBlocksCleared):
                for key in [key for key in count if key[0] == "GPU"]:
                    del count[key]
                continue
            for value in events.hashes_low64(event.block_hashes):
                key = (event.medium, event.group_idx or 0, value)
                count[key] = max(count[key] + (1 if isinstance(event, BlockStored) else -1), 0)
    index = PrefixIndex()
    feed = Feed("a", EventCodec(), index, TIMES)
    engine(path, feed)
    assert feed.malformed == 0
    assert index.trusted("a")
    found = collections.Counter()
    for part in index.dump("a"):
        for value in part.array().tolist():
            found[part.medium, part.group, value] += 1
    assert found == +count
    index.check()


def test_the_old_encoding_is_followed_too():
    index = PrefixIndex()
    feed = Feed("a", EventCodec(), index, TIMES)
    feed.start(0.0)
    end = [b"", b"", b"\xff" * 8, b""]
    feed.on_reply(end, 0.0)
    feed.on_reply(end, 0.0)
    payload = events.encode_batch(EventBatch(1.0, (), None))
    log = ReplayLog(b"kv@engine", 4, 1000)
    stored = [1.0, [["BlockStored", [5, 6], None, [1] * 32, 16, None]]]
    feed.on_live(log.append(msgspec.msgpack.encode(stored)), 0.0)
    feed.on_live(log.append(payload), 0.0)
    assert index.spans([5, 6])[0].holders == {"a": Medium.GPU}
    assert format_topic("n", 1) == b"kvfabric@n@1"
    assert isinstance(events.parse_reply(end), EndOfReplay)
