"""A pool's event log: numbers, order, heartbeats, replay as vLLM's, snapshots."""

import pytest

from kvfabric.fabric import events
from kvfabric.fabric.errors import ConfigError, Malformed
from kvfabric.fabric.events import SNAPSHOT_SEQ, BlockRemoved, BlockStored, EndOfReplay
from kvfabric.fabric.types import Medium, make_key
from kvfabric.tiers import event_log
from kvfabric.tiers.event_log import Change, EventLog, Resident


class FakeClock:
    """Time that moves when the test says so."""

    def __init__(self):
        self.time_s = 100.0

    def now_s(self):
        return self.time_s

    def unix_s(self):
        return self.time_s + 1_000_000

    def sleep_s(self, seconds):
        self.time_s += seconds


def key(number, group=0):
    return make_key(bytes(24) + number.to_bytes(8, "big"), group)


def stored(number, medium=Medium.CPU, group=0):
    return Change(key(number, group), medium, removed=False, chunk_tokens=256)


def removed(number, medium=Medium.CPU, group=0):
    return Change(key(number, group), medium, removed=True, chunk_tokens=256)


def make(clock=None, buffer_batches=4, **more):
    return EventLog("node-a", 3, buffer_batches, 1.0, clock or FakeClock(), **more)


def batch_of(frames):
    return events.decode_batch(events.parse_message(frames).payload)


def test_changes_become_events_in_order():
    log = make()
    (frames,) = log.append(
        [removed(9), stored(1), stored(2), stored(3, Medium.STORAGE), stored(4, group=1)]
    )
    assert frames[0] == b"kvfabric@node-a@3"
    assert events.parse_message(frames).seq == 0
    batch = batch_of(frames)
    assert batch.ts == 1_000_100
    assert batch.data_parallel_rank == 0
    assert batch.events == (
        BlockRemoved((9,), "CPU", 0),
        BlockStored((1, 2), None, (), 256, None, "CPU", None, group_idx=0),
        BlockStored((3,), None, (), 256, None, "STORAGE", None, group_idx=0),
        BlockStored((4,), None, (), 256, None, "CPU", None, group_idx=1),
    )
    assert log.append([]) == []
    assert log.next_seq == 1


def test_a_long_list_of_changes_is_cut(monkeypatch):
    monkeypatch.setattr(event_log, "BATCH_HASHES_MAX", 3)
    log = make()
    parts = log.append([stored(number) for number in range(7)])
    assert [len(batch_of(part).events[0].block_hashes) for part in parts] == [3, 3, 1]
    assert [events.parse_message(part).seq for part in parts] == [0, 1, 2]


def test_heartbeats_come_after_silence_and_take_numbers():
    clock = FakeClock()
    log = make(clock)
    assert not log.heartbeat_due(clock.now_s())
    clock.time_s += 1.0
    assert log.heartbeat_due(clock.now_s())
    beat = log.heartbeat()
    assert batch_of(beat).events == ()
    assert not log.heartbeat_due(clock.now_s())
    clock.time_s += 0.6
    (frames,) = log.append([stored(1)])
    assert events.parse_message(frames).seq == 1
    assert not log.heartbeat_due(clock.now_s() + 0.5)


def test_replay_is_vllms_protocol():
    log = make()
    sent = [log.append([stored(number)])[0] for number in range(6)]
    assert log.replay(4) == [
        [b"", *sent[4]],
        [b"", *sent[5]],
        [b"", b"", b"\xff" * 8, b""],
    ]
    assert [events.parse_reply(r).seq for r in log.replay(0)[:-1]] == [2, 3, 4, 5]
    assert log.replay(6) == [[b"", b"", b"\xff" * 8, b""]]


def test_the_buffer_is_bounded_in_bytes():
    log = make(buffer_batches=1000, buffer_bytes_max=1000)
    for number in range(100):
        log.append([stored(number)])
    replies = log.replay(0)
    assert 1 < len(replies) < 12
    assert sum(len(reply[3]) for reply in replies) <= 1000


def test_snapshot_tells_everything_and_where_to_go_on():
    log = make()
    log.append([stored(1), stored(2)])
    manifest = [
        Resident(key(2), Medium.CPU, 256),
        Resident(key(1), Medium.CPU, 256),
        Resident(key(1), Medium.STORAGE, 256),
        Resident(key(1), Medium.STORAGE, 256),
        Resident(key(5, group=2), Medium.CPU, 64),
    ]
    reply, end = log.replay(SNAPSHOT_SEQ, manifest)
    message = events.parse_reply(reply)
    assert message.seq == SNAPSHOT_SEQ
    assert message.epoch == 3
    assert events.parse_reply(end) == EndOfReplay()
    snapshot = events.decode_snapshot(message.payload)
    assert snapshot == log.snapshot(manifest)
    assert (snapshot.node, snapshot.epoch, snapshot.next_seq) == ("node-a", 3, 1)
    assert [
        (part.group, part.medium, part.chunk_tokens, part.array().tolist())
        for part in snapshot.sections
    ] == [
        (0, "CPU", 256, [2, 1]),
        (0, "STORAGE", 256, [1, 1]),
        (2, "CPU", 64, [5]),
    ]


def test_manifest_is_not_read_for_a_replay():
    log = make()

    def manifest():
        raise AssertionError("read")
        yield

    log.replay(0, manifest())


def test_bad_settings_are_refused():
    with pytest.raises(ConfigError):
        make(buffer_batches=0)
    with pytest.raises(ConfigError):
        EventLog("n", 1, 1, 0.0, FakeClock())
    with pytest.raises(Malformed):
        EventLog("n@m", 1, 1, 1.0, FakeClock())
