"""Removing the files of pools that are gone: for a node on which no pool runs any more."""

import os
from dataclasses import dataclass

from .files import (
    CONTROL_SUFFIX,
    PREFIX,
    SEGMENT_SUFFIX,
    SOCKET_SUFFIX,
    PoolFiles,
    allocated_bytes,
    mapped_by,
    open_locked,
    unlink_quietly,
    unlock,
)


@dataclass(frozen=True, slots=True)
class SweptFile:
    """A file that was removed."""

    path: str
    freed_bytes: int


def sweep(directory: str, run: str | None) -> list[SweptFile]:
    """Remove pools' files whose lock is free and that no process has mapped.

    Of all runs if `run` is None. Files of other users are left alone. Since names of runs and nodes
    may have dashes, the run "a" includes orphans of a run "a-b".
    """
    names: set[str] = set()
    for file in os.listdir(directory):
        for suffix in (CONTROL_SUFFIX, SEGMENT_SUFFIX, SOCKET_SUFFIX):
            if file.startswith(PREFIX) and file.endswith(suffix):
                names.add(file.removeprefix(PREFIX).removesuffix(suffix))
    swept: list[SweptFile] = []
    for name in sorted(names):
        if run is None or name.startswith(f"{run}-"):
            swept += _sweep_pool(PoolFiles.named(directory, name))
    return swept


def _sweep_pool(files: PoolFiles) -> list[SweptFile]:
    """Remove one pool's files under its lock, so that no pool can be opening them meanwhile."""
    paths = (files.socket, *files.all)
    found = [path for path in paths if os.path.exists(path)]
    try:
        lock = open_locked(files.control)
    except (BlockingIOError, PermissionError):
        return []
    try:
        if any(mapped_by(files.all).values()):
            return []
        swept = [SweptFile(path, allocated_bytes((path,))) for path in found]
        unlink_quietly(paths)
        return swept
    finally:
        unlock(lock)
