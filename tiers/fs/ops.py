"""The system calls of the file tier, in one object, so that a test can make any of them fail.

Every method raises `OSError` and nothing else. None keeps state.
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Found:
    """An entry of a directory."""

    name: str
    is_directory: bool
    size_bytes: int
    mtime_ns: int


class FileOps:
    """The machine's file system."""

    def open_read(self, path: str, *, direct: bool) -> int:
        """Open for reading; `direct` goes around the page cache."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))

    def open_new(self, path: str, *, direct: bool) -> int:
        """Create a file that must not exist, mode 0600, for writing."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return os.open(path, flags | (os.O_DIRECT if direct else 0), 0o600)

    def open_lock(self, path: str, *, create: bool) -> int:
        """Open a lock file."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)

    def lock(self, descriptor: int) -> None:
        """Take the file's lock, or raise `BlockingIOError` if another holds it."""
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self, descriptor: int) -> None:
        """Close it. Network file systems report a failed write here."""
        os.close(descriptor)

    def size_bytes(self, descriptor: int) -> int:
        """Return the file's length."""
        return os.fstat(descriptor).st_size

    def read(self, descriptor: int, buffers: Sequence[memoryview]) -> int:
        """Read from the start into the buffers, in order; return the number of bytes."""
        return os.preadv(descriptor, buffers, 0)

    def write(self, descriptor: int, buffers: Sequence[memoryview]) -> None:
        """Write the buffers, in order, from the start; a short write is a full disk."""
        wanted = sum(buffer.nbytes for buffer in buffers)
        if os.pwritev(descriptor, buffers, 0) != wanted:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def touch(self, descriptor: int) -> None:
        """Set the modification time to now: the recency that a restart finds."""
        os.utime(descriptor)

    def rename(self, source: str, target: str) -> None:
        """Give the file its final name, over whatever has it."""
        os.replace(source, target)

    def unlink(self, path: str) -> None:
        """Remove a file."""
        os.unlink(path)

    def make_root(self, path: str) -> None:
        """Make the tier's directory and its parents, mode 0700, unless they are there."""
        os.makedirs(path, 0o700, exist_ok=True)

    def make_directory(self, path: str) -> None:
        """Make one directory, mode 0700, unless it is there; its parent must exist."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)

    def list_directory(self, path: str) -> list[Found]:
        """Return what is in a directory; what vanishes meanwhile is left out."""
        found: list[Found] = []
        with os.scandir(path) as entries:
            for entry in entries:
                try:
                    stat = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                is_directory = entry.is_dir(follow_symlinks=False)
                found.append(Found(entry.name, is_directory, stat.st_size, stat.st_mtime_ns))
        return found
