"""The pool's core over memory, without sockets: what clients are answered."""

import pytest
from pool_world import FIELDS, SLOT_BYTES, ScriptedPulls, World, content, key, source

from kvfabric.fabric import wire
from kvfabric.fabric.checksum import checksum
from kvfabric.fabric.types import Committed, Lookup, Released, Reserved, make_key
from kvfabric.tiers.base import Job, JobResult
from kvfabric.tiers.memory import MemoryTier


def test_store_then_pin_then_release(clock) -> None:
    world = World(clock)
    assert isinstance(world.attach(b"c"), wire.Attached)
    assert world.store(b"c", [1, 2]) == [Committed.READY] * 2
    pinned = world.pin(b"c", [1, 2, 3])
    assert pinned.statuses == [Lookup.HIT, Lookup.HIT, Lookup.MISS]
    assert pinned.origins == ["host", "host", ""]
    assert bytes(world.memory.view(pinned.slots[0], SLOT_BYTES)) == content(1)
    released = world.say(b"c", wire.Release(pinned.slots[:2], pinned.generations[:2]))
    assert released.statuses == [Released.HELD] * 2
    world.fetcher.check()


@pytest.mark.parametrize("field", ["kv_dtype", "layout", "hash_seed", "rope"])
def test_a_namespace_that_differs_is_refused_by_field(clock, field: str) -> None:
    world = World(clock)
    world.attach(b"c")
    refused = world.attach(b"d", **{field: "other"})
    assert isinstance(refused, wire.Refused)
    assert (refused.field, refused.theirs) == (field, "other")
    assert b"d" not in world.core.sessions


@pytest.mark.parametrize("field", ["pipeline_parallel", "context_parallel"])
def test_parallelism_that_chunks_do_not_express_is_refused_by_field(clock, field: str) -> None:
    refused = World(clock).attach(b"c", **{field: "2"})
    assert isinstance(refused, wire.Refused)
    assert refused.field == field


def test_an_unknown_namespace_field_is_refused(clock) -> None:
    refused = World(clock).attach(b"c", colour="red")
    assert isinstance(refused, wire.Refused)
    assert refused.field == "colour"


def test_a_chunk_longer_than_a_slot_is_refused(clock) -> None:
    world = World(clock)
    groups = [wire.GroupGeometry(0, 16, SLOT_BYTES + 1)]
    refused = world.say(b"c", wire.Attach("c", 1, 1, FIELDS, groups))
    assert isinstance(refused, wire.Refused)
    assert "groups" in refused.field


def test_new_weights_retire_the_old_ones(clock) -> None:
    world = World(clock)
    world.attach(b"old")
    world.store(b"old", [1])
    assert isinstance(world.attach(b"new", weights_version="2"), wire.Attached)
    assert world.pin(b"old", [1]).statuses == [Lookup.MISS]
    refused = world.attach(b"late")
    assert isinstance(refused, wire.Refused)
    assert refused.field == "weights_version"


def test_tenants_and_models_do_not_disturb_each_other(clock) -> None:
    world = World(clock)
    world.attach(b"c")
    world.attach(b"t", tenant="other", kv_dtype="fp8")
    world.store(b"c", [1])
    assert world.pin(b"t", [1]).statuses == [Lookup.MISS]
    assert world.pin(b"c", [1]).statuses == [Lookup.HIT]


def test_strangers_and_old_epochs_are_stale(clock) -> None:
    world = World(clock)
    assert isinstance(world.say(b"x", wire.Renew()), wire.Stale)
    world.attach(b"c")
    assert isinstance(world.say(b"c", wire.Renew(), epoch=6), wire.Stale)
    assert isinstance(world.say(b"c", wire.Renew()), wire.Ok)


def test_malformed_messages_are_refused_and_harmless(clock) -> None:
    world = World(clock)
    world.attach(b"c")
    namespace = world.core.sessions[b"c"].namespace
    world.core.on_frame(b"c", b"\xff\x00")
    for body in (
        wire.Reserve(namespace, [key(1)], []),
        wire.Reserve(namespace, [b"short"], [0]),
        wire.Reserve(namespace, [make_key(bytes(32), 9)], [0]),
        wire.Commit([1], [], [1]),
        wire.Commit([1], [1], [0]),
        wire.Release([1], []),
        wire.Hello("n", b""),
        wire.Reserve(namespace, [key(1)], [-1]),
    ):
        assert isinstance(world.say(b"c", body), wire.Refused), body
    world.fetcher.check()


def test_a_full_region_is_busy_and_changes_nothing(clock) -> None:
    world = World(clock, slots=2)
    world.attach(b"c")
    world.store(b"c", [1, 2])
    assert world.pin(b"c", [1, 2]).statuses == [Lookup.HIT] * 2
    namespace = world.core.sessions[b"c"].namespace
    got = world.say(b"c", wire.Reserve(namespace, [key(3)], [0]))
    assert got.statuses == [Reserved.BUSY]
    assert world.pin(b"c", [1, 2]).statuses == [Lookup.HIT] * 2
    world.fetcher.check()


