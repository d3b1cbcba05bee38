"""The world itself: order, determinism, invariants, what a failure says."""

import os
import subprocess
import sys

import pytest

from kvfabric.fabric.errors import Unsupported
from kvfabric.fabric.types import NamespaceId
from kvfabric.tiers.simulation import (
    CALM,
    LocalClock,
    Stop,
    World,
    draw_knobs,
    seeds,
    true_bytes,
    true_key,
)

RANDOM_RUN = """
from kvfabric.tiers.simulation import *
world = World(7)
knobs = draw_knobs(world.fork("knobs"))
network = Network(world, knobs.link)
class Echo:
    def __init__(self, process):
        self.process = process
    def on_message(self, source, frame):
        if len(frame) < 8:
            self.process.send(source, frame + b"x")
    def tick(self):
        self.process.send("b" if self.process.name == "a" else "a", b"")
processes = [Process(world, network, name, Echo, knobs=knobs.process) for name in "ab"]
for process in processes:
    process.start()
Chaos(world, knobs, networks=[network], processes=processes).until(20.0)
world.run(30.0, 100_000)
network.check()
print(world.steps, world.trace.digest())
"""


def run_in_process(hash_seed: str) -> str:
    environ = dict(os.environ, PYTHONHASHSEED=hash_seed)
    answer = subprocess.run(
        [sys.executable, "-c", RANDOM_RUN], env=environ, capture_output=True, text=True, check=True
    )
    return answer.stdout


def test_events_run_in_order_of_time_then_of_planning():
    world, seen = World(1), []
    for delay_s, name in ((2.0, "c"), (1.0, "a"), (1.0, "b"), (3.0, "d")):
        world.at(delay_s, lambda name=name: seen.append((world.now_s(), name)))
    assert world.run(2.5, 100) is Stop.TIME
    assert seen == [(1.0, "a"), (1.0, "b"), (2.0, "c")]
    assert world.now_s() == 2.5
    assert world.run(10.0, 100) is Stop.IDLE


def test_a_cancelled_event_does_not_run():
    world, seen = World(1), []
    world.at(1.0, lambda: seen.append(1)).cancel()
    world.run(2.0, 10)
    assert seen == []
    assert world.steps == 0


def test_steps_are_bounded():
    world = World(1)

    def again():
        world.at(0.0, again)

    again()
    assert world.run(1.0, 50) is Stop.STEPS
    assert world.steps == 50


def test_sleeping_is_refused():
    world = World(1)
    for clock in (world, LocalClock(world, 5.0, 1.0)):
        with pytest.raises(Unsupported):
            clock.sleep_s(1.0)


def test_the_same_seed_does_the_same_in_two_processes():
    first, second = run_in_process("1"), run_in_process("2")
    assert first == second
    assert int(first.split()[0]) > 1000


def test_streams_of_different_names_do_not_shift_each_other():
    one, two = World(3), World(3)
    two.fork("other").random()
    assert one.fork("network").random() == two.fork("network").random()
    assert one.fork("network").random() != World(4).fork("network").random()


def test_a_failure_names_seed_step_time_and_the_last_lines():
    world = World(41)

    def broken():
        world.note("node", "about to break")
        raise ValueError("planted")

    world.at(1.5, broken)
    with pytest.raises(ValueError, match="planted") as caught:
        world.run(2.0, 10)
    note = "\n".join(caught.value.__notes__)
    for part in ("seed 41", "step 1", "1.500000 s", "KVFABRIC_SEED=41", "about to break"):
        assert part in note


def test_a_broken_invariant_fails_at_the_step_that_broke_it():
    world, values = World(1), []

    def invariant():
        assert len(values) < 3

    world.watch("short", invariant)
    for _ in range(5):
        world.at(1.0, lambda: values.append(1))
    with pytest.raises(AssertionError):
        world.run(2.0, 100)
    assert world.steps == 3


def test_a_failure_after_the_run_is_explained_too():
    with pytest.raises(AssertionError) as caught, World(9):
        raise AssertionError
    assert "seed 9" in caught.value.__notes__[0]


def test_the_trace_keeps_only_its_last_lines_and_digests_all():
    one, two = World(1, trace_lines_max=3), World(1, trace_lines_max=3)
    two.note("n", "first")
    for world in (one, two):
        for number in range(5):
            world.note("n", f"line {number}")
    assert one.trace.text() == two.trace.text()
    assert one.trace.text().count("\n") == 2
    assert one.trace.digest() != two.trace.digest()


def test_knobs_differ_between_seeds_and_each_kind_is_off_in_some():
    drawn = [draw_knobs(World(seed).fork("knobs")) for seed in range(40)]
    assert len(set(drawn)) == 40
    for off in (
        lambda k: k.link.loss_share,
        lambda k: k.disk.torn_share,
        lambda k: k.memory.hang_share,
        lambda k: k.process.kill_gap_s,
    ):
        assert {off(knobs) > 0 for knobs in drawn} == {True, False}
    assert CALM.text() == "calm"


def test_seeds_count_from_the_environment_or_from_the_first():
    assert seeds(3, {}) == (1, 2, 3)
    assert seeds(2, {}, first=10) == (10, 11)
    assert seeds(3, {"KVFABRIC_SEED": "77"}) == (77, 78, 79)


def test_true_bytes_are_golden():
    key = true_key(1)
    assert key.hex() == GOLDEN_KEY
    assert true_bytes(NamespaceId(bytes(16)), key, 8).hex() == GOLDEN_BYTES


GOLDEN_KEY = "9fd9aafd8fc901f50085de8268c2d63026dd8e35f89dd1e2bc151d7d20d0979600000000"
GOLDEN_BYTES = "53444c3374d51f6f"
