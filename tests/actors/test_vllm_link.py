"""The way to the pool: attached, tried again, left alone, refused, closed."""

import threading

import pytest
from vllm_yard import DictPool, Gate, soon

from kvfabric.actors.engines.vllm import link as link_module
from kvfabric.actors.engines.vllm.link import Link
from kvfabric.actors.engines.vllm.settings import PAUSE_S
from kvfabric.fabric.errors import NamespaceMismatch, Unavailable


@pytest.fixture
def pool() -> DictPool:
    return DictPool()


@pytest.fixture
def link(pool, clock):
    made = Link(pool.attach, clock)
    yield made
    made.close()
    assert made.client is None
    assert pool.open_clients == 0


@pytest.fixture
def impatient(monkeypatch) -> None:
    """Try again at once."""
    monkeypatch.setattr(link_module, "PAUSE_S", 0.001)


def test_a_pool_that_answers_is_attached_at_once(pool, link) -> None:
    assert link.client is None
    link.open()
    assert link.client is pool.clients[0]
    link.close()
    link.close()
    assert pool.clients[0].closed


def test_a_pool_that_does_not_answer_is_found_when_it_does(pool, link, impatient) -> None:
    pool.silence()
    link.open()
    assert link.client is None
    pool.silence(silent=False)
    soon(lambda: link.client)
    assert len(pool.clients) == 1


def test_it_is_tried_until_it_answers(pool, link, impatient) -> None:
    tries: list[int] = []

    def answer() -> None:
        tries.append(1)
        if len(tries) < 5:
            raise Unavailable("the pool", 0.1, "Start it.")

    pool.on_ask = answer
    link.open()
    soon(lambda: link.client)
    assert len(tries) == 5


def test_what_the_pool_refuses_is_raised(pool, link) -> None:
    pool.refusal = NamespaceMismatch("layout", "a", "b")
    with pytest.raises(NamespaceMismatch):
        link.open()
    assert link.client is None


def test_what_it_refuses_later_is_said_once_and_the_engine_goes_on(
    pool, link, impatient, caplog
) -> None:
    pool.silence()
    link.open()
    pool.refusal = NamespaceMismatch("layout", "a", "b")
    soon(lambda: not link._thread.is_alive())
    assert link.client is None
    assert [r.levelname for r in caplog.records].count("ERROR") == 1
    assert "layout" in caplog.text


def test_a_silent_pool_is_left_alone_for_a_while(link, clock) -> None:
    link.open()
    client = link.client
    link.silence()
    assert link.client is None
    clock.advance_s(PAUSE_S * 0.99)
    assert link.client is None
    clock.advance_s(PAUSE_S * 0.02)
    assert link.client is client


def test_close_does_not_wait_for_the_next_try(pool, link) -> None:
    pool.silence()
    link.open()
    link.close()
    assert not link._thread.is_alive()


def test_close_lets_go_of_what_a_try_that_was_under_way_brought(pool, link, impatient) -> None:
    gate, main = Gate(), threading.current_thread()
    pool.silence()
    link.open()

    def wait() -> None:
        if threading.current_thread() is not main:
            pool.silence(silent=False)
            gate.pass_through()

    pool.on_ask = wait
    gate.wait_reached()
    closer = threading.Thread(target=link.close)
    closer.start()
    soon(link._closing.is_set)
    gate.open()
    closer.join()
    assert link.client is None
    assert [client.closed for client in pool.clients] == [True]