def test_a_waiting_pin_is_promoted_from_a_tier(clock) -> None:
    tier = MemoryTier(1 << 20, clock)
    world = World(clock, slots=2, tiers=[tier])
    world.attach(b"c")
    world.store(b"c", [1, 2])
    world.turn()
    world.store(b"c", [3, 4])
    world.turn()
    assert world.pin(b"c", [1]).statuses == [Lookup.MISS]
    assert world.pin(b"c", [1], wait_s=1.0) is None
    waiting = world.request
    world.turn()
    world.turn()
    got = world.heard(b"c", waiting)
    assert got.statuses == [Lookup.HIT]
    assert got.origins == ["memory"]
    assert bytes(world.memory.view(got.slots[0], SLOT_BYTES)) == content(1)
    world.fetcher.check()


def test_one_promotion_serves_all_that_wait(clock) -> None:
    pulls = ScriptedPulls()
    world = World(clock, pulls=pulls)
    world.attach(b"c")
    world.attach(b"d", pid=101)
    waiting = []
    for who in (b"c", b"d"):
        assert world.pin(who, [1, 2], 1.0, [source("b", 0, 2)]) is None
        waiting.append((who, world.request))
    assert len(pulls.asked) == 1
    pulls.end(pulls.asked[0][0], [Lookup.MISS, Lookup.MISS])
    world.turn()
    for who, request in waiting:
        assert world.heard(who, request).statuses == [Lookup.MISS, Lookup.MISS]


def test_a_failed_source_is_followed_by_the_next_and_not_asked_again(clock) -> None:
    pulls = ScriptedPulls()
    world = World(clock, pulls=pulls)
    world.attach(b"c")
    world.pin(b"c", [1], 1.0, [source("b", 0, 1), source("d", 0, 1)])
    waiting = world.request
    pulls.end(pulls.asked[0][0], [Lookup.MISS])
    world.turn()
    assert [one.node for _, one, _ in pulls.asked] == ["b", "d"]
    pulls.end(pulls.asked[1][0], [Lookup.BUSY])
    world.turn()
    assert world.heard(b"c", waiting).statuses == [Lookup.BUSY]
    assert len(pulls.asked) == 2


def test_sources_are_asked_for_their_ranges_only(clock) -> None:
    pulls = ScriptedPulls()
    world = World(clock, pulls=pulls)
    world.attach(b"c")
    world.pin(b"c", [1, 2, 3, 4], 1.0, [source("b", 0, 2), source("d", 2, 1)])
    assert {one.node: keys for _, one, keys in pulls.asked} == {
        "b": (key(1), key(2)),
        "d": (key(3),),
    }


def test_a_request_ends_by_its_deadline(clock) -> None:
    pulls = ScriptedPulls()
    world = World(clock, pulls=pulls)
    world.attach(b"c")
    world.store(b"c", [5])
    world.pin(b"c", [1, 5], 1.5, [source("b", 0, 2)])
    waiting = world.request
    clock.advance_s(1.4)
    world.turn()
    assert world.heard(b"c", waiting) is None
    clock.advance_s(0.2)
    world.turn()
    assert world.heard(b"c", waiting).statuses == [Lookup.MISS, Lookup.HIT]
    pulls.end(pulls.asked[0][0], [Lookup.MISS])
    world.turn()
    assert not world.fetcher.fetches.wanted


def test_a_wait_for_another_writer_ends_with_its_commit(clock) -> None:
    world = World(clock)
    world.attach(b"w")
    world.attach(b"r", pid=101)
    namespace = world.core.sessions[b"w"].namespace
    got = world.say(b"w", wire.Reserve(namespace, [key(1)], [0]))
    pulls_free = world.pin(b"r", [1], 1.0)
    assert pulls_free is None
    waiting = world.request
    world.memory.view(got.slots[0], SLOT_BYTES)[:] = content(1)
    world.say(b"w", wire.Commit(got.slots, got.generations, [checksum(content(1))]))
    world.turn()
    assert world.heard(b"r", waiting).statuses == [Lookup.HIT]


def test_a_dead_writer_ends_the_wait_for_it(clock) -> None:
    world = World(clock)
    world.attach(b"w")
    world.attach(b"r", pid=101)
    namespace = world.core.sessions[b"w"].namespace
    world.say(b"w", wire.Reserve(namespace, [key(1)], [0]))
    assert world.pin(b"r", [1], 5.0) is None
    waiting = world.request
    world.core.process_gone(100, 5)
    world.turn()
    assert world.heard(b"r", waiting).statuses == [Lookup.MISS]
    assert world.directory.stats().free == 8


