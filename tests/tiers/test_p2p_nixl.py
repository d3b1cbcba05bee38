"""NIXL in processes of its own (`p2p_peer.py`): one that made an agent cannot exit in order."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvfabric.fabric.errors import Unsupported
from kvfabric.tiers.p2p import nixl

DEADLINE_S = 2.0


def run(scenario: str, **environment: str):
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("p2p_peer.py")), scenario],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("listen", "devices"),
    [
        ("tcp://127.0.0.1:*", "lo"),
        ("tcp://localhost:5555", "lo"),
        ("tcp://[::1]:5555", "lo"),
        ("tcp://10.0.0.7:*", ""),
        ("tcp://0.0.0.0:5555", ""),
        ("tcp://node7:5555", ""),
        ("tcp://*:5555", ""),
    ],
)
def test_devices_follow_the_listening_address(listen, devices):
    assert nixl.devices_for(listen) == devices


def test_without_nixl_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setattr(nixl, "PACKAGES", ("no_such_package", "json.decoder"))
    with pytest.raises(Unsupported, match=r"peers\.transport"):
        nixl.load_bindings()


def test_bindings_that_do_not_load_are_unsupported(monkeypatch, tmp_path):
    package = tmp_path / "broken_nixl"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('the package must not run')")
    (package / "_bindings.py").write_text("raise ImportError('libucp.so.0 not found')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(nixl, "PACKAGES", ("broken_nixl",))
    with pytest.raises(Unsupported, match=r"libucp\.so\.0"):
        nixl.load_bindings()


@pytest.mark.nixl
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("ss") is None, reason="needs ss")
def test_an_agent_imports_no_torch_and_listens_on_loopback_alone():
    agent = run("agent")
    assert agent["name"] == "node.3"
    assert not agent["torch"]
    assert agent["listening"]
    assert all(address.startswith("127.0.0.1:") for address in agent["listening"])


@pytest.mark.nixl
@pytest.mark.slow
def test_two_processes_pull_and_a_killed_source_is_a_miss():
    result = run("pull")
    assert (result["first"], result["commits"]) == ({"HIT": 8, "MISS": 1}, 8)
    assert result["right"]
    assert result["killed"] == result["after"] == {"MISS": 1}
    assert result["killed_s"] < DEADLINE_S
    assert result["after_s"] < 0.1


@pytest.mark.nixl
@pytest.mark.slow
@pytest.mark.parametrize("wires", ["all", "tcp"])
def test_a_killed_peer_fails_reads_and_raises_nothing(wires):
    result = run("death", UCX_TLS=wires)
    assert result["alive"][0] == "DONE"
    assert result["during"][0] == ("DONE" if wires == "all" else "FAILED")
    assert result["before"][0] == result["unknown"][0] == "FAILED"
    assert max(took_s for _, took_s in result.values()) < DEADLINE_S


@pytest.mark.nixl
@pytest.mark.slow
def test_slots_under_a_read_from_a_stopped_source_are_kept_aside():
    result = run("stopped", UCX_TLS="tcp")
    assert result["first"] == {"HIT": 8}
    assert result["stopped"] == {"MISS": 8}
    assert result["stopped_s"] < DEADLINE_S
    assert not result["early"]
    assert result["doomed"] == result["aborted"] == 8
