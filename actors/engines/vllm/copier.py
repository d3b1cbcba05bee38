"""Chunks between an engine's KV cache and slots.

Ownership. The tensors are the engine's. The copier keeps views of their bytes: of a group that only
the engine understands, whole blocks; of any other what `kernels.pack` needs to read and write the
canonical layout in place.

Threading. Blocks may be copied from several threads at once, as long as nobody copies into a block
that somebody else copies.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ....fabric.layout import GroupLayout
from ....kernels.pack import EngineCacheView, make_packer

BLOCK_DIM = 0


class GroupCopier(Protocol):
    """Copies the chunks of one group of one rank."""

    def pack(self, block_ids: Sequence[int], slot: memoryview) -> None:
        """Copy a chunk's blocks into a slot."""
        ...

    def unpack(self, block_ids: Sequence[int], slot: memoryview) -> None:
        """Copy a slot into a chunk's blocks."""
        ...


@dataclass(frozen=True, slots=True)
class OpaqueViews:
    """One group: for each of its tensors the bytes of each block, `[blocks, bytes]`, uint8."""

    rows: tuple[torch.Tensor, ...]

    @property
    def block_bytes(self) -> int:
        """All tensors of one block."""
        return sum(row.shape[1] for row in self.rows)

    def pack(self, block_ids: Sequence[int], slot: memoryview) -> None:
        """Copy a chunk's blocks into a slot."""
        chunk = torch.frombuffer(slot, dtype=torch.uint8)
        offset = 0
        for block in block_ids:
            for row in self.rows:
                length = row.shape[1]
                chunk[offset : offset + length].copy_(row[block])
                offset += length

    def unpack(self, block_ids: Sequence[int], slot: memoryview) -> None:
        """Copy a slot into a chunk's blocks."""
        chunk = torch.frombuffer(slot, dtype=torch.uint8)
        offset = 0
        for block in block_ids:
            for row in self.rows:
                length = row.shape[1]
                row[block].copy_(chunk[offset : offset + length])
                offset += length


class CanonicalViews:
    """One group in the canonical layout. On a GPU by way of a buffer there, one for each call."""

    def __init__(self, group: GroupLayout, caches: Sequence[EngineCacheView]) -> None:
        self._packer = make_packer(group, caches)
        self._chunk_bytes = group.chunk_bytes
        self._device = caches[0].parts[0].device

    def pack(self, block_ids: Sequence[int], slot: memoryview) -> None:
        """Copy a chunk's blocks into a slot."""
        if self._device == "cpu":
            self._packer.pack([block_ids], [slot], [0])
            return
        ids, chunk, slots = self._on_device(block_ids)
        self._packer.pack(ids, chunk, slots)
        torch.frombuffer(slot, dtype=torch.uint8)[: self._chunk_bytes].copy_(chunk[0])

    def unpack(self, block_ids: Sequence[int], slot: memoryview) -> None:
        """Copy a slot into a chunk's blocks."""
        if self._device == "cpu":
            self._packer.unpack([block_ids], [slot], [0])
            return
        ids, chunk, slots = self._on_device(block_ids)
        chunk[0].copy_(torch.frombuffer(slot, dtype=torch.uint8)[: self._chunk_bytes])
        self._packer.unpack(ids, chunk, slots)
        torch.cuda.current_stream().synchronize()

    def _on_device(
        self, block_ids: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ids = torch.tensor([list(block_ids)], dtype=torch.int64, device=self._device)
        chunk = torch.empty((1, self._chunk_bytes), dtype=torch.uint8, device=self._device)
        return ids, chunk, torch.zeros(1, dtype=torch.int64, device=self._device)


class BlockCopier:
    """Copies chunks of some groups of one rank."""

    def __init__(self, groups: Sequence[GroupCopier]) -> None:
        self._groups = tuple(groups)

    def pack(self, group: int, block_ids: Sequence[int], slot: memoryview) -> None:
        """Copy a chunk's blocks into a slot."""
        self._groups[group].pack(block_ids, slot)

    def unpack(self, group: int, block_ids: Sequence[int], slot: memoryview) -> None:
        """Copy a slot into a chunk's blocks."""
        self._groups[group].unpack(block_ids, slot)


def block_rows(tensor: torch.Tensor, blocks: int) -> torch.Tensor | None:
    """Return a tensor's bytes as `[blocks, bytes]`, or None if a block is not one run of memory.

    Inside a block the axes may lie in any order; their strides are part of a layout's tag.
    """
    inner = sorted(range(1, tensor.ndim), key=tensor.stride, reverse=True)
    ordered = tensor.permute(BLOCK_DIM, *inner)
    apart = tensor.stride(BLOCK_DIM) >= tensor[0].numel()
    if tensor.shape[BLOCK_DIM] != blocks or not (apart and ordered[0].is_contiguous()):
        return None
    return ordered.flatten(1).view(torch.uint8)
