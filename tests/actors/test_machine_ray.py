"""The commands on machines that are not ours alone, or that refuse what is asked of them.

Every machine here has an empty /tmp and an empty home folder. All demos listen on one network, that
of the test session, so that ports are shared too.
"""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ray = pytest.importorskip("ray")

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(150),
    pytest.mark.usefixtures("private_network"),
]

ROOT = Path(__file__).parents[2]
DEMO_S = 120
LITTLE = ["--conversations", "1", "--turns", "2", "--scale", "0.03125", "--output-tokens", "8"]
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
USERS_PORT = 6391
WHO = (
    "import ray; ray.init(address='auto', logging_level=50); print(ray.util.get_node_ip_address(), \
ray.get_runtime_context().gcs_address, [n['Labels'].get('kvfabric/node') for n in ray.nodes()])"
)


@pytest.fixture(autouse=True)
def namespaces(machine) -> None:
    if not machine.possible:
        pytest.skip("this system lets nobody make a mount namespace, so no machine is new")


def kvfabric(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvfabric", *arguments]


def demo(machine, *options: str, **variables: str) -> "subprocess.Popen[str]":
    plot = machine.home(f"{'-'.join(variables) or 'demo'}.png")
    command = kvfabric("demo", "--network", "host", "--plot", plot, *LITTLE, *options)
    return subprocess.Popen(
        machine.command(command),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"COLUMNS": "100"} | variables,
    )


def passes(running: "subprocess.Popen[str]") -> None:
    out, err = running.communicate(timeout=DEMO_S)
    assert running.returncode == 0, out + err
    assert "every generated token equals" in out


def test_two_demos_at_once_do_not_see_each_other(machine) -> None:
    """One of them with a TMPDIR that has no room for the names of Ray's sockets."""
    long = Path("/tmp", "a-long-name-" * 8)
    (machine.folder / "tmp" / long.name).mkdir()
    with demo(machine) as one, demo(machine, TMPDIR=str(long)) as other:
        passes(one)
        passes(other)
    assert machine.left() == [long.name]
    assert not list((machine.folder / "tmp" / long.name).iterdir())


@pytest.fixture
def users_cluster(machine, until, tmp_path) -> Iterator[Path]:
    """A cluster that somebody else runs, as `ray start` makes it; yields its address file."""
    ray_command = Path(sys.executable).parent / "ray"
    options = [f"--port={USERS_PORT}", "--num-cpus=1", "--include-dashboard=false"]
    command = [ray_command, "start", "--head", "--block", "--object-store-memory=80000000"]
    log = tmp_path / "log"
    with log.open("w") as out:
        head = subprocess.Popen(machine.command([*command, *options]), stdout=out, stderr=out)
    try:
        until(lambda: "Ray runtime started" in log.read_text(), 60, "the user's cluster runs")
        noted = machine.folder / "tmp" / "ray" / "ray_current_cluster"
        until(lambda: noted.exists() and noted.read_bytes(), 10, "its address is noted")
        yield noted
    finally:
        head.terminate()
        head.wait(30)


