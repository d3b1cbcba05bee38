"""Fixtures of the tests with a real vLLM. Elsewhere these tests are collected and not run."""

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


def _load(name: str):
    """Make a helper beside this file importable by its name."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


lab = _load("lab")

TEST_S = 180
"""The first test imports vLLM, which takes 20 s on a busy machine, and each starts engines."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give these tests more time, and let vLLM's own warnings pass: they are not ours to mend."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(TEST_S))
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session", autouse=True)
def offline() -> None:
    """Set what vLLM reads from the environment when it is imported."""
    os.environ.update(lab.ENVIRONMENT)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model with plain attention."""
    return str(lab.make_model(tmp_path_factory.mktemp("models") / lab.PLAIN))


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model of which every second layer has a sliding window."""
    return str(lab.make_model(tmp_path_factory.mktemp("models") / lab.HYBRID, lab.HYBRID))


@pytest.fixture
def pools() -> Iterator["lab.Pools"]:
    """Makes pools in processes; all are ended after the test."""
    made = lab.Pools()
    yield made
    made.close()


@pytest.fixture(scope="session")
def plainly() -> Callable[..., list[list[int]]]:
    """What a plain engine generates: the truth that everything here is compared with.

    To be asked before the test has an engine of its own; see `Engine.alive`.
    """
    known: dict[tuple[object, ...], list[int]] = {}

    def generate(model: str, prompts, tokens: int = 16, block_tokens: int = 32):
        def name(each):
            return (model, tuple(each), tokens, block_tokens)

        missing = [each for each in prompts if name(each) not in known]
        if missing:
            options = lab.EngineOptions(model, block_tokens=block_tokens)
            with lab.Engine(options) as engine:
                for each in missing:
                    (known[name(each)],) = engine.generate([each], tokens)
        return [known[name(each)] for each in prompts]

    return generate
