"""What the tests with a real Ray share: a network of their own, and patience with a deadline."""

from collections.abc import Callable
from typing import Any

import pytest

from kvfabric.actors.netns import isolate_network
from kvfabric.actors.quiet import quiet_ray
from kvfabric.fabric.clock import SystemClock

LOOK_S = 0.02


@pytest.fixture(scope="session")
def private_network() -> None:
    """Keep every cluster of this session on a loopback interface of its own, where allowed."""
    quiet_ray()
    isolate_network()


@pytest.fixture(scope="session")
def until() -> Callable[..., Any]:
    """Look until a condition is true and return what it said; fail when the time is over."""
    clock = SystemClock()

    def look(condition: Callable[[], Any], within_s: float, what: str) -> Any:
        deadline_s = clock.now_s() + within_s
        while not (said := condition()):
            assert clock.now_s() < deadline_s, f"not within {within_s:g} s: {what}"
            clock.sleep_s(LOOK_S)
        return said

    return look
