"""What the tests of actors share: a network of Ray's own, patience with a deadline, helpers."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvfabric.actors.netns import isolate_network
from kvfabric.actors.quiet import quiet_ray
from kvfabric.fabric.clock import SystemClock

LOOK_S = 0.02


def _load(name: str) -> None:
    """Make a helper beside this file importable by its name."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


for _name in ("vllm_yard", "vllm_model", "vllm_engine", "vllm_steps"):
    _load(_name)


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
