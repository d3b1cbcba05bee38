"""The pool's server in this process: what its one thread survives, and what callers are told."""

import os
import threading

import pytest
from pool_yard import CLOCK

from kvfabric.fabric.errors import Closed, Unavailable
from kvfabric.tiers.pool import server as server_module
from kvfabric.tiers.pool.process import this_process
from kvfabric.tiers.pool.server import PoolServer


@pytest.fixture
def server(yard, monkeypatch):
    monkeypatch.setattr(server_module, "CALL_S", 1.0)
    made = PoolServer(yard.config(), CLOCK)
    made.start()
    yield made
    made.stop(unlink=True)


def on_its_thread(server: PoolServer, work) -> object:
    return server._call(work)


def test_a_lease_that_ends_after_the_tick_does_not_stop_the_loop(server) -> None:
    def end_a_lease() -> None:
        now_s = CLOCK.now_s()
        server.directory.open_owner("late", 1.0, *this_process(), now_s)
        server.directory.renew("late", now_s + 2.0)

    on_its_thread(server, end_a_lease)
    assert server.stats()["lapses"] == 1
    assert server.stats().get('kvfabric_loop_errors_total{loop="pool"}', 0) == 0


def test_a_stopped_server_says_so_and_touches_no_descriptor(server) -> None:
    server.stop(unlink=True)
    reading, writing = os.pipe()  # may have the number that the server's pipe had
    for call in (server.stats, server.metrics, server.check):
        with pytest.raises(Closed):
            call()
    os.close(writing)
    assert os.read(reading, 1) == b""
    os.close(reading)


def test_a_call_that_takes_too_long_is_unavailable(server) -> None:
    may_end = threading.Event()
    with pytest.raises(Unavailable):
        on_its_thread(server, may_end.wait)
    may_end.set()