def auto(machine) -> str:
    """Return which cluster a user's own program reaches without naming one."""
    done = subprocess.run(
        machine.command([sys.executable, "-c", WHO]),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.strip()


def test_a_demo_beside_a_users_cluster_leaves_it_alone(machine, users_cluster, until) -> None:
    noted, reached = users_cluster.read_bytes(), auto(machine)
    assert noted.decode().endswith(f":{USERS_PORT}")
    assert f":{USERS_PORT} [None]" in reached
    with demo(machine, RAY_ADDRESS=noted.decode()) as running:
        own = "kvf-*/ray/ray_current_cluster"
        notes = until(lambda: [*(machine.folder / "tmp").glob(own)], 60, "the demo's cluster runs")
        assert notes[0].read_bytes() != noted
        assert auto(machine) == reached
        assert running.poll() is None, "that was asked while both ran"
        passes(running)
    assert users_cluster.read_bytes() == noted
    assert auto(machine) == reached
    assert machine.left() == ["ray"]


@pytest.fixture
def one_port(until) -> Iterator[None]:
    """Leave the session's network no port to hand out."""
    before = PORT_RANGE.read_text()
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        PORT_RANGE.write_text(f"{port} {port}")
        try:
            yield
        finally:
            PORT_RANGE.write_text(before)


GCS = Path(ray.__file__).parent / "core" / "src" / "ray" / "gcs" / "gcs_server"
REFUSALS = {
    "no shared memory for a region": (
        ["--size", "65536", "/dev/shm"],
        r"host\.region_bytes: the region needs \d+ bytes, /dev/shm has \d+ free\. .*shm size",
    ),
    "no disk": (
        ["--size", "1048576", "/tmp", "--size", "1048576", "/var/tmp"],
        r"no folder for the file tier: /tmp: 1 MiB are free, 64 MiB are needed; .*TMPDIR",
    ),
    "no folder": (
        ["--size", "0", "/tmp", "--size", "0", "/var/tmp"],
        r"no folder for the file tier: /tmp: Read-only file system; /var/tmp: .*TMPDIR",
    ),
    "shared memory is read-only": (
        ["--size", "0", "/dev/shm"],
        r"host\.directory: /dev/shm cannot be used: Read-only file system\. Name a directory",
    ),
    "Ray in time": (
        ["--file", "SLOW", str(GCS)],
        r"Ray: it did not come up: Timed out waiting for file .*--debug",
    ),
}


def refused(machine, options, arguments, said) -> str:
    """Run a command that must end in one sentence; return all that it wrote there."""
    slow = machine.folder / "home" / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 100\n")
    slow.chmod(0o755)
    options = [machine.home("slow") if each == "SLOW" else each for each in options]
    done = subprocess.run(
        machine.command(kvfabric(*arguments), *options),
        capture_output=True,
        text=True,
        check=False,
        timeout=DEMO_S,
        env=os.environ | {"RAY_gcs_server_port_wait_time_s": "3"},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    sentence = done.stderr.splitlines()[-1]
    assert re.match(f"kvfabric: {said}", sentence), done.stderr
    assert machine.left() == []
    return done.stderr


@pytest.mark.parametrize("kind", REFUSALS)
def test_what_the_machine_refuses_a_demo_is_one_sentence(machine, kind) -> None:
    options, said = REFUSALS[kind]
    plot = machine.home("demo.png")
    arguments = ["demo", "--network", "host", "--plot", plot, *LITTLE]
    assert len(refused(machine, options, arguments, said).splitlines()) == 1


def test_no_port_is_one_sentence(machine, one_port) -> None:
    plot = machine.home("demo.png")
    arguments = ["demo", "--network", "host", "--plot", plot, *LITTLE]
    said = r"Ray: it did not come up: address already in use \(gcs_server.*ip_local_port_range"
    assert len(refused(machine, [], arguments, said).splitlines()) == 1


@pytest.mark.parametrize("name", ["pool", "p2p"])
@pytest.mark.parametrize("kind", ["no shared memory for a region", "shared memory is read-only"])
def test_what_the_machine_refuses_a_benchmark_is_one_sentence(machine, name, kind) -> None:
    options, said = REFUSALS[kind]
    assert len(refused(machine, options, ["bench", name], said).splitlines()) == 1


def test_with_debug_there_is_the_traceback_and_what_ray_said(machine) -> None:
    options, said = REFUSALS["Ray in time"]
    plot = machine.home("demo.png")
    arguments = ["demo", "--debug", "--network", "host", "--plot", plot, *LITTLE]
    written = refused(machine, options, arguments, said)
    assert "Traceback (most recent call last)" in written
    assert "start_gcs_server" in written
    assert "Ray said:" in written
