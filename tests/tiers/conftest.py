"""Fixtures of the tests of tiers."""

import importlib.util
import sys
from pathlib import Path

import pytest


def _load(name: str):
    """Make a helper beside this file importable by its name."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pool_yard = _load("pool_yard")
_load("pool_world")


@pytest.fixture
def yard():
    """Pools and clients in processes; all are ended after the test."""
    made = pool_yard.Yard()
    yield made
    made.close()
