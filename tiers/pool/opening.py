"""Making, adopting or replacing a pool's files, and the checks of what would fail later."""

import os
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path

from ...fabric.config import HostConfig
from ...fabric.errors import ConfigError, Corrupt, Malformed, Refused
from ...fabric.records import TableHeader, control_bytes
from .files import (
    MODE,
    PoolFiles,
    allocated_bytes,
    lock_holder,
    mapped_by,
    open_locked,
    unlink_quietly,
    unlock,
)
from .limits import MemoryLimits, ReadText
from .mapping import Mapping
from .table import format_table, new_header, write_header


class Origin(IntEnum):
    """Where a region's files came from."""

    CREATED = 0
    ADOPTED = 1
    REPLACED = 2
    """There were files that could not be adopted; the region says why."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A pool's files, mapped and locked."""

    header: TableHeader
    control: Mapping
    segments: tuple[Mapping, ...]
    lock: int
    """The descriptor that holds the lock."""
    origin: Origin
    problem: str
    """Why earlier files were replaced; empty unless REPLACED."""


def geometry(host: HostConfig) -> TableHeader:
    """Return the header that a configuration asks for, with epoch 0. Raises `ConfigError`."""
    slot_count = host.region_bytes // host.slot_bytes
    if slot_count == 0:
        raise ConfigError(
            "host.region_bytes",
            f"{host.region_bytes} bytes have no room for one chunk of {host.slot_bytes} bytes",
            "Enlarge host.region_bytes, best to thousands of chunks.",
        )
    return new_header(slot_count, host.slot_bytes, slot_count * host.slot_bytes, 0)


def require_memory(wanted: TableHeader, limits: MemoryLimits) -> None:
    """Raise `Refused` if a region is larger than the machine's or the cgroup's memory."""
    needed = _needed_bytes(wanted)
    if needed > limits.machine_bytes:
        raise Refused(
            "host.region_bytes",
            f"the region needs {needed} bytes, the machine has {limits.machine_bytes:.0f}",
            "Lessen it, and leave room for the engines and for what they pin.",
        )
    if needed > limits.cgroup_bytes:
        raise Refused(
            "host.region_bytes",
            f"the region needs {needed} bytes, {limits.cgroup_file} allows "
            f"{limits.cgroup_bytes:.0f}",
            "Lessen it, or raise the container's memory limit: shared memory counts.",
        )


def open_files(files: PoolFiles, wanted: TableHeader, unix_ms: int, read: ReadText) -> Opened:
    """Lock, then make, adopt or replace. Raises `ConfigError` and leaves what was there."""
    lock = _lock(files, read)
    try:
        if os.fstat(lock).st_size == 0:
            return _create(files, wanted, unix_ms, lock, Origin.CREATED, "")
        problem, header = _examine(files, wanted, lock)
        if not problem:
            return _adopt(files, header, max(header.epoch + 1, unix_ms), lock)
        _require_space(files, wanted, reclaimed_bytes=allocated_bytes(files.all))
        unlink_quietly(files.all)
    except BaseException:
        unlock(lock)
        raise
    unlock(lock)
    lock = _lock(files, read)
    try:
        return _create(files, wanted, unix_ms, lock, Origin.REPLACED, problem)
    except BaseException:
        unlock(lock)
        raise


def _lock(files: PoolFiles, read: ReadText) -> int:
    directory = str(Path(files.control).parent)
    if not os.path.isdir(directory):
        raise Refused(
            "host.directory", f"{directory} is not a directory", "Name one in memory: /dev/shm."
        )
    try:
        return open_locked(files.control)
    except BlockingIOError as error:
        raise ConfigError(
            "run",
            f"{files.control} belongs to a running pool ({lock_holder(files.control, read)})",
            "Stop that pool, or give this one another `run` or `node`.",
        ) from error
    except PermissionError as error:
        raise Refused(
            "host.directory",
            f"{files.control} may not be opened by uid {os.getuid()}",
            "Run all pools and engines of a run as one user, or remove the file.",
        ) from error
    except OSError as error:
        raise _refused(directory, error) from error


