"""The pool's shared index, asked for the chunks of all ranks at once."""

from collections.abc import Sequence

import numpy as np

from ....fabric.types import KeyBatch, Lookup
from ....tiers.pool.client import PoolClient
from .geometry import CacheGeometry
from .prefix import Present

FIRST_LOOK_CHUNKS = 1024
"""A prompt that is not here at all is recognised by its first chunks. A lookup of one chunk takes
half the time of one of 1,000, so that fewer would save little where nothing is here, and cost a
second lookup where all of it is."""


class SharedIndex:
    """`prefix.ChunkIndex` over a pool client; a chunk is here if every rank's part is."""

    def __init__(self, client: PoolClient, geometry: CacheGeometry) -> None:
        self._client = client
        self._indices = {
            group.engine_group: geometry.indices(at) for at, group in enumerate(geometry.groups)
        }

    def leading(self, group: int, digests: Sequence[bytes]) -> int:
        """Return how many of the first chunks are here, in an unbroken row."""
        first = _row(self.present(group, digests[:FIRST_LOOK_CHUNKS]))
        if first < FIRST_LOOK_CHUNKS or len(digests) == FIRST_LOOK_CHUNKS:
            return first
        return first + _row(self.present(group, digests[FIRST_LOOK_CHUNKS:]))

    def present(self, group: int, digests: Sequence[bytes]) -> Present:
        """Return for each chunk whether it is here."""
        here = np.ones(len(digests), np.bool_)
        for index in self._indices[group]:
            here &= self._client.lookup(KeyBatch(digests, index)).states == Lookup.HIT
        return here


def _row(here: Present) -> int:
    missing = np.flatnonzero(~here)
    return int(missing[0]) if len(missing) else len(here)
