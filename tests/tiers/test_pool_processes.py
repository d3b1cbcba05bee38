"""Pools and clients in processes, killed and stopped: nothing is lost, nothing leaks."""

import os
import signal

import pytest
from pool_yard import CLOCK, SLOT_BYTES, chunk, freeze, key, keys, load, names, store, until

from kvfabric.fabric.checksum import checksum
from kvfabric.fabric.errors import Closed, ConfigError, Unavailable
from kvfabric.fabric.types import Committed, Lookup, Reserved
from kvfabric.tiers.pool.daemon import PoolProcess

pytestmark = pytest.mark.slow


def settled(pool: PoolProcess) -> bool:
    stats = pool.stats()
    return stats["writing"] == stats["quarantined"] == stats["pinned"] == stats["condemned"] == 0


def wait_settled(pool: PoolProcess) -> dict[str, float]:
    """Wait until nobody holds anything, and return the pool's numbers; the books must balance."""
    until(lambda: settled(pool))
    pool.check()
    return pool.stats()


def test_a_pool_killed_under_load_loses_no_committed_chunk(yard) -> None:
    config = yard.config(slots=4096, host={"lease_s": 2.0})
    pool = yard.pool(config)
    child = yard.child(pool, timeout_s=1.5)
    child.tell("store_forever", first=0)
    said = [child.hear() for _ in range(20)]
    pool.kill()
    pool = yard.pool(config)
    after = [child.hear() for _ in range(20)]
    child.tell("stop")
    while said[-1] != "ended":
        said.append(child.hear())
    lines = [line for line in (*said[:-1], *after) if line[0] == "stored"]
    stored = sorted(n for line in lines for n in line[1:])
    assert after[-1][0] == "stored"
    client = yard.client(pool)
    for n in range(0, len(stored), 64):
        batch = stored[n : n + 64]
        status = client.load(
            [key(number) for number in batch],
            lambda index, slot, summed, batch=batch: (
                summed if slot == memoryview(chunk(batch[index])) else 0
            ),
        )
        assert names(status) == {"HIT"}
    for line in (*said[:-1], *after):
        if line[0] == "lost":  # unless the answer alone was
            assert names(load(client, line[1], 4)) <= {"HIT", "MISS"}
    wait_settled(pool)


def test_what_a_pool_took_to_its_grave_half_written_is_given_back(yard) -> None:
    config = yard.config()
    pool = yard.pool(config)
    child = yard.child(pool)
    assert child.ask("reserve", first=0, number=4) == ["GRANTED"] * 4
    pool.kill()
    pool = yard.pool(config)
    client = yard.client(pool)
    assert pool.stats()["quarantined"] == 4
    assert names(load(client, 0, 4)) == {"MISS"}
    assert child.ask("commit") == ["LOST"] * 4
    assert wait_settled(pool)["free"] == 32
    store(client, 0, 4)


def test_who_dies_between_two_pools_leaves_nothing(yard) -> None:
    config = yard.config()
    pool = yard.pool(config)
    child = yard.child(pool)
    child.ask("reserve", first=0, number=4)
    child.stop()
    pool.kill()
    pool = yard.pool(config)
    assert pool.stats()["quarantined"] == 4
    child.kill()
    assert wait_settled(pool)["free"] == 32


def test_a_commit_without_an_answer_is_given_up(yard) -> None:
    config = yard.config(host={"lease_s": 0.6})
    pool = yard.pool(config)
    client = yard.client(pool, timeout_s=0.2)
    (_, ref), (_, other) = client.reserve(keys(0, 2), range(2))
    pool.kill()
    with pytest.raises(Unavailable):
        client.commit([ref], [1])
    client.abort([other])
    pool = yard.pool(config)
    assert wait_settled(pool)["free"] == 32
    until(lambda: answers(client))
    store(client, 0, 2)


def test_a_grant_that_came_too_late_is_given_back(yard) -> None:
    pool = yard.pool(host={"lease_s": 0.6})
    client = yard.client(pool, timeout_s=0.2)
    store(client, 0, 4)
    freeze(pool.pid)
    with pytest.raises(Unavailable):
        client.pin(keys(0, 4))
    with pytest.raises(Unavailable):
        client.reserve(keys(4, 4), range(4))
    os.kill(pool.pid, signal.SIGCONT)
    until(lambda: pool.stats()["ready"] == 4)
    wait_settled(pool)


def test_a_client_killed_while_writing_leaves_nothing(yard) -> None:
    pool = yard.pool()
    child, client = yard.child(pool), yard.client(pool)
    child.ask("reserve", first=0, number=32)
    assert client.lookup([key(0)]).states[0] == Lookup.PENDING
    assert names(load(client, 0, 4)) == {"PENDING"}
    child.kill()
    until(lambda: pool.stats()["free"] == 32, within_s=1.0)
    assert names(load(client, 0, 32)) == {"MISS"}
    wait_settled(pool)
    store(client, 100, 32)


def test_a_stopped_writer_keeps_its_slots_until_it_says_so(yard) -> None:
    pool = yard.pool(host={"lease_s": 0.5, "quarantine_bytes_max": 32 << 16})
    child, client = yard.child(pool), yard.client(pool)
    child.ask("reserve", first=0, number=8)
    child.stop()
    until(lambda: pool.stats()["quarantined"] == 8)
    assert names(load(client, 0, 8)) == {"MISS"}
    store(client, 100, 24)
    assert [s for s, _ in client.reserve(keys(200, 25), range(25))] == [Reserved.BUSY] * 25
    store(client, 300, 24)
    assert pool.stats()["quarantined"] == 8
    child.go_on()
    assert child.ask("commit") == ["LOST"] * 8
    until(lambda: pool.stats()["free"] == 8)
    assert names(load(client, 300, 24)) == {"HIT"}
    wait_settled(pool)


