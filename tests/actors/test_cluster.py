"""What a local cluster does to its process, without starting one."""

import os
import signal

import pytest

from kvfabric.actors.cluster import _ended_by_sigterm


def test_sigterm_ends_the_process_past_its_finally_clauses() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, _ended_by_sigterm():
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before
