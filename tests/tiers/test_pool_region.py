"""Making, adopting, replacing and sweeping a pool's files."""

import os
from pathlib import Path

import numpy as np
import pytest

from kvfabric.fabric.config import HostConfig
from kvfabric.fabric.errors import ConfigError, Corrupt, Malformed
from kvfabric.fabric.records import TableHeader, control_bytes
from kvfabric.tiers.pool import opening
from kvfabric.tiers.pool.files import mapped_by
from kvfabric.tiers.pool.limits import MemoryLimits, read_limits
from kvfabric.tiers.pool.opening import Origin
from kvfabric.tiers.pool.region import Region, RegionView
from kvfabric.tiers.pool.sweep import SweptFile, sweep

HOST = HostConfig(slot_bytes=4096, region_bytes=16 * 4096 + 100)
MIB = 1 << 20


class FixedClock:
    def __init__(self, unix_s: float) -> None:
        self.unix = unix_s

    def now_s(self) -> float:
        return 0.0

    def unix_s(self) -> float:
        return self.unix

    def sleep_s(self, seconds: float) -> None:
        raise AssertionError(seconds)


def open_region(directory: Path, host: HostConfig = HOST, unix_s: float = 1.0, **more) -> Region:
    return Region.open(str(directory), "run", "node", host, clock=FixedClock(unix_s), **more)


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_new_region_is_private_allocated_and_mapped(tmp_path: Path):
    region = open_region(tmp_path)
    assert files(tmp_path) == ["kvfabric-run-node.control", "kvfabric-run-node.seg0"]
    for path in (region.control_path, *region.segment_paths):
        stat = os.stat(path)
        assert stat.st_mode & 0o777 == 0o600
        assert stat.st_blocks * 512 >= stat.st_size
    assert region.origin is Origin.CREATED
    assert (region.adopted, region.epoch, region.header.slot_count) == (False, 1000, 16)
    assert [len(s) for s in region.segments] == [16 * 4096]
    assert len(region.control) == control_bytes(16)
    assert region.place(3) == (0, 3 * 4096)
    view = region.view(3, 5)
    view[:] = b"bytes"
    assert bytes(region.segments[0][3 * 4096 : 3 * 4096 + 5]) == b"bytes"
    (base,) = region.base_addresses()
    assert np.frombuffer(view, np.uint8).ctypes.data == base + 3 * 4096
    for slot, length in ((16, 1), (-1, 1), (0, 4097)):
        with pytest.raises(Malformed, match="slot"):
            region.view(slot, length)
    region.close(unlink=True)
    region.close(unlink=True)
    assert files(tmp_path) == []


def test_a_region_is_adopted_with_its_inodes_and_bytes(tmp_path: Path):
    first = open_region(tmp_path, unix_s=5.0)
    first.view(2, 4)[:] = b"kept"
    inodes = [os.stat(path).st_ino for path in (first.control_path, *first.segment_paths)]
    first.close(unlink=False)
    second = open_region(tmp_path, unix_s=1.0)
    assert second.origin is Origin.ADOPTED
    assert second.adopted
    assert second.epoch == 5001
    assert TableHeader.decode(second.control) == second.header
    assert bytes(second.view(2, 4)) == b"kept"
    paths = (second.control_path, *second.segment_paths)
    assert [os.stat(path).st_ino for path in paths] == inodes
    second.close(unlink=True)


def test_a_second_pool_on_the_same_files_is_told_who_holds_them(tmp_path: Path):
    region = open_region(tmp_path)
    with pytest.raises(ConfigError) as error:
        open_region(tmp_path)
    assert error.value.field == "run"
    assert f"process {os.getpid()}" in error.value.problem
    assert "another `run` or `node`" in error.value.remedy
    region.close(unlink=True)


def test_the_lock_is_given_back_though_a_view_is_still_held(tmp_path: Path):
    region = open_region(tmp_path)
    array = np.frombuffer(region.segments[0], np.uint8)
    piece = region.view(1, 8)
    control = np.frombuffer(region.control, np.uint8)
    region.close(unlink=False)
    again = open_region(tmp_path)
    assert again.adopted
    piece[:] = b"still ok"
    assert bytes(array[4096:4104]) == bytes(again.view(1, 8)) == b"still ok"
    assert control[0] == ord("K")
    again.close(unlink=True)


def test_another_geometry_is_replaced_when_nobody_has_it_mapped(tmp_path: Path):
    open_region(tmp_path).close(unlink=False)
    region = open_region(tmp_path, HostConfig(slot_bytes=8192, region_bytes=4 * 8192))
    assert region.origin is Origin.REPLACED
    assert "16 slots of 4096 bytes, 4 of 8192 are configured" in region.problem
    assert region.header.slot_count == 4
    region.close(unlink=True)