def test_a_stopped_writer_that_is_killed_gives_its_slots_back(yard) -> None:
    pool = yard.pool(host={"lease_s": 0.5})
    child = yard.child(pool)
    child.ask("reserve", first=0, number=8)
    child.stop()
    until(lambda: pool.stats()["quarantined"] == 8)
    child.kill()
    until(lambda: pool.stats()["free"] == 32, within_s=1.0)
    wait_settled(pool)


def test_a_stopped_reader_loses_its_pins_and_never_reads_wrong_bytes(yard) -> None:
    pool = yard.pool(slots=8, host={"lease_s": 0.5})
    child, client = yard.child(pool), yard.client(pool)
    store(client, 0, 8)
    assert child.ask("load_slowly", first=0) == "draining"
    child.stop()
    until(lambda: pool.stats()["pinned"] == 0)
    store(client, 100, 8)
    child.tell("read")
    child.go_on()
    assert child.hear() == ["MISS", False]
    wait_settled(pool)


def test_a_late_release_says_so(yard) -> None:
    pool = yard.pool(host={"lease_s": 0.5})
    child, client = yard.child(pool), yard.client(pool)
    store(client, 0, 4)
    assert child.ask("pin", first=0, number=4) == ["HIT"] * 4
    assert child.ask("release") == ["HELD"] * 4
    assert child.ask("pin", first=0, number=4) == ["HIT"] * 4
    child.stop()
    until(lambda: pool.stats()["pinned"] == 0)
    child.go_on()
    assert child.ask("release") == ["LOST"] * 4
    wait_settled(pool)


def test_of_two_writers_one_writes(yard) -> None:
    pool = yard.pool()
    child, client = yard.child(pool), yard.client(pool)
    assert child.ask("reserve", first=0, number=4) == ["GRANTED"] * 4
    got = client.reserve(keys(0, 6), range(6))
    assert [status for status, _ in got] == [Reserved.PENDING] * 4 + [Reserved.GRANTED] * 2
    client.abort([ref for _, ref in got[4:]])
    child.tell("commit")
    assert names(load(client, 0, 4, wait_s=1.0)) == {"HIT"}
    assert child.hear() == ["READY"] * 4
    assert {status for status, _ in client.reserve(keys(0, 4), range(4))} == {Reserved.PRESENT}
    wait_settled(pool)


def test_a_waiting_reader_is_told_when_the_writer_dies(yard) -> None:
    pool = yard.pool()
    child, client = yard.child(pool), yard.client(pool)
    child.ask("reserve", first=0, number=2)
    child.process.kill()
    assert names(load(client, 0, 2, wait_s=1.0)) == {"MISS"}
    wait_settled(pool)


def test_a_long_wait_keeps_the_lease(yard) -> None:
    pool = yard.pool(host={"lease_s": 0.5})
    child, client = yard.child(pool), yard.client(pool)
    store(client, 0, 1)
    child.ask("reserve", first=1, number=1)
    got = client.pin(keys(0, 2), wait_s=1.2)
    assert [status for status, _, _ in got] == [Lookup.HIT, Lookup.MISS]
    assert pool.stats()["lapses"] == 0
    assert client.release([got[0][1].slot])[0].name == "HELD"


def test_a_stopped_pool_costs_one_deadline(yard) -> None:
    pool = yard.pool()
    client = yard.client(pool, timeout_s=1.0)
    freeze(pool.pid)
    for least_s, most_s in ((0.9, 1.4), (0.1, 0.6), (0.1, 0.6)):
        begun_s = CLOCK.now_s()
        with pytest.raises(Unavailable, match=r"the pool at ipc://.* did not answer within"):
            client.pin(keys(0, 1))
        assert least_s < CLOCK.now_s() - begun_s < most_s
    os.kill(pool.pid, signal.SIGCONT)
    until(lambda: answers(client))
    store(client, 0, 1)
    wait_settled(pool)


def answers(client) -> bool:
    try:
        client.stats()
    except Unavailable:
        return False
    return True


def test_a_pool_that_began_anew_is_mapped_anew(yard) -> None:
    config = yard.config()
    pool = yard.pool(config)
    client = yard.client(pool)
    store(client, 0, 4)
    pool.stop()
    pool = yard.pool(config)
    assert names(load(client, 0, 4)) == {"MISS"}
    store(client, 0, 4)
    assert client.lookup(keys(0, 4)).states.tolist() == [Lookup.HIT] * 4
    assert names(load(yard.client(pool), 0, 4)) == {"HIT"}


def test_what_was_granted_in_other_memory_is_never_written_in_this_one(yard) -> None:
    config = yard.config()
    pool = yard.pool(config)
    client = yard.client(pool)
    (_, old), *_ = client.reserve(keys(0, 1), [0])
    pool.stop()
    pool = yard.pool(config)
    other = yard.client(pool)
    (_, new), *_ = other.reserve(keys(1, 1), [0])
    client.stats()  # attaches to the new pool, and maps its memory
    assert new.slot == old.slot
    assert new.generation > old.generation
    with pytest.raises(Closed):
        client.view(old, SLOT_BYTES)
    client.abort([old])
    other.view(new, SLOT_BYTES)[:] = chunk(1)
    assert other.commit([new], [checksum(chunk(1))]) == [Committed.READY]
    assert names(load(client, 1, 1)) == {"HIT"}


def test_a_second_pool_on_the_same_files_is_refused(yard) -> None:
    config = yard.config()
    pool = yard.pool(config)
    store(client := yard.client(pool), 0, 4)
    with pytest.raises(ConfigError, match=r"run: .*belongs to a running pool .*another `run`"):
        PoolProcess(config)
    assert names(load(client, 0, 4)) == {"HIT"}
