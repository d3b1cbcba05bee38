"""The files of a pool: made or adopted by its process, mapped by its clients.

Ownership. `Region` belongs to the pool's process, which holds an exclusive lock on the control file
until it closes or dies. `RegionView` belongs to a client; it maps the control file read-only, so
that a bug in a client cannot write on the table, and the segments read-write.

Lifecycle. Opening adopts files of the same geometry as they are: same inodes, same bytes, a new
epoch. Files of another geometry are replaced if nobody has them mapped. No file is ever truncated
in place: whoever has it mapped keeps what was there. The header is written last, so that files
whose maker died halfway are made again. `close` may leave the files for the next pool.

Failure. What cannot work is a `ConfigError` before anything is touched. Segments are allocated in
full, so that a write to them cannot fail later. A control file whose header is corrupt is replaced
even while it is mapped; `problem` says what was wrong with it.

Threading. One thread opens and closes; views may be used by any. A process that forks while it has
a region hands the lock on to its child.
"""

import os
from collections.abc import Sequence

import numpy as np

from ...fabric.clock import Clock, SystemClock
from ...fabric.config import HostConfig
from ...fabric.errors import Corrupt, Malformed
from ...fabric.records import TableHeader
from .files import PoolFiles, unlink_quietly, unlock
from .limits import ReadText, read_limits, read_text
from .mapping import Mapping
from .opening import Opened, Origin, geometry, open_files, require_memory

_CLOCK = SystemClock()


class Places:
    """Where slots lie in mapped segments. What `Region` and `RegionView` share."""

    def __init__(self, header: TableHeader, control: Mapping, segments: Sequence[Mapping]) -> None:
        self.header = header
        """As it was when the files were opened."""
        self._control, self._segments = control, tuple(segments)
        self._slots_per_segment = header.segment_bytes // header.slot_bytes

    @property
    def control(self) -> memoryview:
        """The control file; read-only for a client."""
        return self._control.view

    @property
    def segments(self) -> tuple[memoryview, ...]:
        """The bytes of every segment, writable."""
        return tuple(segment.view for segment in self._segments)

    @property
    def control_path(self) -> str:
        """The control file's name."""
        return self._control.path

    @property
    def segment_paths(self) -> tuple[str, ...]:
        """The segments' names."""
        return tuple(segment.path for segment in self._segments)

    def place(self, slot: int) -> tuple[int, int]:
        """Return the segment of a slot, and where in it the slot begins, in bytes."""
        segment, index = divmod(slot, self._slots_per_segment)
        return segment, index * self.header.slot_bytes

    def view(self, slot: int, length: int) -> memoryview:
        """Return the first `length` bytes of a slot, writable. Raises `Malformed` beyond it."""
        if not (0 <= slot < self.header.slot_count and 0 <= length <= self.header.slot_bytes):
            raise Malformed("slot", f"{length} bytes of slot {slot}")
        segment, offset = self.place(slot)
        return self._segments[segment].view[offset : offset + length]

    def base_addresses(self) -> tuple[int, ...]:
        """Return where each segment begins in this process's memory."""
        return tuple(int(np.frombuffer(s.view, np.uint8).ctypes.data) for s in self._segments)

    def _unmap(self) -> None:
        for mapping in (*self._segments, self._control):
            mapping.close()


class Region(Places):
    """A pool's own files, locked. Made by `open`."""

    def __init__(self, opened: Opened) -> None:
        super().__init__(opened.header, opened.control, opened.segments)
        self.origin = opened.origin
        self.problem = opened.problem
        """Why earlier files were replaced; empty unless `origin` is REPLACED."""
        self._lock = opened.lock
        self._closed = False

    @classmethod
    def open(
        cls,
        directory: str,
        run: str,
        node: str,
        host: HostConfig,
        read: ReadText = read_text,
        clock: Clock = _CLOCK,
    ) -> "Region":
        """Make or adopt `kvfabric-<run>-<node>.control` and `.seg0` in a directory.

        `read` reads files of /proc and /sys; `clock` gives the epoch: milliseconds since 1970, or
        one more than the last if that is higher, so that no epoch comes again after the files were
        removed. Raises `ConfigError` if another process has the files or the region cannot fit.
        """
        wanted = geometry(host)
        require_memory(wanted, read_limits(read))
        files = PoolFiles.named(directory, f"{run}-{node}")
        return cls(open_files(files, wanted, int(clock.unix_s() * 1000), read))

    @property
    def adopted(self) -> bool:
        """Whether the slots of an earlier pool were taken over."""
        return self.origin is Origin.ADOPTED

    @property
    def epoch(self) -> int:
        """Higher than that of any earlier pool on these files."""
        return self.header.epoch

    def close(self, *, unlink: bool) -> None:
        """Unmap the files and give the lock back; with `unlink`, remove them. Safe to call twice.

        Views that are still held stay valid until they are let go.
        """
        if self._closed:
            return
        self._closed = True
        if unlink:
            unlink_quietly((*self.segment_paths, self.control_path))
        self._unmap()
        unlock(self._lock)


class RegionView(Places):
    """A client's mappings of a pool's files. Made by `attach`."""

    @classmethod
    def attach(cls, control_path: str, segment_paths: Sequence[str]) -> "RegionView":
        """Map a pool's files.

        Raises `Corrupt` or `Malformed` for a control file that is not one of this version's, and
        `OSError` for files that are not there.
        """
        mapped: list[Mapping] = []
        try:
            mapped.append(Mapping.at(control_path, writable=False))
            header = TableHeader.decode(mapped[0].view)
            mapped += [Mapping.at(path, writable=True) for path in segment_paths]
            _require_sizes(header, mapped[1:])
        except BaseException:
            for mapping in mapped:
                mapping.close()
            raise
        return cls(header, mapped[0], mapped[1:])

    def close(self) -> None:
        """Unmap. Safe to call twice; views that are still held stay valid until they are let go."""
        self._unmap()

    def is_at(self, control_path: str) -> bool:
        """Whether the control file at a path is the one that is mapped. Raises `OSError`."""
        stat = os.stat(control_path)
        return self._control.identity == (stat.st_dev, stat.st_ino)


def _require_sizes(header: TableHeader, segments: Sequence[Mapping]) -> None:
    sizes = [segment.view.nbytes for segment in segments]
    if sizes != [header.segment_bytes] * header.segment_count:
        raise Corrupt("region", f"segments of {sizes} bytes, not what its header says")
