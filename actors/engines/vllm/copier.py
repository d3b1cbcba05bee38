"""Whole blocks between an engine's KV cache and slots.

Ownership. The tensors are the engine's. The copier keeps views of their bytes, one row per block.

Threading. Blocks may be copied from several threads at once, as long as nobody copies into a block
that somebody else copies.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

BLOCK_DIM = 0


@dataclass(frozen=True, slots=True)
class OpaqueViews:
    """One group: for each of its tensors the bytes of each block, `[blocks, bytes]`, uint8."""

    rows: tuple[torch.Tensor, ...]

    @property
    def block_bytes(self) -> int:
        """All tensors of one block."""
        return sum(row.shape[1] for row in self.rows)


class BlockCopier:
    """Copies chunks of some groups of one rank."""

    def __init__(self, groups: Sequence[OpaqueViews]) -> None:
        self._groups = tuple(groups)

    def pack(self, group: int, block_ids: Sequence[int], slot: memoryview) -> None:
        """Copy a chunk's blocks into a slot."""
        rows = self._groups[group].rows
        chunk = torch.frombuffer(slot, dtype=torch.uint8)
        offset = 0
        for block in block_ids:
            for row in rows:
                length = row.shape[1]
                chunk[offset : offset + length].copy_(row[block])
                offset += length

    def unpack(self, group: int, block_ids: Sequence[int], slot: memoryview) -> None:
        """Copy a slot into a chunk's blocks."""
        rows = self._groups[group].rows
        chunk = torch.frombuffer(slot, dtype=torch.uint8)
        offset = 0
        for block in block_ids:
            for row in rows:
                length = row.shape[1]
                row[block].copy_(chunk[offset : offset + length])
                offset += length


def block_rows(tensor: torch.Tensor, blocks: int) -> torch.Tensor | None:
    """Return a tensor's bytes as `[blocks, bytes]`, or None if a block is not one run of memory."""
    if tensor.shape[BLOCK_DIM] != blocks or not tensor.is_contiguous():
        return None
    return tensor.view(torch.uint8).reshape(blocks, -1)
