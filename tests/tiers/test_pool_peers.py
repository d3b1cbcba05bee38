"""Two pools and the bytes between them: pulled exactly, or a miss within 2 s."""

import os
import signal
import socket

import pytest
from pool_yard import (
    CLOCK,
    Yard,
    chunk,
    cpu_share,
    flip_slot,
    freeze,
    keys,
    load,
    names,
    store,
    until,
)

from kvfabric.fabric.types import SourceRange

pytestmark = [pytest.mark.slow, pytest.mark.nixl]

DETOUR_S = 2.0
"""All that a dead source may cost one request."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Pair:
    """A source and a puller with a client each; the source keeps its address when it restarts."""

    def __init__(self, yard, slots: int = 64, suspect_s: float = 0.5) -> None:
        self.yard = yard
        listen = f"tcp://127.0.0.1:{free_port()}"
        peers = {"transport": "nixl", "suspect_s": suspect_s, "source_deadline_s": 1.2}
        self.config = yard.config(node="a", slots=slots, peers=peers | {"listen": listen})
        self.source = yard.pool(self.config)
        self.puller = yard.pool(node="b", slots=slots, peers=peers)
        self.there, self.here = yard.client(self.source), yard.client(self.puller)

    def pull(self, first: int, number: int, wait_s: float = 3.0, client=None):
        """Load at the puller, from the source; return the outcome and how long it took."""
        sources = [SourceRange("a", self.source.addresses.peer, 0, number)]
        begun_s = CLOCK.now_s()
        got = load(client or self.here, first, number, wait_s, sources)
        return got, CLOCK.now_s() - begun_s

    def settled(self) -> bool:
        stats = self.puller.stats()
        return stats["writing"] == stats["pinned"] == stats["quarantined"] == 0

    def restart_source(self) -> None:
        self.source = self.yard.pool(self.config)


@pytest.fixture
def pair(yard) -> Pair:
    return Pair(yard)


@pytest.fixture(scope="module")
def shared():
    """One pair for the tests that leave their pools in good health."""
    yard = Yard()
    yield Pair(yard)
    yard.close()


def test_fifty_chunks_are_pulled_and_idle_pools_rest(shared) -> None:
    store(shared.there, 0, 50)
    got, _ = shared.pull(0, 50)
    assert (names(got), set(got.origins)) == ({"HIT"}, {"peer"})
    got, _ = shared.pull(0, 50)
    assert set(got.origins) == {"host"}
    for pool in (shared.source, shared.puller):
        until(lambda pool=pool: pool.stats()["pinned"] == 0)
        pool.check()
    assert cpu_share(shared.source) < 0.05
    assert cpu_share(shared.puller) < 0.05


def test_a_source_killed_before_the_pull_is_a_miss_and_comes_back(pair) -> None:
    store(pair.there, 0, 8)
    assert names(pair.pull(0, 2)[0]) == {"HIT"}
    epoch = pair.source.addresses.epoch
    pair.source.kill()
    got, took_s = pair.pull(2, 2)
    assert names(got) == {"MISS"}
    assert took_s < DETOUR_S
    got, took_s = pair.pull(4, 2)
    assert names(got) == {"MISS"}
    assert took_s < 0.2
    pair.restart_source()
    assert pair.source.addresses.epoch > epoch
    until(lambda: names(pair.pull(2, 6)[0]) == {"HIT"})
    until(pair.settled)
    pair.puller.check()


def test_a_source_that_restarted_unnoticed_serves_at_once(pair) -> None:
    store(pair.there, 0, 8)
    assert names(pair.pull(0, 2)[0]) == {"HIT"}
    pair.source.kill()
    pair.restart_source()
    got, took_s = pair.pull(2, 6)
    assert names(got) == {"HIT"}
    assert took_s < DETOUR_S


def pull_in_the_middle(pair, first: int, number: int):
    """Begin a pull in another process, and return that when its slots are reserved."""
    child = pair.yard.child(pair.puller, timeout_s=1.0)
    child.tell(
        "load",
        first=first,
        number=number,
        wait_s=3.0,
        node="a",
        endpoint=pair.source.addresses.peer,
    )
    until(lambda: pair.here.lookup(keys(first, 1)).states[0], look_s=0.0)
    return child


def require_in_time(got) -> None:
    assert got["seconds"] < DETOUR_S
    assert set(got["statuses"]) <= {"HIT", "MISS"}
    assert got["exact"]


@pytest.mark.parametrize("known", [False, True])
def test_a_source_killed_in_the_middle_costs_one_deadline(yard, known) -> None:
    pair = Pair(yard, slots=1024)
    store(pair.there, 0, 1000)
    if known:
        assert names(pair.pull(0, 2)[0]) == {"HIT"}
    child = pull_in_the_middle(pair, 2, 998)
    pair.source.kill()
    require_in_time(child.hear())
    until(pair.settled)
    pair.puller.check()
    pair.restart_source()
    until(lambda: names(pair.pull(0, 1000)[0]) == {"HIT"}, within_s=4.0)


@pytest.mark.parametrize("dies", [False, True])
def test_a_source_stopped_in_the_middle_costs_one_deadline(yard, dies) -> None:
    pair = Pair(yard, slots=1024)
    store(pair.there, 0, 1000)
    child = pull_in_the_middle(pair, 0, 1000)
    freeze(pair.source.pid)
    require_in_time(child.hear())
    assert cpu_share(pair.puller) < 0.3
    if dies:
        pair.source.kill()
        pair.restart_source()
    else:
        os.kill(pair.source.pid, signal.SIGCONT)
    until(pair.settled, within_s=5.0)
    pair.puller.check()
    until(lambda: names(pair.pull(0, 1000)[0]) == {"HIT"}, within_s=4.0)


@pytest.mark.parametrize("known", [False, True])
def test_a_stopped_source_is_a_miss_in_time(pair, known) -> None:
    store(pair.there, 0, 8)
    if known:
        assert names(pair.pull(0, 2)[0]) == {"HIT"}
    freeze(pair.source.pid)
    got, took_s = pair.pull(2, 2)
    assert names(got) == {"MISS"}
    assert took_s < DETOUR_S
    got, took_s = pair.pull(4, 2)
    assert names(got) == {"MISS"}
    assert took_s < 0.2
    os.kill(pair.source.pid, signal.SIGCONT)
    until(lambda: names(pair.pull(2, 6)[0]) == {"HIT"})
    until(pair.settled)
    pair.puller.check()


def test_a_flipped_bit_at_the_source_is_not_committed(pair) -> None:
    store(pair.there, 0, 8)
    flip_slot(pair.yard.segment("a"), chunk(3))
    got, _ = pair.pull(0, 8)
    assert [s.name for s in got.statuses] == ["HIT"] * 3 + ["MISS"] + ["HIT"] * 4
    stats = pair.puller.stats()
    assert (stats["pull_corrupt"], stats["ready"]) == (1, 7)
    assert pair.here.lookup(keys(3, 1)).states[0] == 0
    until(pair.settled)


def test_another_namespace_is_a_miss_at_the_source(shared) -> None:
    store(shared.there, 100, 4)
    stranger = shared.yard.client(shared.puller, model="other")
    got, took_s = shared.pull(100, 4, client=stranger)
    assert names(got) == {"MISS"}
    assert took_s < 0.5


def test_an_endpoint_that_is_none_is_a_miss(shared) -> None:
    store(shared.there, 200, 4)
    bad = [
        SourceRange("a", "nonsense://x", 0, 2),
        SourceRange("a", "tcp://256.0.0.1:99999", 0, 2),
        SourceRange("a", shared.source.addresses.peer, 0, 4),
    ]
    begun_s = CLOCK.now_s()
    assert names(load(shared.here, 200, 4, 3.0, bad)) == {"HIT"}
    assert CLOCK.now_s() - begun_s < DETOUR_S
    assert shared.puller.stats().get('kvfabric_loop_errors_total{loop="pool"}', 0) == 0


def test_a_full_region_is_busy_for_a_pull(yard) -> None:
    pair = Pair(yard, slots=8)
    store(pair.there, 0, 4)
    store(pair.here, 100, 8)
    pinned = pair.here.pin(keys(100, 8))
    assert names(pair.pull(0, 4)[0]) == {"BUSY"}
    pair.here.release([one.slot for _, one, _ in pinned])
    assert names(pair.pull(0, 4)[0]) == {"HIT"}
