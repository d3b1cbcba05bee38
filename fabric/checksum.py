"""The checksum of a chunk: xxh3-64 over the little-endian xxh3-64 of each 64 KiB piece.

Pieces are independent, so that several threads, or a GPU, can work on one chunk. The last piece may
be short. An empty chunk has the checksum of no pieces. 0 means "no checksum", so a digest of 0 is
stored as 1.
"""

from collections.abc import Iterable

import xxhash

PIECE_BYTES = 64 * 1024
ALGORITHM_XXH3_PIECES = 1
"""The id stored beside every checksum."""


def combine_pieces(piece_digests: bytes) -> int:
    """Return the checksum of a chunk from its pieces' digests, 8 bytes each, little-endian."""
    return xxhash.xxh3_64_intdigest(piece_digests) or 1


def piece_digests(data: memoryview) -> bytes:
    """Return the digests of the pieces of `data` (contiguous bytes), joined."""
    digests: Iterable[int] = (
        xxhash.xxh3_64_intdigest(data[start : start + PIECE_BYTES])
        for start in range(0, data.nbytes, PIECE_BYTES)
    )
    return b"".join(digest.to_bytes(8, "little") for digest in digests)


def checksum(data: memoryview | bytes) -> int:
    """Return the checksum of contiguous bytes; never 0."""
    return combine_pieces(piece_digests(memoryview(data).cast("B")))