class CorruptTier(MemoryTier):
    """Says that it has a chunk, and fails to load it."""

    name = "fs"

    def get_finished_jobs(self):
        for result in super().get_finished_jobs():
            misses = (Lookup.MISS,) * len(result.outcomes)
            yield JobResult(result.job_id, misses, (0,) * len(misses), 0, 0.0)


def test_a_tier_whose_load_fails_is_not_asked_again(clock) -> None:
    tier = CorruptTier(1 << 20, clock)
    world = World(clock, slots=2, tiers=[tier])
    loads: list[Job] = []
    submit = tier.submit_load
    tier.submit_load = lambda job: (loads.append(job), submit(job))[1]  # type: ignore[method-assign]
    world.attach(b"c")
    world.store(b"c", [1, 2])
    world.turn()
    world.store(b"c", [3, 4])
    world.turn()
    world.pin(b"c", [1], 5.0)
    waiting = world.request
    for _ in range(5):
        world.turn()
    assert world.heard(b"c", waiting).statuses == [Lookup.MISS]
    assert len(loads) == 1
    world.fetcher.check()


def test_a_client_that_leaves_frees_all_it_held(clock) -> None:
    world = World(clock)
    world.attach(b"c")
    world.store(b"c", [1])
    world.pin(b"c", [1])
    namespace = world.core.sessions[b"c"].namespace
    world.say(b"c", wire.Reserve(namespace, [key(2)], [0]))
    world.say(b"c", wire.Detach())
    stats = world.directory.stats()
    assert (stats.writing, stats.pinned, stats.quarantined) == (0, 0, 0)
    world.fetcher.check()


def test_a_silent_client_is_quarantined_until_it_says_so(clock) -> None:
    world = World(clock)
    world.attach(b"c")
    namespace = world.core.sessions[b"c"].namespace
    got = world.say(b"c", wire.Reserve(namespace, [key(1)], [0]))
    clock.advance_s(11.0)
    world.turn()
    assert world.directory.stats().quarantined == 1
    late = world.say(b"c", wire.Commit(got.slots, got.generations, [9]))
    assert late.statuses == [Committed.LOST]
    world.say(b"c", wire.Abort(got.slots, got.generations))
    assert world.directory.stats().quarantined == 0
    world.fetcher.check()


def test_stats_are_numbers_by_name(clock) -> None:
    world = World(clock, tiers=[MemoryTier(1 << 20, clock)])
    world.attach(b"c")
    world.store(b"c", [1])
    values = world.say(b"c", wire.StatsAsk()).values
    assert values["ready"] == 1
    assert values["memory_quota_bytes"] == 1 << 20


def test_a_client_that_comes_back_under_another_identity_is_one_client(clock) -> None:
    world = World(clock)
    world.attach(b"c")
    namespace = world.core.sessions[b"c"].namespace
    got = world.say(b"c", wire.Reserve(namespace, [key(1)], [0]))
    groups = [wire.GroupGeometry(0, 16, SLOT_BYTES)]
    assert isinstance(world.say(b"c2", wire.Attach("c", 100, 5, FIELDS, groups)), wire.Attached)
    assert set(world.core.sessions) == {b"c2"}
    done = world.say(b"c2", wire.Commit(got.slots, got.generations, [9]))
    assert done.statuses == [Committed.READY]


def test_a_lease_that_ends_frees_nothing_that_a_live_process_might_write(clock) -> None:
    world = World(clock, slots=2)
    world.attach(b"c")
    world.attach(b"d", pid=101)
    namespace = world.core.sessions[b"c"].namespace
    world.say(b"c", wire.Reserve(namespace, [key(1), key(2)], [0, 1]))
    clock.advance_s(60.0)
    world.turn()
    world.attach(b"d", pid=101)
    busy = world.say(b"d", wire.Reserve(namespace, [key(3)], [0]))
    assert busy.statuses == [Reserved.BUSY]


class StuckTier(MemoryTier):
    """A disk that stands still: jobs are taken and do not end."""

    def get_finished_jobs(self):
        return ()


def test_stores_that_wait_for_a_slow_tier_leave_room_for_new_chunks(clock) -> None:
    world = World(clock, slots=8, tiers=[StuckTier(1 << 20, clock)])
    world.attach(b"c")
    for n in range(0, 40, 2):
        assert world.store(b"c", [n, n + 1]) == [Committed.READY] * 2
        world.turn()
    assert world.directory.stats().pinned == 4
    world.fetcher.check()


def test_stores_are_taken_again_when_the_tier_goes_on(clock) -> None:
    tier = StuckTier(1 << 20, clock)
    world = World(clock, slots=8, tiers=[tier])
    world.attach(b"c")
    for n in range(12):
        world.store(b"c", [n])
    tier.get_finished_jobs = super(StuckTier, tier).get_finished_jobs
    world.turn()
    assert world.directory.stats().pinned == 0
    world.store(b"c", [20])
    world.turn()
    assert tier.stats().chunks == 5
