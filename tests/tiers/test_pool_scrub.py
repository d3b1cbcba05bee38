"""The background check of adopted chunks."""

from concurrent.futures import Future

from kvfabric.fabric.checksum import checksum
from kvfabric.fabric.metrics import NullRecorder
from kvfabric.fabric.types import Lookup, NamespaceId, make_key
from kvfabric.tiers.pool.context import PoolContext
from kvfabric.tiers.pool.directory import Directory
from kvfabric.tiers.pool.scrub import SCRUB_BYTES_S, Scrubber
from kvfabric.tiers.pool.table import SlotTable, control_bytes, format_table

NAMESPACE = NamespaceId(bytes(16))
LENGTH = 4096


class Memory:
    def __init__(self, slots):
        self.bytes = bytearray(slots * LENGTH)

    def view(self, slot, length):
        return memoryview(self.bytes)[slot * LENGTH : slot * LENGTH + length]


class AtOnce:
    def submit(self, work, *arguments):
        future = Future()
        future.set_result(work(*arguments))
        return future


def keys(count):
    return [make_key(n.to_bytes(32, "big"), 0) for n in range(count)]


def stored(clock, count):
    control = bytearray(control_bytes(count))
    format_table(control, count, LENGTH, count * LENGTH, 1)
    directory = Directory(SlotTable(memoryview(control)), quarantine_slots_max=count)
    directory.adopt(lambda _pid, _started: False)
    memory = Memory(count)
    context = PoolContext(directory, memory, (1, 1), NullRecorder(), clock)
    directory.open_owner("w", 1e9, 1, 1, 0.0)
    got = directory.reserve("w", NAMESPACE, keys(count), range(count), [LENGTH] * count, 0.0)
    refs = [one.slot for one in got]
    sums = []
    for ref in refs:
        memory.view(ref.slot, LENGTH)[:] = bytes([ref.slot + 1]) * LENGTH
        sums.append(checksum(memory.view(ref.slot, LENGTH)))
    directory.commit("w", refs, sums, 0.0)
    return context, [chunk for _, chunk in directory.ready_chunks()]


def run(scrubber, clock):
    steps = 0
    while (due_s := scrubber.next_deadline_s()) < float("inf"):
        clock.advance_s(max(due_s - clock.now_s(), 0.0))
        scrubber.step()
        steps += 1
        assert steps < 1000


def found(context, count):
    return [context.directory.look(NAMESPACE, key) for key in keys(count)]


def test_only_corrupt_chunks_are_dropped(clock):
    context, chunks = stored(clock, 8)
    bad = chunks[3]
    context.memory.view(bad.slot.slot, LENGTH)[100] ^= 1
    run(Scrubber(context, AtOnce(), chunks), clock)
    dropped = [key for key in keys(8) if context.directory.look(NAMESPACE, key) is Lookup.MISS]
    assert dropped == [bad.key]
    context.directory.check()


def test_a_slot_that_was_used_again_meanwhile_is_left_alone(clock):
    context, chunks = stored(clock, 2)
    scrubber = Scrubber(context, AtOnce(), chunks)
    scrubber.step()
    context.directory.drop([chunks[0].slot, chunks[1].slot])
    context.directory.take_changes()
    got = context.directory.reserve("w", NAMESPACE, keys(2), range(2), [LENGTH] * 2, 0.0)
    context.directory.commit("w", [one.slot for one in got], [7, 7], 0.0)
    run(scrubber, clock)
    assert found(context, 2) == [Lookup.HIT] * 2


def test_the_rate_is_bounded(clock):
    context, chunks = stored(clock, 8)
    begun_s = clock.now_s()
    run(Scrubber(context, AtOnce(), chunks), clock)
    assert clock.now_s() - begun_s >= 8 * LENGTH / SCRUB_BYTES_S


def test_nothing_to_verify_is_never_due(clock):
    context, _ = stored(clock, 1)
    scrubber = Scrubber(context, AtOnce())
    assert scrubber.next_deadline_s() == float("inf")
    scrubber.step()