def test_another_geometry_in_use_is_an_error_that_names_the_users(tmp_path: Path):
    region = open_region(tmp_path)
    view = RegionView.attach(region.control_path, region.segment_paths)
    region.close(unlink=False)
    bigger = HostConfig(slot_bytes=8192, region_bytes=4 * 8192)
    with pytest.raises(ConfigError, match=f"processes \\[{os.getpid()}\\] have it mapped"):
        open_region(tmp_path, bigger)
    assert open_and_close(tmp_path, HOST) is Origin.ADOPTED
    view.close()
    assert open_and_close(tmp_path, bigger) is Origin.REPLACED


def open_and_close(directory: Path, host: HostConfig) -> Origin:
    region = open_region(directory, host)
    region.close(unlink=False)
    return region.origin


def damage(path: str, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize(
    ("offset", "data", "says"),
    [(30, b"\xff", "hash"), (0, b"nonsense", "begins with"), (8, b"\x09", "version 9")],
)
def test_a_header_that_cannot_be_believed_is_replaced_and_reported(
    tmp_path: Path, offset: int, data: bytes, says: str
):
    first = open_region(tmp_path)
    first.close(unlink=False)
    damage(first.control_path, offset, data)
    second = open_region(tmp_path)
    assert second.origin is Origin.REPLACED
    assert says in second.problem
    assert not any(second.control[4096:])
    second.close(unlink=True)


def test_a_corrupt_header_is_replaced_even_while_it_is_mapped(tmp_path: Path):
    first = open_region(tmp_path)
    view = RegionView.attach(first.control_path, first.segment_paths)
    first.close(unlink=False)
    damage(first.control_path, 30, b"\xff")
    view.segments[0][:4] = b"old "
    second = open_region(tmp_path)
    assert second.origin is Origin.REPLACED
    assert bytes(view.view(0, 4)) == b"old "
    assert not any(second.view(0, 4))
    view.close()
    second.close(unlink=True)


def test_a_lost_or_short_segment_is_replaced_and_reported(tmp_path: Path):
    first = open_region(tmp_path)
    first.close(unlink=False)
    os.truncate(first.segment_paths[0], 4096)
    assert open_and_close(tmp_path, HOST) is Origin.REPLACED
    os.unlink(first.segment_paths[0])
    second = open_region(tmp_path)
    assert "has 0 bytes" in second.problem
    second.close(unlink=True)


def test_a_truncated_control_file_is_replaced(tmp_path: Path):
    first = open_region(tmp_path)
    first.close(unlink=False)
    os.truncate(first.control_path, 4096)
    assert open_and_close(tmp_path, HOST) is Origin.REPLACED
    os.truncate(first.control_path, 100)
    assert open_and_close(tmp_path, HOST) is Origin.REPLACED


def test_a_region_too_small_for_one_chunk_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="no room for one chunk of 4096 bytes") as error:
        open_region(tmp_path, HostConfig(slot_bytes=4096, region_bytes=4095))
    assert error.value.field == "host.region_bytes"
    assert files(tmp_path) == []


def machine(memory_kib: int, **cgroup: str):
    """Fakes the files of a machine; keys of `cgroup` name files by their last parts."""
    texts = {
        "/proc/meminfo": f"MemTotal:       {memory_kib} kB\nMemFree: 1 kB\n",
        "/proc/self/cgroup": cgroup.pop("lines", "0::/\n"),
        **cgroup,
    }

    def read(path: str) -> str:
        if path not in texts:
            raise FileNotFoundError(path)
        return texts[path]

    return read


def test_a_region_larger_than_the_machine_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="the machine has 40960"):
        open_region(tmp_path, read=machine(40))
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("lines", "path"),
    [
        ("0::/kube/pod\n", "/sys/fs/cgroup/kube/pod/memory.max"),
        ("0::/kube/pod\n", "/sys/fs/cgroup/kube/memory.max"),
        ("0::/kube/pod\n", "/sys/fs/cgroup/memory.max"),
        ("0::/\n1:name=systemd:/\n", "/sys/fs/cgroup/unified/memory.max"),
        ("4:cpu,memory:/a/b\n0::/\n", "/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes"),
        ("4:memory:/a/b\n", "/sys/fs/cgroup/memory/memory.limit_in_bytes"),
    ],
)
def test_a_region_larger_than_the_cgroup_allows_is_refused(tmp_path: Path, lines: str, path: str):
    read = machine(1 << 20, lines=lines, **{path: "40000\n"})
    with pytest.raises(ConfigError, match="allows 40000") as error:
        open_region(tmp_path, read=read)
    assert path in error.value.problem
    assert "memory limit" in error.value.remedy
    assert files(tmp_path) == []


