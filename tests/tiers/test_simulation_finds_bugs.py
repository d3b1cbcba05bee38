"""The harness finds planted bugs within a few seeds, and passes the same protocols without them.

Three toys, each with the kind of mistake that a fabric makes: acting twice on a duplicated frame,
trusting bytes that a remote read brought without a checksum, and having no deadline.
"""

import pytest

from kvfabric.fabric.checksum import checksum
from kvfabric.fabric.errors import Corrupt
from kvfabric.fabric.types import NamespaceId
from kvfabric.tiers.simulation import (
    Chaos,
    Network,
    Overdue,
    Process,
    ReadState,
    Recorder,
    RemoteMemory,
    World,
    draw_knobs,
    true_bytes,
    true_checksum,
    true_key,
)

SEEDS = range(1, 9)
STEPS_MAX = 200_000
NAMESPACE = NamespaceId(b"n" * 16)
CHUNK_BYTES = 512
SLOTS = 4


def found_by(run, error):
    """Return the seeds whose run raises `error`, checking that each says its seed."""
    failures = {}
    for seed in SEEDS:
        try:
            run(seed)
        except error as caught:
            failures[seed] = caught.__notes__
    for seed, notes in failures.items():
        assert f"KVFABRIC_SEED={seed}" in "\n".join(notes)
    return list(failures)


class Counter:
    """Adds one per request; the careless one does not remember which requests it has done."""

    def __init__(self, process, *, careful):
        self.process, self.careful = process, careful
        self.total, self.done = 0, set()

    def on_message(self, source, frame):
        if not (self.careful and frame in self.done):
            self.done.add(frame)
            self.total += 1
        self.process.send(source, frame)

    def tick(self):
        pass


class Asker:
    """Repeats its request until it is answered, then makes the next."""

    def __init__(self, process):
        self.process, self.number = process, 0

    def on_message(self, source, frame):
        if int(frame) == self.number:
            self.number += 1

    def tick(self):
        self.process.send("counter", str(self.number).encode())


def run_counter(seed, *, careful):
    with World(seed) as world:
        network = Network(world, draw_knobs(world.fork("knobs")).link)
        counter = Process(world, network, "counter", lambda p: Counter(p, careful=careful))
        asker = Process(world, network, "asker", Asker)
        counter.start()
        asker.start()

        def at_most_one_ahead():
            assert counter.program.total <= asker.program.number + 1

        world.watch("at most one ahead", at_most_one_ahead)
        world.run(20.0, STEPS_MAX)
        assert asker.program.number > 10


def test_acting_twice_is_found():
    assert found_by(lambda seed: run_counter(seed, careful=False), AssertionError)
    assert not found_by(lambda seed: run_counter(seed, careful=True), AssertionError)


class Source:
    """Has chunks in slots and overwrites them all the time, without asking who reads."""

    def __init__(self, process, memory, recorder):
        self.random = process.world.fork("source")
        self.region = process.shared_memory("region", SLOTS * CHUNK_BYTES)
        self.recorder, self.keys = recorder, [0] * SLOTS
        for slot in range(SLOTS):
            self.fill(slot)
        memory.publish(process, self.region)

    def fill(self, slot):
        self.keys[slot] = self.random.randrange(100)
        key = true_key(self.keys[slot])
        start = slot * CHUNK_BYTES
        self.region[start : start + CHUNK_BYTES] = true_bytes(NAMESPACE, key, CHUNK_BYTES)
        self.recorder.commit(NAMESPACE, key)

    def on_message(self, source, frame):
        pass

    def tick(self):
        self.fill(self.random.randrange(SLOTS))


class Reader:
    """Reads a random slot and reports it; flags switch its checksum and its deadline off."""

    def __init__(self, process, memory, recorder, source, flags):
        self.process, self.memory, self.recorder = process, memory, recorder
        self.source, self.flags = source, flags
        self.random = process.world.fork(f"reader/{process.epoch}")
        self.read = None

    def on_message(self, source, frame):
        pass

    def tick(self):
        if self.read is not None:
            self.look()
        elif self.source.program is not None:
            self.begin()

    def begin(self):
        slot = self.random.randrange(SLOTS)
        self.key = true_key(self.source.program.keys[slot])
        self.target = bytearray(CHUNK_BYTES)
        self.request = self.recorder.begin("reader", 3.0)
        self.deadline_s = self.process.clock.now_s() + 2.0
        self.read = self.memory.read(
            self.process, "source", self.source.epoch, slot * CHUNK_BYTES, memoryview(self.target)
        )

    def look(self):
        if self.read.state is ReadState.DONE:
            right = checksum(self.target) == true_checksum(NAMESPACE, self.key, CHUNK_BYTES)
            if right or "no checksum" in self.flags:
                self.recorder.hit("reader", NAMESPACE, self.key, memoryview(self.target))
            else:
                self.recorder.refused += 1
            self.end()
        elif self.read.state is not ReadState.RUNNING:
            self.end()
        elif "no deadline" not in self.flags and self.process.clock.now_s() > self.deadline_s:
            self.read.cancel()

    def end(self):
        self.recorder.end(self.request)
        self.read = None


def run_reader(seed, *flags):
    with World(seed) as world:
        knobs = draw_knobs(world.fork("knobs"), chunk_bytes=CHUNK_BYTES)
        network, recorder = Network(world, knobs.link), Recorder(world)
        memory = RemoteMemory(world, knobs.memory)
        source = Process(world, network, "source", lambda p: Source(p, memory, recorder))
        reader = Process(
            world,
            network,
            "reader",
            lambda p: Reader(p, memory, recorder, source, flags),
            knobs=knobs.process,
        )
        source.start()
        reader.start()
        chaos = Chaos(world, knobs, networks=[network], processes=[source], memory=memory)
        chaos.until(40.0)
        world.watch("deadlines", recorder.check)
        world.run(50.0, STEPS_MAX)
        return recorder


def test_trusting_remote_bytes_is_found():
    assert found_by(lambda seed: run_reader(seed, "no checksum"), Corrupt)
    assert not found_by(run_reader, Corrupt)


def test_having_no_deadline_is_found():
    assert found_by(lambda seed: run_reader(seed, "no deadline"), Overdue)
    assert not found_by(run_reader, Overdue)


def test_the_careful_reader_hits_and_refuses():
    recorders = [run_reader(seed) for seed in SEEDS]
    assert all(recorder.hits > 0 for recorder in recorders)
    assert sum(recorder.refused for recorder in recorders) > 0


def test_the_recorder_refuses_what_was_never_committed():
    recorder, key = Recorder(World(1)), true_key(1)
    right = memoryview(true_bytes(NAMESPACE, key, CHUNK_BYTES))
    with pytest.raises(Corrupt, match="never committed"):
        recorder.hit("node", NAMESPACE, key, right)
    recorder.commit(NAMESPACE, key)
    recorder.hit("node", NAMESPACE, key, right)
    with pytest.raises(Corrupt, match="wrong bytes"):
        recorder.hit("node", NAMESPACE, key, memoryview(bytes(CHUNK_BYTES)))


def test_nobody_waits_for_the_requests_of_the_dead():
    world = World(1)
    recorder = Recorder(world)
    recorder.begin("a", 1.0)
    request = recorder.begin("b", 1.0)
    world.run(2.0, 10)
    recorder.end(request)
    with pytest.raises(Overdue, match="a#1"):
        recorder.check()
    recorder.abandon("a")
    recorder.check()
    assert (recorder.open, recorder.ended) == (0, 1)
