"""Network, processes, disk, remote memory: each does its faults, and nothing else."""

import pytest

from kvfabric.tiers.simulation import (
    Chaos,
    Disk,
    DiskKnobs,
    DiskOutcome,
    Knobs,
    LinkKnobs,
    Network,
    Process,
    ProcessKnobs,
    ProcessState,
    ReadState,
    RemoteMemory,
    RemoteMemoryKnobs,
    World,
)

STEPS_MAX = 100_000


class Diary:
    """A program that writes down what happens to it."""

    def __init__(self, process):
        self.process, self.frames, self.ticks = process, [], 0

    def on_message(self, source, frame):
        self.frames.append((source, bytes(frame)))

    def tick(self):
        self.ticks += 1


def two_nodes(link=None, process=None):
    world = World(5)
    network = Network(world, link or LinkKnobs())
    nodes = [Process(world, network, name, Diary, knobs=process) for name in ("a", "b")]
    for node in nodes:
        node.start()
    return world, network, *nodes


def test_frames_arrive_once_and_in_order_on_a_calm_link():
    world, network, a, b = two_nodes()
    for number in range(20):
        a.send("b", bytes([number]))
    world.run(1.0, STEPS_MAX)
    assert b.program.frames == [("a", bytes([number])) for number in range(20)]
    network.check()


def test_a_frame_is_copied_when_it_is_sent():
    world, _, a, b = two_nodes()
    frame = bytearray(b"before")
    a.send("b", frame)
    frame[:] = b"after!"
    world.run(1.0, STEPS_MAX)
    assert b.program.frames == [("a", b"before")]


def test_loss_duplication_and_reordering_happen():
    world, network, a, b = two_nodes(LinkKnobs(loss_share=0.2, duplicate_share=0.2, ordered=False))
    for number in range(200):
        a.send("b", bytes([number]))
    world.run(1.0, STEPS_MAX)
    got = [frame[0] for _, frame in b.program.frames]
    assert len(set(got)) < 200
    assert len(got) > len(set(got))
    assert got != sorted(got)
    assert network.counts.lost + network.counts.delivered == 200 + network.counts.duplicated
    network.check()


def test_an_ordered_link_stays_ordered_with_stragglers():
    world, _, a, b = two_nodes(LinkKnobs(straggler_share=0.3, straggler_s=1.0))
    for number in range(100):
        a.send("b", bytes([number]))
    world.run(1000.0, STEPS_MAX)
    assert [frame[0] for _, frame in b.program.frames] == list(range(100))


def test_a_partition_cuts_both_ways_until_it_heals():
    world, network, a, b = two_nodes()
    network.partition(["a"], ["b"])
    a.send("b", b"1")
    b.send("a", b"2")
    world.run(1.0, STEPS_MAX)
    assert a.program.frames == b.program.frames == []
    network.heal()
    a.send("b", b"3")
    world.run(2.0, STEPS_MAX)
    assert b.program.frames == [("a", b"3")]


def test_a_cut_is_one_way_and_takes_what_is_under_way():
    world, network, a, b = two_nodes()
    a.send("b", b"1")
    network.cut("a", "b")
    b.send("a", b"2")
    world.run(1.0, STEPS_MAX)
    assert b.program.frames == []
    assert a.program.frames == [("b", b"2")]
    network.check()


def test_a_kill_loses_memory_timers_and_inbox_and_keeps_shared_memory():
    world, _, a, b = two_nodes()
    seen = []
    b.shared_memory("region", 8)[:] = b"survives"
    b.at(1.0, lambda: seen.append("timer"))
    b.dma(1.0, lambda: seen.append("dma"))
    b.pause()
    a.send("b", b"unread")
    world.run(0.5, STEPS_MAX)
    old = b.program
    b.kill()
    a.send("b", b"to nobody")
    world.run(2.0, STEPS_MAX)
    b.start()
    world.run(4.0, STEPS_MAX)
    assert seen == []
    assert old.frames == b.program.frames == []
    assert b.program is not old
    assert b.program.ticks > 0
    assert bytes(b.shared_memory("region", 8)) == b"survives"
    assert b.epoch == 2
    assert b.is_gone(1)
    assert not b.is_gone(2)


def test_a_paused_process_acts_late_and_its_devices_do_not():
    world, _, a, b = two_nodes()
    seen = []
    b.at(1.0, lambda: seen.append(("timer", world.now_s())))
    b.dma(1.0, lambda: seen.append(("dma", world.now_s())))
    b.at(1.5, lambda: seen.append(("cancelled while overdue", world.now_s()))).cancel()
    b.pause()
    a.send("b", b"waits")
    world.run(5.0, STEPS_MAX)
    assert seen == [("dma", 1.0)]
    assert b.program.frames == []
    b.resume()
    world.run(5.0, STEPS_MAX)
    assert seen[1:] == [("timer", 5.0)]
    assert b.program.frames == [("a", b"waits")]


def test_an_overdue_timer_can_still_be_cancelled():
    world, _, _, b = two_nodes()
    seen = []
    timer = b.at(1.0, lambda: seen.append(1))
    b.pause()
    world.run(2.0, STEPS_MAX)
    timer.cancel()
    b.resume()
    world.run(3.0, STEPS_MAX)
    assert seen == []


