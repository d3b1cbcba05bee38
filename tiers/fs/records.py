"""Records in files: write, verify, remove. All input and output of chunks goes through here.

A record is written under a temporary name in its final directory and renamed when it is whole, so
a name that ends in `.kv` never shows half a record of ours. The bytes go from the slot to the file
and back in one call, with the header and a last partial block in a scratch buffer of the thread.
"""

import errno
import itertools
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from ...fabric.checksum import checksum
from ...fabric.errors import Corrupt, Malformed
from ...fabric.file_record import (
    BLOCK_BYTES,
    RecordHeader,
    decode_header,
    encode_header,
    record_bytes,
)
from ..tier_events import RecordId
from .ops import FileOps

RECORD_SUFFIX = ".kv"
TEMPORARY_SUFFIX = ".tmp"


class IoMode(Enum):
    """How files are opened."""

    PROBE = "probe"
    """Direct if the file system can, else buffered."""
    DIRECT = "direct"
    """O_DIRECT, where the slot is aligned to 4096 bytes; the page cache stays out of it."""
    BUFFERED = "buffered"


class ReadCase(Enum):
    """What a load found."""

    VERIFIED = "verified"
    ABSENT = "absent"
    CORRUPT = "corrupt"
    """Not the record that its name promises: to be removed."""
    OTHER_LENGTH = "other_length"
    """A good record of another length than was asked for."""
    FAILED = "failed"
    """The file system could not read it."""


class WriteCase(Enum):
    """What became of a store."""

    WRITTEN = "written"
    FULL = "full"
    """No room, or no right, to write anything: worth a pause."""
    FAILED = "failed"


FULL_ERRORS = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM))


@dataclass(frozen=True, slots=True)
class Read:
    """The answer of a load; the checksum is 0 unless VERIFIED."""

    case: ReadCase
    checksum: int = 0


@dataclass(frozen=True, slots=True)
class Written:
    """The answer of a store."""

    case: WriteCase
    left_path: str = ""
    """The temporary file, if even its removal failed; the caller owes it to the books."""


