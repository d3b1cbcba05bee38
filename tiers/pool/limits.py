"""How much memory the machine and the container have, as files say; the reader is handed in."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path, PurePosixPath

ReadText = Callable[[str], str]
"""Returns a file's text or raises `OSError`."""

UNLIMITED_BYTES = 1 << 60
"""Version 1 says "no limit" with the largest multiple of a page; no machine has this much."""

_V1_ROOT = "/sys/fs/cgroup/memory"
_V2_ROOTS = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """What may be used; infinity where nothing is said."""

    machine_bytes: float
    cgroup_bytes: float
    """The least limit of this process's cgroup and those above it."""
    cgroup_file: str
    """The file that says it; empty if none does."""


def read_text(path: str) -> str:
    """Read a file of this machine."""
    return Path(path).read_text()


def read_limits(read: ReadText) -> MemoryLimits:
    """Read /proc/meminfo and the cgroup's limits, version 2 and version 1."""
    least, least_file = inf, ""
    for path in _limit_files(_read_or_empty(read, "/proc/self/cgroup")):
        text = _read_or_empty(read, path).strip()
        if text.isdigit() and int(text) < min(least, UNLIMITED_BYTES):
            least, least_file = int(text), path
    return MemoryLimits(_machine_bytes(_read_or_empty(read, "/proc/meminfo")), least, least_file)


def _machine_bytes(meminfo: str) -> float:
    for line in meminfo.splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return inf


def _limit_files(cgroup: str) -> list[str]:
    """Return the files that may hold a limit, from the process's cgroup up to the root.

    Lines are `0::/path` in version 2 and `4:memory:/path` in version 1. In a container the path may
    be that of the host and not exist; the root is then the container's own.
    """
    files: list[str] = []
    for line in cgroup.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        inner = PurePosixPath(path.lstrip("/"))
        for level in (inner, *inner.parents):
            if number == "0" and not controllers:
                files += [f"{PurePosixPath(root, level)}/memory.max" for root in _V2_ROOTS]
            elif "memory" in controllers.split(","):
                files.append(f"{PurePosixPath(_V1_ROOT, level)}/memory.limit_in_bytes")
    return files


def _read_or_empty(read: ReadText, path: str) -> str:
    try:
        return read(path)
    except OSError:
        return ""