def test_clocks_of_processes_differ_and_go_forward():
    world, _, a, b = two_nodes(process=ProcessKnobs(drift=0.01))
    assert abs(a.clock.now_s() - b.clock.now_s()) > 1.0
    before_s = a.clock.now_s()
    world.run(100.0, STEPS_MAX)
    assert 98.9 < a.clock.now_s() - before_s < 101.1
    assert abs(a.clock.unix_s() - world.unix_s()) < 2.0


def disk_of(knobs, capacity_bytes=1 << 20):
    world = World(3)
    return world, Disk(world, knobs, capacity_bytes=capacity_bytes), []


def test_a_file_comes_back_as_it_was_written():
    world, disk, seen = disk_of(DiskKnobs(piece_bytes=3))
    disk.write("f", b"head", memoryview(b"payload!"), world, seen.append)
    world.run(1.0, STEPS_MAX)
    target = bytearray(8)
    disk.read("f", 4, memoryview(target), world, seen.append)
    disk.read("g", 0, memoryview(bytearray(1)), world, seen.append)
    world.run(2.0, STEPS_MAX)
    assert sorted(seen) == [DiskOutcome.DONE, DiskOutcome.DONE, DiskOutcome.ABSENT]
    assert target == b"payload!"
    assert disk.rename("f", "g") is DiskOutcome.DONE
    assert disk.names() == ["g"]
    disk.check()


def test_a_slot_reused_during_a_write_tears_the_file():
    world, disk, seen = disk_of(DiskKnobs(piece_bytes=4, delay_s=1.0))
    slot = bytearray(b"A" * 8)
    disk.write("f", b"", memoryview(slot), world, seen.append)
    while disk.size_bytes("f") == 0:
        world.run(world.now_s() + 0.01, STEPS_MAX)
    slot[:] = b"B" * 8
    world.run(10.0, STEPS_MAX)
    target = bytearray(8)
    disk.read("f", 0, memoryview(target), world, seen.append)
    world.run(20.0, STEPS_MAX)
    assert target == b"AAAABBBB"


@pytest.mark.parametrize(
    ("knobs", "outcome"),
    [
        (DiskKnobs(eio_share=1.0), DiskOutcome.EIO),
        (DiskKnobs(enospc_share=1.0), DiskOutcome.ENOSPC),
        (DiskKnobs(torn_share=1.0), DiskOutcome.DONE),
        (DiskKnobs(stall_share=1.0), DiskOutcome.DONE),
    ],
)
def test_disk_faults_of_a_write(knobs, outcome):
    world, disk, seen = disk_of(knobs)
    disk.write("f", b"h", memoryview(bytes(100)), world, seen.append)
    world.run(1000.0, STEPS_MAX)
    assert seen == [outcome]
    size_bytes = disk.size_bytes("f")
    whole = outcome is DiskOutcome.DONE and not knobs.torn_share
    assert (size_bytes == 101) is whole
    disk.check()


def test_calm_lets_stalled_transfers_begin_unless_their_owner_is_gone():
    world, _, a, b = two_nodes()
    disk = Disk(world, DiskKnobs(stall_share=1.0, stall_s=1e6))
    seen = []
    disk.write("a", b"", memoryview(b"data"), a, lambda outcome: seen.append(("a", outcome)))
    disk.write("b", b"", memoryview(b"data"), b, lambda outcome: seen.append(("b", outcome)))
    world.run(1.0, STEPS_MAX)
    a.kill()
    a.start()
    disk.calm()
    world.run(2.0, STEPS_MAX)
    assert seen == [("b", DiskOutcome.DONE)]
    assert disk.size_bytes("a") == 0


def test_a_full_disk_says_so_in_the_middle_too():
    world, disk, seen = disk_of(DiskKnobs(piece_bytes=10), capacity_bytes=150)
    disk.write("f", b"", memoryview(bytes(100)), world, seen.append)
    disk.write("g", b"", memoryview(bytes(100)), world, seen.append)
    world.run(10.0, STEPS_MAX)
    assert DiskOutcome.ENOSPC in seen
    assert len(seen) == 2
    disk.check()


def test_a_flip_changes_one_bit_for_good():
    world, disk, seen = disk_of(DiskKnobs(flip_share=1.0))
    disk.write("f", b"", memoryview(bytes(16)), world, seen.append)
    world.run(1.0, STEPS_MAX)
    target = bytearray(16)
    disk.read("f", 0, memoryview(target), world, seen.append)
    world.run(2.0, STEPS_MAX)
    assert sum(byte.bit_count() for byte in target) == 1


def test_a_writer_killed_in_the_middle_leaves_a_beginning_and_no_answer():
    world, network, a, _ = two_nodes()
    disk, seen = Disk(world, DiskKnobs(piece_bytes=1, delay_s=1.0)), []
    disk.write("f", b"", memoryview(bytes(64)), a, seen.append)
    world.run(3.0, STEPS_MAX)
    a.kill()
    world.run(100.0, STEPS_MAX)
    assert 0 < disk.size_bytes("f") < 64
    assert seen == []
    network.check()