class Scratch:
    """A thread's own page-aligned blocks: the header, and the last block where it is partial."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 2 * BLOCK_BYTES)
        self.header = memoryview(self._memory)[:BLOCK_BYTES]
        self.tail = memoryview(self._memory)[BLOCK_BYTES:]

    def frame(self, payload: memoryview) -> list[memoryview]:
        """Return header, whole blocks of the payload, and the tail if the last block is partial."""
        whole_bytes = payload.nbytes // BLOCK_BYTES * BLOCK_BYTES
        buffers = [self.header, payload[:whole_bytes]] if whole_bytes else [self.header]
        return buffers if whole_bytes == payload.nbytes else [*buffers, self.tail]


def is_aligned(payload: memoryview) -> bool:
    """Return whether there is a payload and it begins at a multiple of 4096, as O_DIRECT wants."""
    if not payload.nbytes:
        return False
    address: int = np.frombuffer(payload, np.uint8).__array_interface__["data"][0]
    return address % BLOCK_BYTES == 0


class RecordFiles:
    """The files under one root, as one instance of the tier sees them."""

    def __init__(self, root: str, instance: str, ops: FileOps) -> None:
        self.root = root
        self.instance = instance
        self.direct = False
        """Whether files are opened with O_DIRECT, once `probe` has run."""
        self._ops = ops
        self._numbers = itertools.count()

    def directory(self, record: RecordId) -> str:
        """Return the directory of a record's file."""
        return f"{self.root}/{record.namespace.hex()}/{record.key[:1].hex()}"

    def path(self, record: RecordId) -> str:
        """Return the final name of a record's file."""
        return f"{self.directory(record)}/{record.key.hex()}{RECORD_SUFFIX}"

    def probe(self, mode: IoMode) -> Written:
        """Find out, by a file of one block, whether direct input and output work here."""
        self.direct = mode is IoMode.DIRECT
        if mode is not IoMode.PROBE:
            return Written(WriteCase.WRITTEN)
        path = f"{self.root}/{self._temporary('probe')}"
        try:
            descriptor = self._ops.open_new(path, direct=True)
        except OSError as error:
            return Written(_case_of(error))
        written = self._finish(descriptor, path, [Scratch().header], "")
        self.direct = written.case is WriteCase.WRITTEN
        return written

    def _temporary(self, stem: str) -> str:
        return f"{stem}.{self.instance}.{next(self._numbers)}{TEMPORARY_SUFFIX}"

    def write(
        self, record: RecordId, payload: memoryview, digest: int, scratch: Scratch
    ) -> Written:
        """Write a record, whole or not at all. Raises `Malformed` for what the format cannot hold.

        A file that has the name already is replaced.
        """
        header = RecordHeader(record.namespace, record.key, payload.nbytes, digest)
        scratch.header[:] = encode_header(header)
        rest = payload.nbytes % BLOCK_BYTES
        scratch.tail[:rest] = payload[payload.nbytes - rest :]
        scratch.tail[rest:] = bytes(BLOCK_BYTES - rest)
        temporary = f"{self.directory(record)}/{self._temporary(record.key.hex())}"
        try:
            descriptor = self._create(record, temporary, direct=self.direct and is_aligned(payload))
        except OSError as error:
            return Written(_case_of(error))
        return self._finish(descriptor, temporary, scratch.frame(payload), self.path(record))

    def _finish(
        self, descriptor: int, temporary: str, buffers: Sequence[memoryview], final: str
    ) -> Written:
        """Write, close and rename; without a final name, write, close and remove."""
        case = WriteCase.FAILED
        left_path = ""
        try:
            try:
                self._ops.write(descriptor, buffers)
            finally:
                self._ops.close(descriptor)
            if final:
                self._ops.rename(temporary, final)
            case = WriteCase.WRITTEN
        except OSError as error:
            case = _case_of(error)
        finally:
            if not final or case is not WriteCase.WRITTEN:
                left_path = "" if self.discard(temporary) else temporary
        return Written(case, left_path)

    def _create(self, record: RecordId, path: str, *, direct: bool) -> int:
        try:
            return self._ops.open_new(path, direct=direct)
        except FileNotFoundError:
            self._ops.make_directory(f"{self.root}/{record.namespace.hex()}")
            self._ops.make_directory(self.directory(record))
            return self._ops.open_new(path, direct=direct)

    def read(self, record: RecordId, payload: memoryview, scratch: Scratch, *, touch: bool) -> Read:
        """Read a record into `payload` and verify all of it; `touch` renews its recency."""
        try:
            direct = self.direct and is_aligned(payload)
            descriptor = self._ops.open_read(self.path(record), direct=direct)
        except (FileNotFoundError, NotADirectoryError):
            return Read(ReadCase.ABSENT)
        except OSError:
            return Read(ReadCase.FAILED)
        try:
            found_bytes = self._ops.size_bytes(descriptor)
            read_bytes = self._ops.read(descriptor, scratch.frame(payload))
        except OSError:
            return Read(ReadCase.FAILED)
        else:
            if touch:
                self._touch_quietly(descriptor)
        finally:
            self._close_quietly(descriptor)
        return self._verify(record, payload, scratch, (found_bytes, read_bytes))

    def _verify(
        self, record: RecordId, payload: memoryview, scratch: Scratch, sizes: tuple[int, int]
    ) -> Read:
        found_bytes, read_bytes = sizes
        try:
            header = decode_header(scratch.header[: min(read_bytes, BLOCK_BYTES)])
        except (Corrupt, Malformed):
            return Read(ReadCase.CORRUPT)
        same_name = (header.namespace, header.key) == record
        if not same_name or found_bytes != record_bytes(header.payload_bytes):
            return Read(ReadCase.CORRUPT)
        if header.payload_bytes != payload.nbytes:
            return Read(ReadCase.OTHER_LENGTH)
        rest = payload.nbytes % BLOCK_BYTES
        if rest:
            payload[payload.nbytes - rest :] = scratch.tail[:rest]
        padding_clean = not rest or not any(scratch.tail[rest:])
        whole = read_bytes == found_bytes and padding_clean
        if not whole or checksum(payload) != header.checksum:
            return Read(ReadCase.CORRUPT)
        return Read(ReadCase.VERIFIED, header.checksum)

    def peek(self, record: RecordId, payload_bytes: int, scratch: Scratch) -> Read:
        """Read the header alone: VERIFIED if it promises this record at this length."""
        try:
            descriptor = self._ops.open_read(self.path(record), direct=False)
        except (FileNotFoundError, NotADirectoryError):
            return Read(ReadCase.ABSENT)
        except OSError:
            return Read(ReadCase.FAILED)
        try:
            found_bytes = self._ops.size_bytes(descriptor)
            read_bytes = self._ops.read(descriptor, [scratch.header])
            header = decode_header(scratch.header[:read_bytes])
        except OSError:
            return Read(ReadCase.FAILED)
        except (Corrupt, Malformed):
            return Read(ReadCase.CORRUPT)
        finally:
            self._close_quietly(descriptor)
        promised = RecordHeader(record.namespace, record.key, payload_bytes, header.checksum)
        if header != promised or found_bytes != record_bytes(payload_bytes):
            return Read(ReadCase.CORRUPT)
        return Read(ReadCase.VERIFIED, header.checksum)

    def _touch_quietly(self, descriptor: int) -> None:
        try:
            self._ops.touch(descriptor)
        except OSError:
            return

    def _close_quietly(self, descriptor: int) -> None:
        try:
            self._ops.close(descriptor)
        except OSError:
            return

    def remove(self, record: RecordId) -> None:
        """Remove a record's file; one that is not there is removed. Raises `OSError`."""
        try:
            self._ops.unlink(self.path(record))
        except (FileNotFoundError, NotADirectoryError):
            return

    def discard(self, path: str) -> bool:
        """Remove a temporary file; return whether it is gone."""
        try:
            self._ops.unlink(path)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False
        return True


def _case_of(error: OSError) -> WriteCase:
    return WriteCase.FULL if error.errno in FULL_ERRORS else WriteCase.FAILED
