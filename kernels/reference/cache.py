"""The paged KV cache of the reference engine: one tensor per layer and an allocator of blocks.

Ownership. `PagedCache` owns the tensors; who holds a block number may read and write that block in
every layer. `BlockAllocator` owns the numbers. Callers outside the engine (the fabric) may write a
block only while the sequence that holds it is unfinished.

Failure. An allocation gives all the blocks asked for or none, and says which.

Threading. One thread at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...fabric.errors import Conservation
from .config import ModelConfig


@dataclass(frozen=True, slots=True)
class Allocated:
    """All the blocks that were asked for."""

    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Full:
    """Too few blocks are free; none was taken. Finish a sequence and ask again."""

    wanted_blocks: int
    free_blocks: int


class BlockAllocator:
    """A free list of block numbers; the block freed last is given first, as it may be in cache."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        """Blocks that somebody holds."""
        return len(self._used)

    def allocate(self, count: int) -> Allocated | Full:
        """Take `count` blocks, or none."""
        if count > len(self._free):
            return Full(count, len(self._free))
        blocks = tuple(self._free.pop() for _ in range(count))
        self._used.update(blocks)
        return Allocated(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """Give blocks back. Raises `Conservation`, changing nothing, if one of them is not out."""
        if len(set(blocks)) != len(blocks) or not self._used.issuperset(blocks):
            raise Conservation("the block allocator", f"{tuple(blocks)} given back, not all out")
        self._used.difference_update(blocks)
        self._free.extend(reversed(blocks))

    def check(self) -> None:
        """Raise `Conservation` unless every block is either free or used, once."""
        once = set(self._free) | self._used
        if len(once) != self.num_blocks or len(self._free) + len(self._used) != self.num_blocks:
            numbers = f"free {len(self._free)} + used {len(self._used)} != {self.num_blocks}"
            raise Conservation("the block allocator", numbers)


class PagedCache:
    """One tensor a layer, `[2, num_blocks, block_tokens, kv_heads, head_dim]` (NHD, keys first)."""

    def __init__(
        self, config: ModelConfig, block_tokens: int, num_blocks: int, device: torch.device
    ) -> None:
        self.block_tokens = block_tokens
        self.allocator = BlockAllocator(num_blocks)
        shape = (2, num_blocks, block_tokens, config.kv_heads, config.head_dim)
        dtype = getattr(torch, config.dtype)
        self.layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.layers)]

    def write(
        self, layer: int, blocks: torch.Tensor, start: int, keys_values: torch.Tensor
    ) -> None:
        """Put keys and values `[2, tokens, kv_heads, head_dim]` at positions from `start` on.

        `blocks` is the sequence's block table, int64 `[blocks]`.
        """
        end = start + keys_values.shape[1]
        positions = torch.arange(start, end, device=blocks.device)
        of_block = blocks[positions // self.block_tokens]
        self.layers[layer][:, of_block, positions % self.block_tokens] = keys_values

    def gather(self, layer: int, blocks: torch.Tensor, end: int) -> torch.Tensor:
        """Return a copy `[2, len(blocks) * block_tokens, kv_heads, head_dim]` in token order.

        Positions from `end` on are zero, whatever their blocks hold: a load that was given up may
        have left anything there, and zero times a weight of zero is zero while NaN is not.
        """
        cache = self.layers[layer]
        copied = cache.index_select(1, blocks).flatten(1, 2)
        copied[:, end:] = 0
        return copied
