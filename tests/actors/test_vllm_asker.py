"""Questions that take long: answered, given up, dropped; what was pinned is given back."""

import pytest
from vllm_yard import DictPool, Gate, hashes, soon

from kvfabric.actors.engines.vllm import asker as asker_module
from kvfabric.actors.engines.vllm.asker import Ask, Askers, AskState
from kvfabric.actors.engines.vllm.settings import HANDOFF_RETRY_S
from kvfabric.fabric.errors import NamespaceMismatch
from kvfabric.fabric.types import SourceRange, make_key

KEYS = [make_key(each, 0) for each in hashes("prompt", 6)]
PEER = SourceRange("b", "tcp://b:1", 0, len(KEYS))


@pytest.fixture
def pool() -> DictPool:
    return DictPool(media=("fs",))


@pytest.fixture
def askers(pool, clock):
    made = Askers(pool.attach, clock)
    yield made
    pool.on_ask = lambda: None
    made.close()
    assert pool.open_clients == 0


def ask(clock, keys=KEYS, *, wait_s=1.5, again_s=0.0, sources=()) -> Ask:
    return Ask(keys, sources, clock.now_s(), wait_s, again_s)


def over(one: Ask) -> Ask:
    soon(lambda: one.state is not AskState.WAITING)
    return one


def test_what_is_here_or_elsewhere_is_pinned_until_it_is_dropped(pool, askers, clock) -> None:
    pool.put(KEYS[:2])
    pool.elsewhere = {KEYS[3]: (b"x", "fs")}
    one = over(askers.submit(ask(clock)))
    assert one.state is AskState.DONE
    assert one.origins == ("host", "host", "", "fs", "", "")
    assert pool.held == len(one.pins) == 3
    askers.drop(one)
    askers.drop(one)
    soon(lambda: pool.held == 0)
    assert over(askers.submit(ask(clock, KEYS[:1]))).origins == ("host",)
    assert (len(pool.asked), len(pool.clients)) == (2, 1)


def test_where_everything_is_here_nobody_waits(pool, askers, clock) -> None:
    pool.put(KEYS)
    began_s = clock.now_s()
    over(askers.submit(ask(clock, again_s=0.5)))
    assert clock.now_s() == began_s
    assert len(pool.asked) == 1


def test_what_a_source_has_not_yet_is_asked_again_and_only_that(pool, askers, clock) -> None:
    def progress() -> None:
        if pool.asked:
            pool.put(KEYS[len(pool.asked) - 1 : len(pool.asked)])

    pool.on_ask = progress
    sources = [PEER, SourceRange("c", "tcp://c:1", 2, 2)]
    one = over(askers.submit(ask(clock, again_s=0.5, sources=sources)))
    assert one.origins == ("host",) * len(KEYS)
    assert pool.held == len(KEYS)
    assert [asked for asked, _, _ in pool.asked] == [KEYS[at:] for at in range(len(KEYS))]
    ranges = [[(s.node, s.start, s.count) for s in sources] for _, _, sources in pool.asked]
    assert ranges == [
        [("b", 0, 6), ("c", 2, 2)],
        [("b", 0, 5), ("c", 1, 2)],
        [("b", 0, 4), ("c", 0, 2)],
        [("b", 0, 3), ("c", 0, 1)],
        [("b", 0, 2)],
        [("b", 0, 1)],
    ]


def test_nobody_asks_again_for_longer_than_was_said(pool, askers, clock) -> None:
    one = over(askers.submit(ask(clock, again_s=0.5)))
    assert (one.state, one.origins) == (AskState.DONE, ("",) * len(KEYS))
    assert clock.now_s() - one.begun_s <= 0.5 + HANDOFF_RETRY_S
    assert len(pool.asked) == pytest.approx(0.5 / HANDOFF_RETRY_S, abs=2)


@pytest.mark.parametrize(("wait_s", "asked"), [(1.5, [1.5, 0.88, 0.26]), (0.0, [])])
def test_all_questions_together_have_the_time_of_one(pool, askers, clock, wait_s, asked) -> None:
    pool.on_ask = lambda: clock.advance_s(0.6)
    pool.clients.append(client := pool.attach())
    pool.clients.clear()
    one = ask(clock, wait_s=wait_s, again_s=30.0)
    askers._attach = lambda: client
    over(askers.submit(one))
    assert [wait for _, wait, _ in pool.asked] == pytest.approx(asked)
    assert one.state is AskState.DONE


