"""One file, mapped into this process and shared with all others that map it."""

import mmap
import os
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mapping:
    """A mapped file. The descriptor that it was made from may be closed."""

    path: str
    map: mmap.mmap
    view: memoryview
    """All its bytes."""
    identity: tuple[int, int]
    """Device and inode: another file may come to have the same path."""

    @classmethod
    def of(cls, path: str, fd: int, *, writable: bool) -> "Mapping":
        """Map a whole file."""
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        stat = os.fstat(fd)
        mapped = mmap.mmap(fd, stat.st_size, mmap.MAP_SHARED, protection)
        return cls(path, mapped, memoryview(mapped), (stat.st_dev, stat.st_ino))

    @classmethod
    def at(cls, path: str, *, writable: bool) -> "Mapping":
        """Open and map a whole file. Raises `OSError`."""
        access = os.O_RDWR if writable else os.O_RDONLY
        fd = os.open(path, access | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return cls.of(path, fd, writable=writable)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Unmap. Where somebody still has a view, the memory goes with the last one."""
        with suppress(BufferError):
            self.view.release()
            self.map.close()
