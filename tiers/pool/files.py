"""Names, locks and users of a pool's files. Used by `region` and by `sweep`."""

import fcntl
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...fabric.errors import ConfigError
from .limits import ReadText

PREFIX = "kvfabric-"
CONTROL_SUFFIX = ".control"
SEGMENT_SUFFIX = ".seg0"
SOCKET_SUFFIX = ".sock"
MODE = 0o600
OPEN_TRIES_MAX = 8
"""A lock may turn out to be on a file that a sweep has just removed; it cannot happen often."""


@dataclass(frozen=True, slots=True)
class PoolFiles:
    """Where one pool's files lie."""

    control: str
    segments: tuple[str, ...]
    socket: str
    """Where clients reach the pool; made by the pool's sockets and not by its region."""

    @classmethod
    def named(cls, directory: str, name: str) -> "PoolFiles":
        """Return the files of `<run>-<node>` in a directory."""
        base = f"{directory.rstrip('/')}/{PREFIX}{name}"
        return cls(base + CONTROL_SUFFIX, (base + SEGMENT_SUFFIX,), base + SOCKET_SUFFIX)

    @property
    def all(self) -> tuple[str, ...]:
        """The region. Control file last: as long as it is there, the others will be found."""
        return (*self.segments, self.control)


def open_locked(path: str) -> int:
    """Open a control file, made empty if it is not there, and hold its lock. Returns a descriptor.

    Raises `BlockingIOError` if somebody else holds the lock.
    """
    for _ in range(OPEN_TRIES_MAX):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, MODE)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(fd, path):
                return fd
        except OSError:
            os.close(fd)
            raise
        os.close(fd)
    raise ConfigError("host.directory", f"{path} is removed again and again", "Stop the sweeps.")


def unlock(fd: int) -> None:
    """Give the lock back at once: a mapping that is still in use keeps a copy of the descriptor."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def unlink_quietly(paths: Iterable[str]) -> None:
    """Remove files that may be gone already."""
    for path in paths:
        Path(path).unlink(missing_ok=True)


def allocated_bytes(paths: Iterable[str]) -> int:
    """Return how much of a filesystem these files take up, where they exist."""
    total = 0
    for path in paths:
        try:
            total += os.stat(path).st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def lock_holder(path: str, read: ReadText) -> str:
    """Say who holds a file's lock, as far as /proc/locks tells."""
    stat = os.stat(path)
    name = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}"
    try:
        lines = read("/proc/locks").splitlines()
    except OSError:
        lines = []
    for line in lines:
        fields = line.split()
        if len(fields) > 5 and fields[1] == "FLOCK" and fields[5] == name:
            return f"process {fields[4]}"
    return "another process"


def mapped_by(paths: Iterable[str]) -> Mapping[str, tuple[int, ...]]:
    """Return the processes that have each file mapped, as far as /proc/*/maps may be read."""
    needles: dict[str, tuple[str, str]] = {}
    for path in paths:
        try:
            stat = os.stat(path)
        except FileNotFoundError:
            continue
        device = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}"
        needles[path] = f" {device} {stat.st_ino} ", f" {path}\n"
    users: dict[str, list[int]] = {path: [] for path in needles}
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
        except OSError:
            continue
        for path, (by_inode, by_name) in needles.items():
            if by_inode in maps or by_name in maps:
                users[path].append(pid)
    return {path: tuple(pids) for path, pids in users.items()}


def _is_at(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
