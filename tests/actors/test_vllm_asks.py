"""What a request waits for: tiers and peers, asked once, and never for longer than was said."""

import pytest
from vllm_yard import Asked, Desk, DictPool, Gate, group, request, soon

from kvfabric.actors.engines.vllm.settings import ASK_GRACE_S, HANDOFF_S, PAUSE_S

TABLE = list(range(101, 111))
PEER = {"remote_kv_source": {"remote_host": "b", "remote_port": 1}}
PREFILLER = {"remote_prefiller": {"remote_host": "b", "remote_port": 1}}
WAIT_S = 1.5


@pytest.fixture
def pool() -> DictPool:
    return DictPool(media=("fs",))


@pytest.fixture
def desk(pool, clock):
    made = Desk(pool, clock)
    yield made
    pool.on_ask = lambda: None
    made.side.close()
    assert pool.open_clients == 0


def elsewhere(desk: Desk, one: Asked, *chunks: int, origin: str = "fs", at: int = 0) -> None:
    """Let a tier or a peer have chunks of a request."""
    desk.pool.elsewhere.update({key: (key, origin) for key in desk.keys(one, chunks, at)})


def answered(desk: Desk, one: Asked, local: int = 0) -> int:
    """Ask step after step, as the engine does, and return the answer."""
    said: list[int | None] = []

    def ask() -> bool:
        said.append(desk.side.matched(one, local))
        return said[-1] is not None

    soon(ask)
    return said[-1]


def test_what_a_tier_has_is_waited_for_promised_and_pinned_until_it_is_loaded(desk) -> None:
    one = request()
    desk.put(one, 1)
    elsewhere(desk, one, 1, 2)
    gate = Gate()
    desk.pool.on_ask = lambda: gate.pass_through() if desk.pool.asked else None
    assert desk.side.matched(one, 0) is None
    gate.wait_reached()
    assert desk.side.matched(one, 0) is None
    gate.open()
    assert answered(desk, one) == 24
    assert desk.pool.held == 3
    assert desk.pool.asked == [(desk.keys(one, range(4)), WAIT_S, [])]
    assert desk.side.matched(one, 0) == 24
    desk.side.allocated(one, [TABLE], 24)
    assert desk.side.origins(one, 24) == {"host": 8, "fs": 16}
    desk.step({})
    assert desk.pool.held == 3
    desk.side.observed(None, ["r"])
    soon(lambda: not desk.pool.held)
    assert len(desk.pool.asked) == 1


def test_where_everything_is_in_the_host_nothing_is_asked(desk) -> None:
    one = request()
    desk.put(one, 4)
    assert desk.side.matched(one, 0) == 32
    assert desk.side.origins(one, 32) == {"host": 32}
    assert not desk.pool.asked


def test_a_pool_without_tiers_and_a_request_without_sources_ask_nothing(clock) -> None:
    desk = Desk(DictPool(), clock)
    assert desk.side.matched(request(), 0) == 0
    assert not desk.pool.asked
    desk.side.close()


def test_only_what_is_not_local_is_asked(desk) -> None:
    one = request()
    elsewhere(desk, one, 0, 1, 2, 3)
    assert answered(desk, one, 20) == 12
    assert [keys for keys, _, _ in desk.pool.asked] == [desk.keys(one, (2, 3))]


@pytest.mark.parametrize(("params", "again_s"), [(PEER, 0.0), (PREFILLER, HANDOFF_S)])
def test_sources_are_asked_for_all_of_it(clock, params, again_s) -> None:
    desk = Desk(DictPool(), clock, size=2)
    one = request(kv_transfer_params=params)
    elsewhere(desk, one, 0, 1, 2, 3, origin="peer")
    assert desk.side.matched(one, 0) is None
    assert desk.side._requests["r"].asks[0].again_s == again_s
    assert answered(desk, one) == 32
    ((keys, _, (source,)),) = desk.pool.asked
    assert sorted(keys) == sorted(desk.keys(one, range(4)))
    assert (source.endpoint, source.start, source.count) == ("tcp://b:1", 0, 8)
    desk.side.allocated(one, [TABLE], 32)
    assert desk.side.origins(one, 32) == {"peer": 32}
    desk.side.close()


def test_a_question_that_hangs_is_a_miss_in_time_and_is_not_asked_again(desk, clock) -> None:
    one = request()
    desk.put(one, 1)
    gate = Gate()
    desk.pool.on_ask = lambda: gate.pass_through() if desk.pool.asked else None
    assert desk.side.matched(one, 0) is None
    gate.wait_reached()
    clock.advance_s(WAIT_S)
    assert desk.side.matched(one, 0) is None
    clock.advance_s(ASK_GRACE_S)
    assert desk.side.matched(one, 0) == 8
    assert desk.side.matched(one, 0) == 8
    gate.open()
    soon(lambda: not desk.pool.held and not desk.side._askers._askers[0].load)
    assert len(desk.pool.asked) == 1


