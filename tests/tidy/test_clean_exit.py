"""The session's own guard (tests/conftest.py) notices what a test leaves behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
LEAKS = """
import subprocess, sys

def test_leaves_a_child():
    global child  # or its destructor would warn first
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

def test_leaves_an_orphan():
    program = "import os, signal\\nif os.fork() == 0: signal.pause()"
    subprocess.run([sys.executable, "-c", program], check=True)

def test_leaves_a_file():
    open("/dev/shm/kvfabric-{name}", "w").close()
"""


def run_inner(folder: Path, test: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    (folder / "conftest.py").write_text(CONFTEST.read_text() + "\nGRACE_S = 0.2\n")
    (folder / "test_inner.py").write_text(test)
    (folder / "pytest.ini").write_text("[pytest]\n")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", folder],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_the_guard_names_what_was_left(tmp_path: Path) -> None:
    name = f"guard-{os.getpid()}"
    try:
        ran = run_inner(tmp_path / "leaks", LEAKS.format(name=name))
    finally:
        Path(f"/dev/shm/kvfabric-{name}").unlink()
    assert ran.returncode == 1
    assert "3 passed, 1 error" in ran.stdout
    for left in ("input()", "signal.pause()", f"kvfabric-{name}"):
        assert left in ran.stdout
    assert "KVFABRIC_SEED=" in ran.stdout


@pytest.mark.slow
def test_the_guard_lets_a_clean_run_pass(tmp_path: Path) -> None:
    ran = run_inner(tmp_path / "clean", "def test_nothing(clock):\n    clock.advance_s(1)\n")
    assert ran.returncode == 0, ran.stdout
