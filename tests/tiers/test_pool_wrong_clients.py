"""The core and clients that are wrong, early or many: they cost themselves and nobody else."""

import pytest
from pool_world import FIELDS, SLOT_BYTES, ScriptedPulls, World, key, source

from kvfabric.fabric import wire
from kvfabric.fabric.types import Committed, Lookup, Released


def test_who_leaves_before_it_was_answered_leaves_nothing(clock) -> None:
    world = World(clock)
    world.attach(b"c")
    world.say(b"c", wire.Detach(), epoch=0)  # its attach was answered too late for it to know
    assert not world.core.sessions
    assert world.directory.stats().owners == 0


def test_a_request_for_another_namespace_than_that_of_the_attach_is_refused(clock) -> None:
    world = World(clock)
    world.attach(b"c")
    world.store(b"c", [1])
    for body in (wire.Pin(bytes(16), [key(1)], 0.0, []), wire.Reserve(bytes(16), [key(2)], [0])):
        refused = world.say(b"c", body)
        assert isinstance(refused, wire.Refused)
        assert refused.field == "namespace_id"
    assert world.directory.stats().pinned == 0


@pytest.mark.parametrize(
    "groups",
    [
        [wire.GroupGeometry(0, 16, 64), wire.GroupGeometry(0, 16, 128)],
        [wire.GroupGeometry(0, 0, 64)],
        [wire.GroupGeometry(0, -16, 64)],
        [wire.GroupGeometry(-1, 16, 64)],
        [wire.GroupGeometry(1 << 32, 16, 64)],
        [wire.GroupGeometry(0, 1 << 40, 64)],
    ],
)
def test_groups_that_make_no_sense_are_refused_by_name(clock, groups) -> None:
    refused = World(clock).say(b"c", wire.Attach("c", 1, 1, FIELDS, groups))
    assert isinstance(refused, wire.Refused)
    assert "groups" in refused.field


def test_weights_may_change_for_ever(clock) -> None:
    world = World(clock)
    for version in range(200):
        answer = world.attach(b"c", weights_version=str(version))
        assert isinstance(answer, wire.Attached), (version, answer)
        world.store(b"c", [version])
    assert world.directory.stats().ready == 1
    late = world.attach(b"late", weights_version="198")
    assert isinstance(late, wire.Refused)
    assert late.field == "weights_version"
    assert len(world.core.namespaces.entries) <= 64


def test_models_beyond_the_bound_are_refused_and_disturb_nobody(clock) -> None:
    world = World(clock)
    answers = [world.attach(b"c%d" % n, model=f"m{n}") for n in range(65)]
    assert all(isinstance(answer, wire.Attached) for answer in answers[:64])
    assert isinstance(answers[64], wire.Refused)
    assert world.store(b"c0", [1]) == [0]


def test_more_sources_than_chunks_could_use_are_refused(clock) -> None:
    pulls = ScriptedPulls()
    world = World(clock, pulls=pulls)
    world.attach(b"c")
    everywhere = [source(f"n{n}", 0, 4) for n in range(wire.SOURCES_PER_CHUNK_MAX + 1)]
    refused = world.pin(b"c", [1, 2, 3, 4], 1.0, everywhere)
    assert isinstance(refused, wire.Refused)
    assert "sources" in refused.theirs
    single = [source(f"n{n % 2}", n, 1) for n in range(4)]
    assert world.pin(b"c", [1, 2, 3, 4], 1.0, single) is None
    assert len(pulls.asked) == 2
    assert world.pin(b"c", [9], 1.0, [source("n", 0, 1 << 62), source("o", -5, 3)]) is None


def test_a_waiter_that_was_answered_is_forgotten_though_the_writer_goes_on(clock) -> None:
    world = World(clock)
    world.attach(b"w")
    world.attach(b"r", pid=101)
    namespace = world.core.sessions[b"w"].namespace
    world.say(b"w", wire.Reserve(namespace, [key(1)], [0]))
    for _ in range(20):
        assert world.pin(b"r", [1], 0.5) is None
        clock.advance_s(0.3)
        world.say(b"w", wire.Renew())
        world.turn()
    (wanted,) = world.fetcher.fetches.wanted.values()
    assert len(wanted.waiting) <= 2


def test_answering_one_request_looks_at_its_own_chunks_only(clock) -> None:
    """A thousand requests time out at once: not a thousand times all chunks."""
    pulls = ScriptedPulls()
    world = World(clock, pulls=pulls)
    world.attach(b"c")
    looked = 0

    class Looked(dict):
        def items(self):
            nonlocal looked
            looked += len(self)
            return super().items()

        def values(self):
            nonlocal looked
            looked += len(self)
            return super().values()

    world.fetcher.fetches.wanted = Looked()
    for n in range(100):
        world.pin(b"c", [n * 10 + i for i in range(10)], 1.0, [source("b", 0, 10)])
    clock.advance_s(2.0)
    looked = 0
    answers = world.fetcher.take_answers(clock.now_s())
    assert len(answers) == 100
    assert {status for _, _, reply in answers for status in reply.statuses} == {Lookup.MISS}
    assert looked <= 1000


def test_pins_of_a_connection_that_broke_are_over(clock) -> None:
    """Their answer may never have arrived, and the client renews its lease for ever."""
    world = World(clock)
    world.attach(b"c")
    world.store(b"c", [1])
    pinned = world.pin(b"c", [1])
    namespace = world.core.sessions[b"c"].namespace
    written = world.say(b"c", wire.Reserve(namespace, [key(2)], [0]))
    groups = [wire.GroupGeometry(0, 16, SLOT_BYTES)]
    world.say(b"c2", wire.Attach("c", 100, 5, FIELDS, groups))
    assert world.directory.stats().pinned == 0
    released = world.say(b"c2", wire.Release(pinned.slots, pinned.generations))
    assert released.statuses == [Released.LOST]
    done = world.say(b"c2", wire.Commit(written.slots, written.generations, [9]))
    assert done.statuses == [Committed.READY]
    world.fetcher.check()