def test_a_pool_that_falls_silent_is_a_miss_and_is_left_alone(desk, clock) -> None:
    desk.pool.silence()
    assert answered(desk, request()) == 0
    asked = len(desk.pool.asked)
    other = request("other")
    desk.put(other, 2)
    assert desk.side.matched(other, 0) == 0
    assert len(desk.pool.asked) == asked
    desk.pool.silence(silent=False)
    clock.advance_s(PAUSE_S)
    assert answered(desk, other) == 16


def test_who_finds_nothing_asks_once(desk) -> None:
    one = request()
    assert answered(desk, one) == 0
    assert desk.side.matched(one, 0) == 0
    desk.side.allocated(one, [TABLE], 0)
    desk.step({"r": [TABLE]}, admitted=["r"])
    assert desk.side.matched(one, 0) == 0
    assert len(desk.pool.asked) == 1


def test_pins_go_back_where_the_engine_has_it_all_by_now(desk) -> None:
    one = request()
    elsewhere(desk, one, 0, 1, 2)
    assert answered(desk, one) == 24
    assert desk.side.matched(one, 24) == 0
    soon(lambda: not desk.pool.held)


def test_pins_go_back_when_the_engine_takes_nothing(desk) -> None:
    one = request()
    elsewhere(desk, one, 0)
    assert answered(desk, one) == 8
    desk.side.allocated(one, [TABLE], 0)
    soon(lambda: not desk.pool.held)


@pytest.mark.parametrize("waiting", [True, False])
def test_pins_go_back_when_a_request_is_aborted(desk, waiting) -> None:
    one = request()
    elsewhere(desk, one, 0)
    gate = Gate()
    desk.pool.on_ask = lambda: gate.pass_through() if desk.pool.asked else None
    assert desk.side.matched(one, 0) is None
    gate.wait_reached()
    if not waiting:
        gate.open()
        assert answered(desk, one) == 8
    desk.side.finished(one, [[]])
    gate.open()
    soon(lambda: not desk.books() and not desk.side._askers._askers[0].load)
    assert not desk.side._requests


def test_an_abort_while_loading_keeps_the_pins_until_the_load_is_over(desk) -> None:
    one = request()
    elsewhere(desk, one, 0)
    assert answered(desk, one) == 8
    desk.side.allocated(one, [TABLE], 8)
    desk.step({})
    desk.side.finished(one, [TABLE])
    assert desk.pool.held == 1
    desk.side.observed(None, ["r"])
    soon(lambda: not desk.books())


def test_a_load_that_failed_gives_its_pins_back(desk) -> None:
    one = request()
    elsewhere(desk, one, 0, 1, 2, 3)
    assert answered(desk, one) == 32
    desk.load(one, [TABLE], failed=True)
    soon(lambda: not desk.books())
    assert desk.side.matched(one, 0) == 0


def test_a_reset_ends_questions(desk, clock) -> None:
    one = request()
    elsewhere(desk, one, 0, 1, 2, 3)
    assert answered(desk, one) == 32
    clients = list(desk.pool.clients)
    desk.side.reset()
    assert all(client.closed for client in clients)
    assert not desk.side._requests["r"].asks
    assert desk.side.matched(one, 0) == 0


def test_more_requests_than_may_ask_compute(desk) -> None:
    gate = Gate()
    desk.pool.on_ask = lambda: gate.pass_through() if desk.pool.asked else None
    said = [desk.side.matched(request(str(number)), 0) for number in range(300)]
    assert said.count(None) == 256
    assert said[256:] == [0] * 44
    gate.open()


HYBRID = (group(0, 8), group(1, 8, window=12))


def test_windows_are_asked_for_the_prefix_that_the_full_groups_have(pool, clock) -> None:
    desk = Desk(pool, clock, *HYBRID)
    one = request()
    desk.put(one, 1)
    elsewhere(desk, one, 1, 2, at=0)
    elsewhere(desk, one, 0, 1, 2, 3, at=1)
    held: list[int] = []
    pool.on_ask = lambda: held.append(pool.held)
    assert answered(desk, one) == 24
    assert [keys for keys, _, _ in pool.asked] == [
        desk.keys(one, range(4), 0),
        desk.keys(one, (1, 2), 1),
    ]
    assert held[-1] == 3, "the full group's chunks may leave while the windows' come"
    assert pool.held == 5
    desk.load(one, [TABLE, list(range(201, 211))])
    soon(lambda: not desk.books())
    desk.side.close()


def test_windows_that_are_nowhere_leave_what_they_allow(pool, clock) -> None:
    desk = Desk(pool, clock, *HYBRID)
    one = request()
    desk.put(one, 2)
    elsewhere(desk, one, 2, 3, at=0)
    assert answered(desk, one) == 16
    assert len(pool.asked) == 2
    desk.side.close()


def test_a_model_of_windows_alone_asks_once_for_the_end(pool, clock) -> None:
    desk = Desk(pool, clock, group(0, 8, window=12))
    one = request()
    elsewhere(desk, one, 2, 3)
    assert answered(desk, one) == 32
    assert [keys for keys, _, _ in pool.asked] == [desk.keys(one, (2, 3))]
    desk.side.close()