def _examine(files: PoolFiles, wanted: TableHeader, lock: int) -> tuple[str, TableHeader]:
    """Say why the files cannot be adopted (empty if they can), and return their header.

    Raises `ConfigError` if they are those of another configuration and still in use.
    """
    try:
        header = TableHeader.decode(os.pread(lock, os.fstat(lock).st_size, 0))
    except Corrupt as error:
        return str(error), wanted
    except Malformed as error:
        _require_unused(files, str(error))
        return str(error), wanted
    if header.geometry != wanted.geometry:
        problem = (
            f"it has {header.slot_count} slots of {header.slot_bytes} bytes, "
            f"{wanted.slot_count} of {wanted.slot_bytes} are configured"
        )
        _require_unused(files, problem)
        return problem, wanted
    for path in files.segments:
        size = os.path.getsize(path) if os.path.exists(path) else 0
        if size != header.segment_bytes:
            return f"{path} has {size} bytes, not {header.segment_bytes}", wanted
    return "", header


def _require_unused(files: PoolFiles, problem: str) -> None:
    pids = sorted({pid for users in mapped_by(files.all).values() for pid in users})
    if pids:
        raise ConfigError(
            "host.region_bytes",
            f"{files.control} cannot be adopted and processes {pids} have it mapped: {problem}",
            "Stop them, or use the configuration that made it.",
        )


def _create(
    files: PoolFiles, wanted: TableHeader, unix_ms: int, lock: int, origin: Origin, problem: str
) -> Opened:
    mappings: list[Mapping] = []
    try:
        unlink_quietly(files.segments)
        _require_space(files, wanted, reclaimed_bytes=0)
        for path in files.segments:
            fd = _new_file(path)
            try:
                os.ftruncate(fd, wanted.segment_bytes)
                _allocate(path, fd, wanted.segment_bytes)
                mappings.append(Mapping.of(path, fd, writable=True))
            finally:
                os.close(fd)
        size = control_bytes(wanted.slot_count)
        os.ftruncate(lock, size)
        _allocate(files.control, lock, size)
        control = Mapping.of(files.control, lock, writable=True)
        mappings.append(control)
        format_table(
            control.view, wanted.slot_count, wanted.slot_bytes, wanted.segment_bytes, unix_ms
        )
    except BaseException:
        for mapping in mappings:
            mapping.close()
        unlink_quietly(files.all)
        raise
    header = replace(wanted, epoch=unix_ms)
    return Opened(header, control, tuple(mappings[:-1]), lock, origin, problem)


def _new_file(path: str) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE)
    except OSError as error:
        raise _refused(path, error) from error


def _refused(path: str, error: OSError) -> Refused:
    remedy = "Name a directory in memory that this user may write, with room in it: /dev/shm."
    return Refused("host.directory", f"{path} cannot be used: {error.strerror}", remedy)


def _adopt(files: PoolFiles, header: TableHeader, epoch: int, lock: int) -> Opened:
    mappings: list[Mapping] = []
    try:
        for path in files.segments:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                _allocate(path, fd, header.segment_bytes)
                mappings.append(Mapping.of(path, fd, writable=True))
            finally:
                os.close(fd)
        control = Mapping.of(files.control, lock, writable=True)
    except BaseException:
        for mapping in mappings:
            mapping.close()
        raise
    header = replace(header, epoch=epoch)
    write_header(control.view, header)
    return Opened(header, control, tuple(mappings), lock, Origin.ADOPTED, "")


def _allocate(path: str, fd: int, size_bytes: int) -> None:
    """Take all pages now: a page that is lacking later kills whoever touches it (SIGBUS)."""
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        raise Refused(
            "host.region_bytes",
            f"{size_bytes} bytes cannot be allocated for {path}: {error.strerror}",
            "Lessen it, or enlarge the filesystem (for /dev/shm: mount -o remount,size=...).",
        ) from error


def _require_space(files: PoolFiles, wanted: TableHeader, *, reclaimed_bytes: int) -> None:
    directory = Path(files.control).parent
    stat = os.statvfs(directory)
    free = stat.f_bavail * stat.f_frsize + reclaimed_bytes
    needed = _needed_bytes(wanted)
    if needed > free:
        raise Refused(
            "host.region_bytes",
            f"the region needs {needed} bytes, {directory} has {free} free",
            "Lessen it, or enlarge the filesystem (for /dev/shm: mount -o remount,size=..., or "
            "the container's shm size).",
        )


def _needed_bytes(wanted: TableHeader) -> int:
    return wanted.segment_bytes * wanted.segment_count + control_bytes(wanted.slot_count)
