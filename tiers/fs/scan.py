"""The start of the file tier: what is in the directory, and what dead processes left there.

Names alone are read, and lengths and times: a record is verified when it is loaded. A temporary
file carries the name of its instance and is swept when that one's lock (`owner`) is free or absent.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from ...fabric.file_record import BLOCK_BYTES
from ...fabric.types import KEY_BYTES_MAX, NAMESPACE_BYTES, ChunkKey, NamespaceId
from ..tier_events import RecordId
from .index import Entry
from .ops import FileOps, Found
from .owner import owner_path
from .records import RECORD_SUFFIX, TEMPORARY_SUFFIX

_NAMESPACE = re.compile(rf"[0-9a-f]{{{2 * NAMESPACE_BYTES}}}")
_RECORD = re.compile(rf"((?:[0-9a-f]{{2}}){{1,{KEY_BYTES_MAX}}}){re.escape(RECORD_SUFFIX)}")
_TEMPORARY = re.compile(rf"\w+\.(\w+)\.\d+{re.escape(TEMPORARY_SUFFIX)}")
_OWNER = re.compile(r"\.owner-(\w+)\.lock")


@dataclass(slots=True)
class Scanned:
    """What a scan found and did."""

    records: list[tuple[RecordId, Entry]] = field(default_factory=list)
    """Least recently used first."""
    swept: int = 0
    """Temporary files of dead instances, removed."""
    misshapen: int = 0
    """Files with a record's name that cannot be one, by their length; removed."""
    errors: int = 0
    """Directories or files that the file system refused; their bytes are not in the books."""


class Scan:
    """One walk over the directory."""

    def __init__(self, root: str, instance: str, ops: FileOps, stop: Callable[[], bool]) -> None:
        self._root = root
        self._ops = ops
        self._stop = stop
        self._alive = {instance: True}
        self._dead_locks: list[tuple[str, int]] = []
        self._found: list[tuple[int, RecordId, Entry]] = []
        self._scanned = Scanned()

    def run(self) -> Scanned:
        """Walk, sweep, and return the records in the order of their files' times."""
        for top in self._list(self._root):
            if self._stop():
                break
            path = f"{self._root}/{top.name}"
            if top.is_directory and _NAMESPACE.fullmatch(top.name):
                self._walk_namespace(path, NamespaceId(bytes.fromhex(top.name)))
            elif match := _OWNER.fullmatch(top.name):
                self._is_alive(match[1])
            else:
                self._sweep(path, top.name)
        self._drop_dead_locks()
        self._found.sort(key=lambda found: found[0])
        self._scanned.records = [(record, entry) for _, record, entry in self._found]
        return self._scanned

    def _list(self, path: str) -> list[Found]:
        try:
            return self._ops.list_directory(path)
        except OSError:
            self._scanned.errors += 1
            return []

    def _walk_namespace(self, path: str, namespace: NamespaceId) -> None:
        for branch in self._list(path):
            if self._stop():
                return
            if branch.is_directory:
                for found in self._list(f"{path}/{branch.name}"):
                    self._take(f"{path}/{branch.name}/{found.name}", namespace, branch.name, found)

    def _take(self, path: str, namespace: NamespaceId, branch: str, found: Found) -> None:
        match = _RECORD.fullmatch(found.name)
        if not match or found.is_directory or not found.name.startswith(branch):
            self._sweep(path, found.name)
        elif found.size_bytes < BLOCK_BYTES or found.size_bytes % BLOCK_BYTES:
            self._scanned.misshapen += self._unlink(path)
        else:
            record = RecordId(namespace, ChunkKey(bytes.fromhex(match[1])))
            self._found.append((found.mtime_ns, record, Entry(found.size_bytes)))

    def _sweep(self, path: str, name: str) -> None:
        match = _TEMPORARY.fullmatch(name)
        if match and not self._is_alive(match[1]):
            self._scanned.swept += self._unlink(path)

    def _unlink(self, path: str) -> int:
        try:
            self._ops.unlink(path)
        except FileNotFoundError:
            return 0
        except OSError:
            self._scanned.errors += 1
            return 0
        return 1

    def _is_alive(self, instance: str) -> bool:
        if instance not in self._alive:
            self._alive[instance] = self._lock_is_held(owner_path(self._root, instance))
        return self._alive[instance]

    def _lock_is_held(self, path: str) -> bool:
        try:
            descriptor = self._ops.open_lock(path, create=False)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        try:
            self._ops.lock(descriptor)
        except OSError:
            self._close(descriptor)
            return True
        self._dead_locks.append((path, descriptor))
        return False

    def _drop_dead_locks(self) -> None:
        for path, descriptor in self._dead_locks:
            self._unlink(path)
            self._close(descriptor)

    def _close(self, descriptor: int) -> None:
        try:
            self._ops.close(descriptor)
        except OSError:
            self._scanned.errors += 1
