"""What every test shares: a clock that stands still, one seed, quiet Ray, and a clean exit.

The clean exit: after the last test no process that the session started may be alive, and no file
named kvfabric-* that nobody holds may be left in shared memory. Either fails the run.
"""

import importlib.util
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from kvfabric.fabric.clock import SystemClock

SEED = int(os.environ.get("KVFABRIC_SEED") or 1)
MARK = os.urandom(8).hex()
"""In the environment of every process that this session starts, so that orphans are known too."""
GRACE_S = 5.0
"""Ray's processes end a little after `ray.shutdown` returns."""
SHARED_MEMORY = Path("/dev/shm")

os.environ |= {
    "KVFABRIC_TEST_SESSION": MARK,
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_DOCKER_CPU_WARNING": "1",
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
}
# A cluster that happens to run on this machine must not take the tests' actors.
os.environ.pop("RAY_ADDRESS", None)

settings.register_profile("default", deadline=None, derandomize=True, max_examples=25)
settings.register_profile(
    "soak",
    deadline=None,
    max_examples=2000,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("default")


def pytest_report_header() -> str:
    """Say the seed before the first test."""
    return f"seed: KVFABRIC_SEED={SEED}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say the seed again under a failure, where it is wanted."""
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(f"To repeat: KVFABRIC_SEED={SEED}")


class FakeClock:
    """A `fabric.clock.Clock` that moves only when it is told to.

    `sleep_s` returns at once and moves the clock by what was asked.
    """

    def __init__(self, now_s: float = 1000.0, unix_s: float = 1_700_000_000.0) -> None:
        self._now_s = now_s
        self._offset_s = unix_s - now_s

    def now_s(self) -> float:
        """Return the clock's seconds."""
        return self._now_s

    def unix_s(self) -> float:
        """Return seconds since the epoch; moves with `now_s`."""
        return self._now_s + self._offset_s

    def sleep_s(self, seconds: float) -> None:
        """Move the clock instead of waiting."""
        self.advance_s(seconds)

    def advance_s(self, seconds: float) -> None:
        """Let time pass. Raises `ValueError` for a step back."""
        if seconds < 0:
            raise ValueError(f"the clock never goes back: {seconds}")
        self._now_s += seconds


@pytest.fixture
def clock() -> FakeClock:
    """A clock that stands still until `advance_s`."""
    return FakeClock()


@pytest.fixture(scope="session")
def seed() -> int:
    """The session's seed: 1, or KVFABRIC_SEED."""
    return SEED


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """A generator of this test's own, from the session's seed and the test's name."""
    return random.Random(f"{SEED} {request.node.nodeid}")


def beside(name: str) -> Any:
    """Make a helper beside this file importable by its name, and return it."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def new_machine(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Any]:
    """Return what makes a machine with an empty /tmp and an empty home folder."""
    helper = beside("fresh_machine")
    return lambda: helper.FreshMachine.make(tmp_path_factory.mktemp("fresh"))


@pytest.fixture
def machine(new_machine: Callable[[], Any]) -> Any:
    """A machine on which nothing has run yet, for one test."""
    return new_machine()


@pytest.fixture(scope="session", autouse=True)
def clean_exit() -> Iterator[None]:
    """Fail the run if it leaves a process or a file in shared memory behind."""
    there_before = shared_files()
    yield
    real = SystemClock()
    deadline_s = real.now_s() + GRACE_S
    while True:
        processes = own_processes()
        files = {path for path in shared_files() - there_before if not is_held(path)}
        if not (processes or files) or real.now_s() > deadline_s:
            break
        real.sleep_s(0.05)
    names = [f"{pid}: {command_line(pid)}" for pid in sorted(processes)]
    for pid in processes:
        os.kill(pid, signal.SIGKILL)
    if names or files:
        pytest.fail(
            f"left running (ended now): {names or 'nothing'}; left in {SHARED_MEMORY}: "
            f"{sorted(path.name for path in files) or 'nothing'}",
            pytrace=False,
        )


def shared_files() -> set[Path]:
    """Return what lies in shared memory under our name."""
    return {path for path in SHARED_MEMORY.glob("kvfabric-*") if path.is_file()}


def is_held(path: Path) -> bool:
    """Whether a living process maps or has open this file: it then belongs to another session."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(path) in (process / "maps").read_text():
                return True
            if any(os.readlink(fd) == str(path) for fd in (process / "fd").iterdir()):
                return True
        except OSError:  # it ended, or belongs to somebody else
            continue
    return False


def own_processes() -> set[int]:
    """Return the living descendants of this session, orphans included.

    Descendants are found by parent; orphans by the session's mark in their environment (a process
    that renames itself may overwrite it, so that neither way is enough).
    """
    parents: dict[int, int] = {}
    marked: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (process / "stat").read_text().rpartition(")")[2].split()[:2]
            if state in "ZX":
                continue
            parents[int(process.name)] = int(parent)
            if f"KVFABRIC_TEST_SESSION={MARK}".encode() in (process / "environ").read_bytes():
                marked.add(int(process.name))
        except OSError:
            continue
    found = marked | {os.getpid()}
    while True:
        children = {pid for pid, parent in parents.items() if parent in found}
        if children <= found:
            break
        found |= children
    # Python's own helper lives exactly as long as this process.
    helpers = {pid for pid in found if "multiprocessing.resource_tracker" in command_line(pid)}
    return found - helpers - {os.getpid()}


def command_line(pid: int) -> str:
    """Return the first 200 characters of a process' command line; empty if it ended."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return arguments.replace(b"\0", b" ").decode(errors="replace")[:200].strip()
