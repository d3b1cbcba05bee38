"""`ray job submit` of the example, on a cluster that nobody prepared for the fabric, and on a
machine on which nothing has run yet.

Once from the checkout. Once from a `git archive` zip, out of which the package's links come as
plain files, with the rooms from a wheel.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(150)]

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
ROOMS = ("actors", "fabric", "kernels", "router", "tiers")
DASHBOARD = "http://127.0.0.1:8265"
SMALL = ["--conversations", "2", "--turns", "2", "--scale", "0.03125", "--output-tokens", "8"]


def environment() -> dict[str, str]:
    """Return this process's environment; `python` is this one, and finds no kvfabric by a path."""
    env = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "RAY_ADDRESS": DASHBOARD}
    env.pop("PYTHONPATH", None)
    # pip would otherwise fetch Ray and torch once more, for a wheel that is a py_module.
    env["PIP_NO_DEPS"] = "1"
    return env


def submit(*arguments, cwd, machine=None):
    command = [BIN / "ray", "job", *arguments]
    return subprocess.run(
        machine.command(command) if machine else list(map(str, command)),
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
        timeout=120,
    )


def start(machine, log, *options):
    """Run `ray start` until it is terminated."""
    env = environment()
    del env["RAY_ADDRESS"]
    command = [BIN / "ray", "start", "--block", "--object-store-memory=80000000", *options]
    with log.open("w") as out:
        return subprocess.Popen(machine.command(command), stdout=out, stderr=out, env=env)


@pytest.fixture(scope="module")
def cluster_machine(new_machine):
    """The machine that the whole cluster runs on; nothing has run on it before."""
    return new_machine()


@pytest.fixture(scope="module")
def head(private_network, cluster_machine, tmp_path_factory, until) -> Iterator[None]:
    """A head node with its dashboard and a second node, as `ray start` makes them, no labels."""
    # Short: Ray puts sockets there, and their paths have a limit of 107 bytes.
    folder = Path(tempfile.gettempdir()) / f"kvj-{os.getpid()}"
    logs = tmp_path_factory.mktemp("logs")
    dashboard = ["--dashboard-host=127.0.0.1", "--dashboard-port=8265"]
    options = ["--head", "--port=6379", "--num-cpus=2", f"--temp-dir={folder}", *dashboard]
    nodes = [start(cluster_machine, logs / "head", *options)]
    try:
        until(lambda: submit("list", cwd=ROOT).returncode == 0, 60, "the dashboard answers")
        # Agents of two nodes with one address need two ports.
        options = ["--address=127.0.0.1:6379", "--num-cpus=1", "--dashboard-agent-listen-port=0"]
        nodes.append(start(cluster_machine, logs / "second", *options))
        log = logs / "second"
        until(lambda: "Ray runtime started" in log.read_text(), 60, "the second node runs")
        yield
    finally:
        for node in reversed(nodes):
            node.terminate()
            node.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


def ran(job, code_in):
    """Check what a job printed; return its JSON object."""
    assert job.returncode == 0, job.stdout + job.stderr
    lines = job.stdout.splitlines()
    (summary,) = (json.loads(line) for line in lines if line.startswith('{"requests"'))
    assert summary["tokens_identical"] is True
    assert summary["requests"] == 4
    assert sum(summary["reused_tokens"].values()) > 0
    # What one node prefills, the other decodes.
    assert summary["handoff_tokens"] > 0
    assert summary["bytes"]["peer"] > 0
    assert "What the fabric saved" in job.stdout
    (started,) = (line for line in lines if line.startswith("started the fabric"))
    assert code_in in started
    assert not list(Path("/dev/shm").glob("kvfabric-multi-turn-*"))
    return summary


def test_the_example_runs_as_a_job_from_the_checkout(head, cluster_machine):
    command = ["submit", "--working-dir", ROOT, "--", "python", "examples/multi_turn.py", *SMALL]
    summary = ran(submit(*command, cwd=ROOT, machine=cluster_machine), "working_dir_files")
    assert summary["faults"] == 0


@pytest.mark.soak  # because it takes as long as one that runs
def test_a_job_that_cannot_run_fails_with_the_reason(head):
    command = ["submit", "--working-dir", ".", "--", "python", "examples/multi_turn.py"]
    job = submit(*command, "--scale", "0.3", cwd=ROOT)
    assert job.returncode == 1
    assert "multi_turn: scale: 0.3 makes 153.6 tokens" in job.stdout + job.stderr


@pytest.fixture(scope="module")
def archive(tmp_path_factory) -> Path:
    """A folder with `kvfabric.zip`, the `tree` in it, the wheel in `dist`, and it `unpacked`.

    The archive is that of the checkout with its changes: a commit that no branch has.
    """
    folder = tmp_path_factory.mktemp("archive")
    git = ["git", "-C", str(ROOT)]
    if subprocess.run([*git, "rev-parse"], capture_output=True, check=False).returncode:
        pytest.skip("this is no git checkout")
    changed = subprocess.check_output([*git, "stash", "create"], text=True).strip()
    target = f"--output={folder / 'kvfabric.zip'}"
    subprocess.run([*git, "archive", "--format=zip", target, changed or "HEAD"], check=True)
    with zipfile.ZipFile(folder / "kvfabric.zip") as packed:
        packed.extractall(folder / "tree")
    for room in ROOMS:
        assert (folder / "tree" / "kvfabric" / room).read_text() == f"../{room}"
    whole = folder / "whole"
    shutil.copytree(folder / "tree", whole)
    for room in ROOMS:
        (whole / "kvfabric" / room).unlink()
        shutil.copytree(whole / room, whole / "kvfabric" / room)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", whole]
    subprocess.run(build, cwd=folder, check=True, capture_output=True)
    (wheel,) = (folder / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder / "unpacked")
    return folder


def with_modules(archive, working_dir, module):
    modules = json.dumps({"py_modules": [str(module)]})
    options = ["--working-dir", working_dir, "--runtime-env-json", modules]
    command = ["submit", *options, "--", "python", "examples/multi_turn.py", *SMALL]
    return submit(*command, cwd=archive)


def test_the_example_runs_from_an_archive_beside_an_unpacked_wheel(head, archive):
    ran(with_modules(archive, "kvfabric.zip", "unpacked/kvfabric"), "py_modules_files")


@pytest.mark.soak  # like the one above, but for how Ray installs a wheel
def test_the_example_runs_from_an_archive_with_the_wheel_itself(head, archive):
    (wheel,) = (archive / "dist").glob("*.whl")
    ran(with_modules(archive, "tree", wheel.relative_to(archive)), "py_modules_files")