def test_limits_take_the_least_and_no_limit_is_infinite():
    lines = "0::/a\n4:memory:/b\n"
    none = {
        "/sys/fs/cgroup/a/memory.max": "max\n",
        "/sys/fs/cgroup/memory/b/memory.limit_in_bytes": "9223372036854771712\n",
    }
    assert read_limits(machine(8, lines=lines, **none)) == MemoryLimits(8192, float("inf"), "")
    some = {
        **none,
        "/sys/fs/cgroup/memory.max": "500\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "400\n",
    }
    limits = read_limits(machine(8, lines=lines, **some))
    assert limits.cgroup_bytes == 400
    assert limits.cgroup_file == "/sys/fs/cgroup/memory/memory.limit_in_bytes"

    def unreadable(path: str) -> str:
        raise PermissionError(path)

    assert read_limits(unreadable) == MemoryLimits(float("inf"), float("inf"), "")


def test_a_region_larger_than_the_filesystem_is_refused(tmp_path: Path):
    open_region(tmp_path).close(unlink=False)
    huge = HostConfig(slot_bytes=1 << 30, region_bytes=1 << 50)
    with pytest.raises(ConfigError, match=r"has \d+ free"):
        open_region(tmp_path, huge, read=machine(1 << 45))
    assert open_and_close(tmp_path, HOST) is Origin.ADOPTED
    with pytest.raises(ConfigError, match=r"has \d+ free"):
        Region.open(str(tmp_path), "run", "new", huge, machine(1 << 45))
    assert files(tmp_path) == ["kvfabric-run-node.control", "kvfabric-run-node.seg0"]


def test_a_filesystem_that_fills_up_meanwhile_leaves_no_trace(tmp_path: Path, monkeypatch):
    calls = []

    def fail_second(fd: int, offset: int, size: int) -> None:
        calls.append(size)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(opening.os, "posix_fallocate", fail_second)
    with pytest.raises(ConfigError, match=r"cannot be allocated .* No space left"):
        open_region(tmp_path)
    assert files(tmp_path) == []


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="is not a directory") as error:
        open_region(tmp_path / "absent")
    assert error.value.field == "host.directory"


def test_a_client_maps_the_control_file_read_only(tmp_path: Path):
    region = open_region(tmp_path)
    view = RegionView.attach(region.control_path, region.segment_paths)
    assert view.control.readonly
    with pytest.raises(TypeError):
        view.control[0] = 1
    region.view(5, 3)[:] = b"abc"
    assert bytes(view.view(5, 3)) == b"abc"
    view.view(6, 3)[:] = b"def"
    assert bytes(region.view(6, 3)) == b"def"
    assert view.place(6) == region.place(6)
    assert view.base_addresses() != region.base_addresses()
    array = np.frombuffer(view.control, np.uint8)
    view.close()
    view.close()
    assert array[0] == ord("K")
    region.close(unlink=True)


def test_a_client_refuses_files_that_do_not_belong_together(tmp_path: Path):
    region = open_region(tmp_path)
    with pytest.raises(Corrupt, match="segments of"):
        RegionView.attach(region.control_path, ())
    with pytest.raises(Corrupt, match="begins with"):
        RegionView.attach(region.segment_paths[0], region.segment_paths)
    with pytest.raises(FileNotFoundError):
        RegionView.attach(region.control_path, (str(tmp_path / "absent"),))
    region.close(unlink=True)
    assert not mapped_by([str(tmp_path)])[str(tmp_path)]


def test_sweep_removes_only_what_nobody_locks_or_maps(tmp_path: Path):
    running = Region.open(str(tmp_path), "run", "running", HOST)
    attached = Region.open(str(tmp_path), "run", "attached", HOST)
    view = RegionView.attach(attached.control_path, attached.segment_paths)
    attached.close(unlink=False)
    orphan = Region.open(str(tmp_path), "run", "orphan", HOST)
    orphan.close(unlink=False)
    other = Region.open(str(tmp_path), "other", "orphan", HOST)
    other.close(unlink=False)
    (tmp_path / "kvfabric-run-half.seg0").write_bytes(bytes(4096))
    (tmp_path / "kvfabric-run-node.note").write_text("not ours")
    swept = sweep(str(tmp_path), "run")
    assert [file.path.rpartition("/")[2] for file in swept] == [
        "kvfabric-run-half.seg0",
        "kvfabric-run-orphan.seg0",
        "kvfabric-run-orphan.control",
    ]
    assert swept[1] == SweptFile(orphan.segment_paths[0], 16 * 4096)
    view.close()
    assert [file.path for file in sweep(str(tmp_path), None)] == [
        *other.segment_paths,
        other.control_path,
        *attached.segment_paths,
        attached.control_path,
    ]
    running.close(unlink=True)
    assert files(tmp_path) == ["kvfabric-run-node.note"]
