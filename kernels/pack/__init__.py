"""Pack and unpack: between the paged cache of an engine and chunks in the canonical layout.

`make_packer` picks the implementation by where the caches lie, and does nothing else. `naive` is
the specification and the CPU's implementation, `triton` the GPU's; both execute the same `plan`.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from ...fabric.layout import GroupLayout
from .naive import NumpyPacker
from .view import CacheOrder, EngineCacheView

__all__ = ["CacheOrder", "EngineCacheView", "Packer", "make_packer"]


class Packer(Protocol):
    """Moves one rank's part of a group's chunks. `naive.NumpyPacker` says what the methods mean."""

    group: GroupLayout

    def pack(self, block_ids: Any, chunks: Any, slots: Any) -> None:
        """Copy out of the engine's cache."""
        ...

    def unpack(self, block_ids: Any, chunks: Any, slots: Any) -> None:
        """Copy into the engine's cache."""
        ...


def make_packer(
    group: GroupLayout, caches: Sequence[EngineCacheView], rank: int = 0, size: int = 1
) -> Packer:
    """Return the packer for the device of the caches (one view per layer, this rank's part).

    Raises `ConfigError` where the caches do not fit the group, `Unsupported` where the group cannot
    be dealt out to `size` ranks.
    """
    if not caches or caches[0].parts[0].device == "cpu":
        return NumpyPacker(group, caches, rank, size)
    # Importing Triton takes a second, which an engine on the CPU need not wait.
    from .triton import TritonPacker

    return TritonPacker(group, caches, rank, size)
