"""Stream repair: each rung of the ladder, and a seeded hostile network against the truth."""

import random

import pytest

from kvfabric.router.stream import (
    PENDING_MAX,
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

TIMES = StreamTimes(silence_s=2.5, answer_s=1.0, backoff_max_s=4.0)


def whole(epoch=1, next_seq=0, ts=1.0, now_s=0.0):
    """A stream that has its snapshot and is trusted."""
    stream = SourceStream("a", TIMES)
    assert stream.start(now_s) == [AskSnapshot("a", fresh=False)]
    assert stream.on_snapshot(epoch, next_seq, ts, "snap", now_s) == [Load("a", "snap")]
    assert stream.on_end(now_s) == [Trust("a")]
    return stream


def foreign(now_s=0.0):
    """A stream of a publisher without epochs and snapshots, trusted, still at 0."""
    stream = SourceStream("v", TIMES)
    stream.start(now_s)
    assert stream.on_end(now_s) == [Drop("v"), AskReplay("v", 0, fresh=False)]
    assert stream.on_end(now_s) == [Trust("v")]
    return stream


def test_batches_in_order_are_applied():
    stream = whole()
    assert stream.on_live(1, 0, 2.0, "b0", 0.1) == [Apply("a", "b0")]
    assert stream.on_live(1, 1, 3.0, "b1", 0.2) == [Apply("a", "b1")]
    assert stream.trusted


def test_live_batches_wait_for_the_snapshot():
    stream = SourceStream("a", TIMES)
    stream.start(0.0)
    for seq in (3, 4, 5):
        assert stream.on_live(1, seq, float(seq), f"b{seq}", 0.0) == []
    assert stream.on_snapshot(1, 5, 4.5, "snap", 0.0) == [Load("a", "snap"), Apply("a", "b5")]
    assert stream.on_end(0.0) == [Trust("a")]
    assert stream.expected == 6


def test_a_gap_is_closed_by_a_replay():
    stream = whole()
    stream.on_live(1, 0, 2.0, "b0", 0.0)
    assert stream.on_live(1, 2, 4.0, "b2", 0.0) == [Distrust("a"), AskReplay("a", 0, fresh=False)]
    assert stream.on_live(1, 3, 5.0, "b3", 0.0) == []
    assert stream.on_replayed(1, 0, 2.0, "b0", 0.0) == []
    assert stream.on_replayed(1, 1, 3.0, "b1", 0.0) == [
        Apply("a", "b1"), Apply("a", "b2"), Apply("a", "b3"),
    ]  # fmt: skip
    assert stream.on_replayed(1, 2, 4.0, "b2", 0.0) == []
    assert stream.on_end(0.0) == [Trust("a")]


def test_beyond_the_buffer_comes_the_snapshot():
    stream = whole(now_s=-5.0)
    stream.on_live(1, 9, 9.0, "b9", 0.0)
    assert stream.on_replayed(1, 8, 8.0, "b8", 0.0) == [AskSnapshot("a", fresh=True)]
    assert stream.on_snapshot(1, 9, 8.5, "snap", 0.0) == [Load("a", "snap"), Apply("a", "b9")]
    assert stream.on_end(0.0) == [Trust("a")]


def test_an_empty_replay_of_a_gap_leads_to_the_snapshot():
    stream = whole(now_s=-5.0)
    stream.on_live(1, 9, 9.0, "b9", 0.0)
    assert stream.on_end(0.0) == [AskSnapshot("a", fresh=False)]


def test_snapshots_are_not_asked_faster_than_they_can_come():
    stream = whole(now_s=0.0)
    stream.on_live(1, 9, 9.0, "b9", 0.1)
    assert stream.on_end(0.1) == []
    assert stream.tick(0.5) == []
    assert stream.tick(1.0) == [AskSnapshot("a", fresh=False)]


def test_without_snapshots_the_stream_begins_anew_where_the_buffer_begins():
    stream = foreign(now_s=-5.0)
    assert stream.on_live(0, 0, 1.0, "b0", 0.0) == [Apply("v", "b0")]
    assert stream.on_live(0, 5, 6.0, "b5", 0.0) == [Distrust("v"), AskReplay("v", 0, fresh=False)]
    assert stream.on_replayed(0, 4, 5.0, "b4", 0.0) == [
        Drop("v"), AskReplay("v", 0, fresh=True),
    ]  # fmt: skip
    assert stream.on_replayed(0, 4, 5.0, "b4", 0.0) == [Apply("v", "b4"), Apply("v", "b5")]
    assert stream.on_end(0.0) == [Trust("v")]


def test_joining_a_stream_without_snapshots_late():
    stream = SourceStream("v", TIMES)
    stream.start(0.0)
    stream.on_live(0, 7, 7.0, "b7", 0.0)
    assert stream.on_end(0.0) == [Drop("v"), AskReplay("v", 0, fresh=False)]
    assert stream.on_end(0.0) == [Apply("v", "b7"), Trust("v")]


def test_an_end_without_its_snapshot_does_not_make_a_pool_one_without_snapshots():
    stream = SourceStream("a", TIMES)
    stream.start(0.0)
    stream.on_live(1, 7, 7.0, "b7", 0.0)
    assert stream.on_end(0.0) == []
    assert stream.tick(0.5) == []
    assert stream.tick(1.0) == [AskSnapshot("a", fresh=True)]
    assert stream.on_snapshot(1, 7, 6.5, "snap", 1.1) == [Load("a", "snap"), Apply("a", "b7")]
    assert stream.on_end(1.1) == [Trust("a")]


def test_an_unreadable_snapshot_is_asked_again():
    stream = whole()
    assert stream.on_malformed(5.0) == [Distrust("a"), AskSnapshot("a", fresh=False)]
    assert stream.on_malformed(5.1) == []
    assert stream.on_end(5.1) == []
    assert stream.tick(6.0) == [AskSnapshot("a", fresh=True)]


def test_a_publisher_thought_to_have_no_snapshots_is_asked_when_it_shows_an_epoch():
    stream = foreign()
    assert stream.on_live(3, 9, 9.0, "b9", 5.0) == [
        Distrust("v"), AskSnapshot("v", fresh=False),
    ]  # fmt: skip
    assert stream.on_snapshot(3, 9, 8.0, "snap", 5.1) == [Load("v", "snap"), Apply("v", "b9")]
    assert stream.on_end(5.1) == [Trust("v")]


def test_a_replay_that_shows_an_epoch_leads_to_the_snapshot():
    stream = SourceStream("v", TIMES)
    stream.start(0.0)
    assert stream.on_end(0.0) == [Drop("v"), AskReplay("v", 0, fresh=False)]
    stream.on_replayed(3, 4, 4.0, "b4", 0.1)
    assert Trust("v") not in stream.on_end(0.2)
    assert stream.tick(1.1) == [AskSnapshot("v", fresh=False)]


def test_a_new_epoch_is_a_restart():
    stream = whole(epoch=1)
    stream.on_live(1, 0, 2.0, "b0", 0.0)
    assert stream.on_live(2, 0, 3.0, "n0", 0.0) == [
        Distrust("a"), Drop("a"), AskSnapshot("a", fresh=False),
    ]  # fmt: skip
    assert stream.on_live(1, 1, 2.5, "late of the old epoch", 0.0) == []
    assert stream.on_snapshot(1, 2, 2.6, "old snap", 0.0) == []
    assert stream.on_end(0.0) == []
    assert stream.tick(1.0) == [AskSnapshot("a", fresh=True)]
    assert stream.on_snapshot(2, 0, 3.5, "snap", 1.0) == [Load("a", "snap"), Apply("a", "n0")]
    assert stream.on_end(1.0) == [Trust("a")]
    assert stream.epoch == 2


def test_an_epoch_that_shrinks_is_believed_if_it_is_newer():
    stream = whole(epoch=9, ts=1.0)
    assert Drop("a") in stream.on_live(1, 0, 2.0, "n0", 0.0)
    assert stream.epoch == 1


def test_a_restart_seen_only_by_the_probe():
    stream = whole(epoch=1)
    assert stream.tick(2.5) == [AskReplay("a", 0, fresh=False)]
    assert stream.on_replayed(2, 0, 5.0, "n0", 2.6) == [
        Distrust("a"), Drop("a"), AskSnapshot("a", fresh=True),
    ]  # fmt: skip


def test_a_number_that_goes_back_is_a_restart_where_there_is_no_epoch():
    stream = foreign()
    for seq in range(4):
        stream.on_live(0, seq, float(seq), f"b{seq}", 0.0)
    assert stream.on_live(0, 2, 2.0, "doubled", 0.0) == []
    assert stream.on_live(0, 0, 9.0, "n0", 0.0) == [
        Distrust("v"), Drop("v"), AskReplay("v", 0, fresh=False),
    ]  # fmt: skip
    assert stream.on_replayed(0, 0, 9.0, "n0", 0.0) == [Apply("v", "n0")]
    assert stream.on_end(0.0) == [Trust("v")]


def test_a_restart_whose_numbers_overtook_ours_is_recognised():
    stream = foreign()
    for seq in range(4):
        stream.on_live(0, seq, 1.0 + seq, f"b{seq}", 0.0)
    assert stream.on_live(0, 6, 90.0, "n6", 0.0) == [Distrust("v"), AskReplay("v", 3, fresh=False)]
    assert stream.on_replayed(0, 3, 87.0, "n3", 0.0) == [Drop("v"), AskReplay("v", 0, fresh=True)]


def test_late_and_doubled_messages_are_ignored():
    stream = whole(next_seq=5, ts=5.0)
    assert stream.on_live(1, 3, 3.0, "published before the snapshot", 0.0) == []
    stream.on_live(1, 5, 6.0, "b5", 0.0)
    assert stream.on_live(1, 5, 6.0, "b5", 0.0) == []
    assert stream.on_snapshot(1, 0, 1.0, "nobody asked", 0.0) == []
    assert stream.on_replayed(1, 6, 7.0, "nobody asked", 0.0) == []
    assert stream.on_end(0.0) == []
    assert stream.trusted
    assert stream.counts.ignored == 3
    assert stream.expected == 6
    assert Drop("a") in stream.on_live(1, 0, 99.0, "an epoch used twice", 0.0)


def test_a_heartbeat_reveals_a_lost_last_message():
    stream = whole()
    stream.on_live(1, 0, 1.0, "b0", 0.0)
    assert stream.on_live(1, 2, 3.0, "heartbeat", 1.0) == [
        Distrust("a"), AskReplay("a", 0, fresh=False),
    ]  # fmt: skip


def test_silence_is_probed_and_a_dead_source_loses_trust_and_is_asked_ever_less_often():
    stream = whole(now_s=0.0)
    assert stream.tick(2.4) == []
    assert stream.tick(2.5) == [AskReplay("a", 0, fresh=False)]
    assert stream.trusted
    assert stream.tick(3.4) == []
    assert stream.tick(3.5) == [Distrust("a"), AskReplay("a", 0, fresh=True)]
    asked = [now for now in range(4, 40) if stream.tick(float(now))]
    assert asked == [6, 10, 14, 18, 22, 26, 30, 34, 38]
    assert stream.on_end(40.0) == [Trust("a")]
    assert stream.tick(42.5) == [AskReplay("a", 0, fresh=False)]
    assert stream.on_end(42.6) == []
    assert stream.trusted


def test_a_gap_during_a_probe_is_asked_again():
    stream = whole()
    stream.tick(2.5)
    assert stream.on_live(1, 1, 3.0, "b1", 2.6) == [Distrust("a")]
    assert stream.on_end(2.7) == [AskReplay("a", 0, fresh=False)]
    assert stream.on_replayed(1, 0, 2.0, "b0", 2.8) == [Apply("a", "b0"), Apply("a", "b1")]
    assert stream.on_end(2.8) == [Trust("a")]


def test_live_batches_are_applied_during_a_probe():
    stream = whole()
    stream.tick(2.5)
    assert stream.on_live(1, 0, 2.0, "b0", 2.6) == [Apply("a", "b0")]
    assert stream.on_replayed(1, 0, 2.0, "b0", 2.7) == []
    assert stream.on_end(2.7) == []
    assert stream.trusted


def test_an_unreadable_message_is_made_up_for_by_a_snapshot_and_only_so_often():
    stream = whole(now_s=0.0)
    assert stream.on_malformed(5.0) == [Distrust("a"), AskSnapshot("a", fresh=False)]
    assert stream.on_malformed(5.1) == []
    stream.on_snapshot(1, 3, 6.0, "snap", 5.2)
    assert stream.on_end(5.2) == []
    assert stream.tick(5.9) == []
    assert stream.tick(6.0) == [AskSnapshot("a", fresh=False)]
    stream.on_snapshot(1, 3, 7.0, "snap", 6.1)
    assert stream.on_end(6.1) == [Trust("a")]
    assert foreign().on_malformed(0.0) == []


def test_what_waits_is_bounded():
    stream = whole()
    for seq in range(1, PENDING_MAX + 100):
        stream.on_live(1, seq, float(seq), seq, 0.0)
    assert stream.counts.overflows == 99
    assert [a.batch for a in stream.on_replayed(1, 0, 0.5, 0, 0.0)] == [0]
    for seq in range(1, 100):
        stream.on_replayed(1, seq, float(seq), seq, 0.0)
    assert stream.on_end(0.0) == [Trust("a")]
    assert stream.expected == PENDING_MAX + 100


class Publisher:
    """The truth: a set of numbers that changes, numbered, buffered, sometimes restarted."""

    def __init__(self, rng, *, has_epochs, buffer):
        self.rng = rng
        self.has_epochs = has_epochs
        self.buffer = buffer
        self.epoch = 1 if has_epochs else 0
        self.held = set()
        self.log = []

    def step(self, now_s):
        change = self.rng.randrange(12)
        self.held ^= {change}
        return self._log((change, change in self.held), now_s)

    def heartbeat(self, now_s):
        return self._log(None, now_s)

    def restart(self):
        """A pool adopts what it held; an engine loses it."""
        if self.has_epochs:
            self.epoch += 1
        else:
            self.held = set()
        self.log = []

    def replay(self, start):
        return [m for m in self.log[-self.buffer :] if m[1] >= start]

    def _log(self, batch, now_s):
        self.log.append((self.epoch, len(self.log), now_s, batch))
        return self.log[-1]


class Network:
    """Virtual time: loses, doubles and delays live messages; requests and answers get lost."""

    def __init__(self, seed, *, has_epochs):
        self.rng = random.Random(seed)
        self.publisher = Publisher(self.rng, has_epochs=has_epochs, buffer=6)
        self.stream = SourceStream("s", TIMES)
        self.model = set()
        self.now_s = 1.0
        self.calls = []
        self.number = 0
        self.connection = 0
        self.hostile = True
        self.obey(self.stream.start(self.now_s))

    def later(self, delay_s, call):
        self.number += 1
        self.calls.append((self.now_s + delay_s, self.number, call))

    def chance(self, share):
        return self.hostile and self.rng.random() < share

    def obey(self, actions):
        for action in actions:
            match action:
                case Apply(batch=None):
                    pass
                case Apply(batch=(number, present)):
                    (self.model.add if present else self.model.discard)(number)
                case Load(snapshot=snapshot):
                    self.model = set(snapshot)
                case Drop():
                    self.model = set()
                case AskReplay(start_seq=start, fresh=fresh):
                    self.ask(fresh, lambda start=start: self.publisher.replay(start))
                case AskSnapshot(fresh=fresh):
                    self.ask(fresh, self.snapshot)
                case _:
                    pass

    def snapshot(self):
        publisher = self.publisher
        if not publisher.has_epochs:
            return []
        return [(publisher.epoch, len(publisher.log), self.now_s, frozenset(publisher.held))]

    def ask(self, fresh, answer):
        self.connection += fresh
        connection = self.connection
        is_snapshot = answer == self.snapshot
        if self.chance(0.1):
            return

        def arrive():
            messages = answer()
            for index, message in enumerate(messages):
                # A full queue drops what comes late, so the first of a replay arrives if any does.
                if (is_snapshot or index) and self.chance(0.1):
                    continue
                self.later(0.05 + index * 1e-4, lambda m=message: deliver(m))
            if not self.chance(0.1):
                self.later(0.06, lambda: self.only(connection, self.stream.on_end))

        def deliver(message):
            how = self.stream.on_snapshot if is_snapshot else self.stream.on_replayed
            self.only(connection, how, *message)

        self.later(0.05, arrive)

    def only(self, connection, how, *message):
        if connection == self.connection:
            self.obey(how(*message, self.now_s))

    def send(self, message):
        if self.chance(0.1):
            return
        for _ in range(1 + self.chance(0.05)):
            delay = 0.01 + (self.rng.random() * 0.4 if self.chance(0.1) else 0.0)
            self.later(delay, lambda: self.obey(self.stream.on_live(*message, self.now_s)))

    def run(self, seconds, step):
        end = self.now_s + seconds
        while self.now_s < end:
            self.now_s += 0.05
            due = sorted(call for call in self.calls if call[0] <= self.now_s)
            self.calls = [call for call in self.calls if call[0] > self.now_s]
            for _, _, call in due:
                call()
            step()
            self.obey(self.stream.tick(self.now_s))

    def busy(self):
        if self.rng.random() < 0.6:
            self.send(self.publisher.step(self.now_s))
        if self.rng.random() < 0.01:
            self.publisher.restart()

    def quiet(self):
        if self.publisher.has_epochs and int(self.now_s / 0.05) % 20 == 0:
            self.send(self.publisher.heartbeat(self.now_s))


@pytest.mark.parametrize("has_epochs", [True, False], ids=["pool", "engine"])
@pytest.mark.parametrize("seed", range(25))
def test_after_a_hostile_time_the_model_equals_the_truth(seed, has_epochs):
    net = Network(seed, has_epochs=has_epochs)
    for _ in range(4):
        net.hostile = True
        net.run(5.0, net.busy)
        net.hostile = False
        net.send(net.publisher.step(net.now_s))
        net.run(12.0, net.quiet)
        assert net.stream.trusted
        if has_epochs:
            assert net.model == net.publisher.held
        else:
            # Whoever lost more than the buffer holds may know less than the truth, never more.
            assert net.model <= net.publisher.held
    assert net.stream.counts.gaps + net.stream.counts.restarts > 0