def test_a_silent_pool_ends_the_ask(pool, askers, clock) -> None:
    pool.silence()
    one = over(askers.submit(ask(clock)))
    assert (one.state, one.origins, one.pins) == (AskState.SILENT, ("",) * len(KEYS), [])
    askers.drop(one)
    pool.silence(silent=False)
    pool.put(KEYS)
    assert over(askers.submit(ask(clock))).state is AskState.DONE


def test_a_pool_that_refuses_ends_the_ask_and_not_the_asker(pool, askers, clock) -> None:
    pool.refusal = NamespaceMismatch("layout", "a", "b")
    assert over(askers.submit(ask(clock))).state is AskState.SILENT
    pool.refusal = None
    assert over(askers.submit(ask(clock))).state is AskState.DONE
    assert len(askers._askers) == 1


def test_what_was_pinned_before_the_pool_fell_silent_is_given_back(pool, askers, clock) -> None:
    pool.put(KEYS[:2])
    pool.on_ask = lambda: pool.silence(silent=len(pool.asked) == 2)
    one = over(askers.submit(ask(clock, again_s=0.5)))
    assert one.state is AskState.SILENT
    assert pool.held == 2
    pool.on_ask = lambda: None
    pool.silence(silent=False)
    askers.drop(one)
    soon(lambda: pool.held == 0)


def test_a_pool_that_is_silent_when_pins_go_back_does_not_end_the_asker(
    pool, askers, clock
) -> None:
    pool.put(KEYS)
    one = over(askers.submit(ask(clock)))
    client = pool.clients[0]

    def release(_refs) -> None:
        pool.silence()
        pool.answer()

    client.release = release
    askers.drop(one)
    soon(lambda: pool.refusal)
    del client.release
    pool.silence(silent=False)
    assert over(askers.submit(ask(clock))).state is AskState.DONE


def test_an_ask_that_is_dropped_while_it_runs_keeps_nothing(pool, askers, clock) -> None:
    pool.put(KEYS)
    gate = Gate()
    pool.on_ask = lambda: gate.pass_through() if pool.asked else None
    one = askers.submit(ask(clock, again_s=0.5))
    gate.wait_reached()
    askers.drop(one)
    gate.open()
    over(one)
    soon(lambda: not one.pins)
    assert pool.held == 0


def gated(pool: DictPool, monkeypatch, askers: int, waiting: int) -> Gate:
    """Let every question wait at a gate, with so many askers."""
    monkeypatch.setattr(asker_module, "ASKERS_MAX", askers)
    monkeypatch.setattr(asker_module, "ASKS_WAITING_MAX", waiting)
    gate = Gate()
    pool.on_ask = lambda: gate.pass_through() if pool.asked else None
    return gate


def test_an_ask_that_is_dropped_before_its_turn_is_never_asked(
    pool, askers, clock, monkeypatch
) -> None:
    gate = gated(pool, monkeypatch, 1, 4)
    first, second = askers.submit(ask(clock)), askers.submit(ask(clock))
    gate.wait_reached()
    askers.drop(second)
    gate.open()
    assert over(second).origins == ("",) * len(KEYS)
    assert over(first).state is AskState.DONE
    assert len(pool.asked) == 1


def test_too_many_asks_are_answered_at_once(pool, askers, clock, monkeypatch) -> None:
    gate = gated(pool, monkeypatch, 2, 4)
    asks = [askers.submit(ask(clock)) for _ in range(7)]
    gate.wait_reached()
    assert [one.state for one in asks[4:]] == [AskState.DONE] * 3
    assert all(one.origins == ("",) * len(KEYS) for one in asks[4:])
    askers.drop(asks[-1])
    assert {one.state for one in asks[:4]} == {AskState.WAITING}
    gate.open()
    for one in asks:
        over(one)
    assert len(pool.clients) == 2
    assert [each.load for each in askers._askers] == [0, 0]


def test_close_ends_what_is_under_way_and_what_waits(pool, clock, monkeypatch) -> None:
    gate = gated(pool, monkeypatch, 1, 8)
    askers = Askers(pool.attach, clock)
    asks = [askers.submit(ask(clock, again_s=1.5)) for _ in range(3)]
    gate.wait_reached()
    threads = [each._thread for each in askers._askers]
    for each in askers._askers:
        each._closing.set()
    gate.open()
    askers.close()
    assert not any(thread.is_alive() for thread in threads)
    assert all(one.state is AskState.DONE for one in asks)
    assert len(pool.asked) == 1
    assert pool.open_clients == 0
    askers.close()