def read_of(knobs, size_bytes=64):
    world, _, a, b = two_nodes()
    memory = RemoteMemory(world, knobs)
    region = a.shared_memory("region", size_bytes)
    region[:] = b"A" * size_bytes
    memory.publish(a, region)
    return world, memory, a, b, region, bytearray(size_bytes)


def test_a_read_copies_while_its_source_is_paused():
    world, memory, a, b, region, target = read_of(RemoteMemoryKnobs(piece_bytes=16))
    a.pause()
    read = memory.read(b, "a", 1, 0, memoryview(target))
    world.run(1.0, STEPS_MAX)
    assert read.state is ReadState.DONE
    assert target == region


def test_a_slot_reused_during_a_read_gives_torn_bytes():
    world, memory, _, b, region, target = read_of(
        RemoteMemoryKnobs(piece_bytes=16, piece_gap_s=1.0)
    )
    read = memory.read(b, "a", 1, 0, memoryview(target))
    while read.bytes_moved < 32:
        world.run(world.now_s() + 0.1, STEPS_MAX)
    region[:] = b"B" * 64
    world.run(20.0, STEPS_MAX)
    assert read.state is ReadState.DONE
    assert bytes(target) == b"A" * 32 + b"B" * 32


@pytest.mark.parametrize(
    ("knobs", "state"),
    [
        (RemoteMemoryKnobs(piece_bytes=16, piece_gap_s=1.0), ReadState.FAILED),
        (
            RemoteMemoryKnobs(piece_bytes=16, piece_gap_s=1.0, dead_hang_share=1.0),
            ReadState.RUNNING,
        ),
    ],
)
def test_a_read_whose_source_dies_fails_or_hangs(knobs, state):
    world, memory, a, b, _, target = read_of(knobs)
    read = memory.read(b, "a", 1, 0, memoryview(target))
    world.run(0.5, STEPS_MAX)
    a.kill()
    a.start()
    world.run(50.0, STEPS_MAX)
    assert read.state is state
    assert read.bytes_moved < 64
    read.cancel()
    world.run(60.0, STEPS_MAX)
    assert read.state is not ReadState.RUNNING


def test_reads_fail_and_hang_by_themselves():
    for knobs, state in (
        (RemoteMemoryKnobs(fail_share=1.0, piece_gap_s=100.0, piece_bytes=1), ReadState.FAILED),
        (RemoteMemoryKnobs(hang_share=1.0, piece_gap_s=100.0, piece_bytes=1), ReadState.RUNNING),
    ):
        world, memory, _, b, _, target = read_of(knobs)
        ended = []
        read = memory.read(b, "a", 1, 0, memoryview(target))
        read.done = lambda ended=ended: ended.append(1)
        world.run(10.0, STEPS_MAX)
        assert read.state is state
        assert len(ended) == (state is ReadState.FAILED)
        memory.calm()
        world.run(11.0, STEPS_MAX)
        assert (read.state, len(ended)) == (ReadState.FAILED, 1)


def test_a_cancelled_read_lands_a_little_longer_and_then_never():
    world, memory, _, b, _, target = read_of(
        RemoteMemoryKnobs(piece_bytes=1, piece_gap_s=0.001, delay_s=0.001)
    )
    read = memory.read(b, "a", 1, 0, memoryview(target))
    world.run(0.01, STEPS_MAX)
    read.cancel()
    assert read.state is ReadState.RUNNING
    while read.state is ReadState.RUNNING:
        world.run(world.now_s() + 0.001, STEPS_MAX)
    assert world.now_s() < 0.12
    moved, before = read.bytes_moved, bytes(target)
    world.run(5.0, STEPS_MAX)
    assert (read.bytes_moved, bytes(target)) == (moved, before)


def test_chaos_ends_with_everything_running_and_mended():
    acted = [run_chaos(seed) for seed in range(1, 6)]
    assert all(sum(kind) > 0 for kind in zip(*acted, strict=True))


def run_chaos(seed):
    knobs = Knobs(
        link=LinkKnobs(partition_gap_s=0.5, partition_s=100.0),
        process=ProcessKnobs(kill_gap_s=1.0, down_s=9.0, pause_gap_s=1.0, pause_s=90.0),
    )
    with World(seed) as world:
        network = Network(world, knobs.link)
        processes = [Process(world, network, name, Diary) for name in "abc"]
        for process in processes:
            process.start()
        chaos = Chaos(world, knobs, networks=[network], processes=processes)
        chaos.until(20.0)
        world.run(21.0, STEPS_MAX)
        assert {process.state for process in processes} == {ProcessState.RUNNING}
        processes[0].send("b", b"mended")
        world.run(22.0, STEPS_MAX)
        assert ("a", b"mended") in processes[1].program.frames
        acts = chaos.kills, chaos.pauses, chaos.partitions
        world.run(200.0, STEPS_MAX)
        assert acts == (chaos.kills, chaos.pauses, chaos.partitions)
        return acts
