"""The router actor's thread, without Ray."""

import pytest

from kvfabric.actors import router


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_router_goes_on_after_an_error_of_any_kind(monkeypatch, caplog, until):
    monkeypatch.setattr(router, "find_pools", lambda *_: [])
    turns = iter([OSError("unforeseen"), None, SystemExit])

    def poll(_ingest, _timeout_ms):
        outcome = next(turns)
        if outcome is not None:
            raise outcome

    monkeypatch.setattr(router.Ingest, "poll", poll)
    shell = router.RouterShell("loop", [])
    try:
        until(lambda: not shell._thread.is_alive(), 5, "the thread has ended")
        assert next(turns, "none left") == "none left"
        assert "an unexpected error escaped" in caplog.text
        text = shell.metrics().decode()
        assert 'kvfabric_loop_errors_total{loop="router"} 1.0' in text
    finally:
        shell._socket.close()
        shell._context.term()
