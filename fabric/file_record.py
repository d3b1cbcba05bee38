"""The record that holds one chunk in a file: a 4 KiB header, then the payload padded to 4 KiB.

All numbers are little-endian. Everything is a multiple of 4096 bytes, so that a file system may
move the payload between the disk and a slot without a buffer in between (O_DIRECT). The header ends
with a checksum over itself; the payload's checksum is the chunk's (`fabric.checksum`), taken over
from whoever computed it. The padding is zeros, so equal chunks make equal files.

`Malformed` means that this is not a record of a version that we read, `Corrupt` that it was one.
"""

import struct
from dataclasses import dataclass

import xxhash

from .checksum import ALGORITHM_XXH3_PIECES, checksum
from .errors import Corrupt, Malformed
from .types import KEY_BYTES_MAX, NAMESPACE_BYTES, ChunkKey, NamespaceId

BLOCK_BYTES = 4096
"""Header size and alignment: the page size, and a multiple of every disk's sector in use."""
PAYLOAD_BYTES_MAX = 1 << 30
"""Linux moves at most 0x7ffff000 bytes in one call; half of that keeps a record in one call."""
MAGIC = b"KVFABREC"
VERSION = 1

_FIELDS = struct.Struct("<8sHHHxx16s36sxxxxQQ")
_SUM = struct.Struct("<Q")
_SUM_OFFSET = BLOCK_BYTES - _SUM.size


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """What the header says of the payload behind it."""

    namespace: NamespaceId
    key: ChunkKey
    payload_bytes: int
    checksum: int
    """Of the payload, by `fabric.checksum`."""


def padded_bytes(payload_bytes: int) -> int:
    """Return the length of a payload with its padding, in bytes."""
    return -(-payload_bytes // BLOCK_BYTES) * BLOCK_BYTES


def record_bytes(payload_bytes: int) -> int:
    """Return the length of the whole record, in bytes."""
    return BLOCK_BYTES + padded_bytes(payload_bytes)


def encode_header(header: RecordHeader) -> bytes:
    """Return the 4096 bytes of a header. Raises `Malformed` for what the format cannot hold."""
    if len(header.namespace) != NAMESPACE_BYTES:
        raise Malformed("file record", f"a namespace of {len(header.namespace)} bytes")
    if not 0 < len(header.key) <= KEY_BYTES_MAX:
        raise Malformed("file record", f"a key of {len(header.key)} bytes")
    if not 0 <= header.payload_bytes <= PAYLOAD_BYTES_MAX:
        raise Malformed("file record", f"a payload of {header.payload_bytes} bytes")
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        ALGORITHM_XXH3_PIECES,
        len(header.key),
        header.namespace,
        header.key,
        header.payload_bytes,
        header.checksum,
    )
    summed = fields.ljust(_SUM_OFFSET, b"\0")
    return summed + _SUM.pack(xxhash.xxh3_64_intdigest(summed))


def decode_header(data: bytes | memoryview) -> RecordHeader:
    """Read the header at the start of `data`. Raises `Malformed` or `Corrupt`."""
    if len(data) < BLOCK_BYTES:
        raise Corrupt("file record", f"{len(data)} bytes are less than a header")
    magic, version, algorithm, key_bytes, namespace, key, payload_bytes, digest = (
        _FIELDS.unpack_from(data)
    )
    if magic != MAGIC:
        raise Malformed("file record", f"begins with {magic!r}")
    if version != VERSION:
        raise Malformed("file record", f"version {version}, this side reads {VERSION}")
    (stored,) = _SUM.unpack_from(data, _SUM_OFFSET)
    if xxhash.xxh3_64_intdigest(data[:_SUM_OFFSET]) != stored:
        raise Corrupt("file record", "the header's checksum differs")
    if algorithm != ALGORITHM_XXH3_PIECES:
        raise Malformed("file record", f"checksum algorithm {algorithm}")
    if not 0 < key_bytes <= KEY_BYTES_MAX or payload_bytes > PAYLOAD_BYTES_MAX:
        raise Malformed("file record", f"key of {key_bytes} or payload of {payload_bytes} bytes")
    return RecordHeader(NamespaceId(namespace), ChunkKey(key[:key_bytes]), payload_bytes, digest)


def encode(namespace: NamespaceId, key: ChunkKey, payload: bytes) -> bytes:
    """Return a whole record, for tools and tests; a tier writes header and slot separately."""
    header = RecordHeader(namespace, key, len(payload), checksum(payload))
    return encode_header(header) + payload.ljust(padded_bytes(len(payload)), b"\0")


def decode(data: bytes) -> tuple[RecordHeader, bytes]:
    """Return header and payload of a whole record. Raises `Malformed` or `Corrupt`."""
    header = decode_header(data)
    if len(data) != record_bytes(header.payload_bytes):
        raise Corrupt(
            "file record",
            f"{len(data)} bytes long instead of {record_bytes(header.payload_bytes)}",
        )
    end = BLOCK_BYTES + header.payload_bytes
    payload = data[BLOCK_BYTES:end]
    if checksum(payload) != header.checksum:
        raise Corrupt("file record", "the payload's checksum differs")
    if any(data[end:]):
        raise Corrupt("file record", "the padding is not zero")
    return header, payload
