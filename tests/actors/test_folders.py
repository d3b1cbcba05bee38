"""Where folders of a while are made, what they must offer, and what is said if none can be had."""

import os
import pickle
from pathlib import Path

import pytest

from kvfabric.actors.cluster import LONGEST_SOCKET, SOCKET_PATH_BYTES_MAX
from kvfabric.actors.folders import Need, own_folder, places
from kvfabric.fabric.errors import ConfigError, Refused

NEED = Need("a test", "kvf-test-", 4096)


def test_a_folder_is_removed_with_what_is_in_it(tmp_path) -> None:
    with own_folder(NEED, [str(tmp_path)]) as folder:
        assert Path(folder).parent == tmp_path
        Path(folder, "inside").mkdir()
    assert list(tmp_path.iterdir()) == []


def test_it_is_removed_when_its_owner_fails(tmp_path) -> None:
    with pytest.raises(KeyError), own_folder(NEED, [str(tmp_path)]):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_a_long_path_is_passed_over_for_a_shorter_one(tmp_path) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    room = len(os.fsencode(tmp_path)) + len("/kvf-test-12345678")
    need = Need("a test", "kvf-test-", 4096, room)
    with own_folder(need, [str(long), str(tmp_path)]) as folder:
        assert Path(folder).parent == tmp_path
        assert list(long.iterdir()) == []


def test_the_longest_place_of_ray_leaves_room_for_its_sockets() -> None:
    """What the command line allows is what a socket's path has at most."""
    session = "/ray/session_2026-12-07_11-04-17_610598_2429/sockets/plasma_store.1"
    assert len(LONGEST_SOCKET) >= len(session) + len("4194304") - len("2429")
    assert SOCKET_PATH_BYTES_MAX - len(LONGEST_SOCKET) > len("/var/tmp/kvf-12345678")


def test_every_place_says_what_it_lacks(tmp_path) -> None:
    need = Need("a test", "kvf-test-", 1 << 60)
    with (
        pytest.raises(Refused) as refused,
        own_folder(need, [str(tmp_path), str(tmp_path / "absent")]),
    ):
        pass
    assert list(tmp_path.iterdir()) == []
    said = str(refused.value)
    assert said.startswith(f"no folder for a test: {tmp_path}: ")
    assert "1099511627776 MiB are needed" in said
    assert f"{tmp_path / 'absent'}: No such file or directory" in said
    assert "TMPDIR" in said
    assert isinstance(refused.value, ConfigError)
    assert str(pickle.loads(pickle.dumps(refused.value))) == said


def test_the_users_own_place_comes_first_and_each_once() -> None:
    assert places({"TMPDIR": "/scratch"}) == ("/scratch", "/tmp", "/var/tmp")
    assert places({"TMPDIR": "/var/tmp"}) == ("/var/tmp", "/tmp")
    assert places({}) == places({"TMPDIR": ""}) == ("/tmp", "/var/tmp")
