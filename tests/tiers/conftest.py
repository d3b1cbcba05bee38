"""Fixtures of the tests of tiers."""

import importlib.util
import sys
from pathlib import Path

import pytest

_SPEC = importlib.util.spec_from_file_location("pool_yard", Path(__file__).parent / "pool_yard.py")
pool_yard = sys.modules["pool_yard"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(pool_yard)


@pytest.fixture
def yard():
    """Pools and clients in processes; all are ended after the test."""
    made = pool_yard.Yard()
    yield made
    made.close()
