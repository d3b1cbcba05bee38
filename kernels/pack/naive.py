"""The numpy twin of pack and unpack: what they mean, and how the CPU does them.

`pack` copies blocks of an engine's cache into chunks, `unpack` copies them back. Both walk blocks;
layers, heads and tokens of a block are one numpy assignment, with no copy in between.

Block ids are checked before the first byte moves, so that a refused call has written nothing. A
negative id is padding: its tokens are neither read nor written. `pack` fills the padding of a row
with zeros, so that equal tokens give equal chunks.

A packer keeps the engine's tensors alive and nothing else, so several threads may use it at once
for different chunks and blocks.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...fabric.errors import ConfigError, Malformed
from ...fabric.layout import GroupLayout
from .plan import CopyPlan, plan_copies
from .view import EngineCacheView, Part


class NumpyPacker:
    """Pack and unpack between caches in host memory and chunks in host memory."""

    def __init__(
        self, group: GroupLayout, caches: Sequence[EngineCacheView], rank: int = 0, size: int = 1
    ) -> None:
        self.group = group
        self.plans = plan_copies(group, caches, rank, size)
        self._stacks = [(plan, _stacks(plan)) for plan in self.plans]

    def pack(self, block_ids: Any, chunks: Any, slots: Any) -> None:
        """Copy this rank's part of some chunks out of the engine's cache.

        `block_ids` is an int array `[n, blocks_per_chunk]` (also a nested list, or a tensor on the
        CPU), `chunks` uint8 `[num_slots, >= chunk_bytes]` or a sequence of writable buffers, and
        `slots` `[n]` says which of them. Raises `Malformed` for ids out of range or of the wrong
        shape, `ConfigError` for a buffer too small for a chunk.
        """
        for plan, stacks in self._stacks:
            for block_row, views in _walk(plan, stacks, block_ids, chunks, slots):
                for place, block in enumerate(block_row):
                    if block < 0:
                        continue
                    for chunk, engine in views:
                        run = engine.shape[-1]
                        chunk[:, :, :, place, :, :run] = engine[:, :, block]
                        if run < plan.stored_bytes:
                            chunk[:, :, :, place, :, run:] = 0

    def unpack(self, block_ids: Any, chunks: Any, slots: Any) -> None:
        """Copy this rank's part of some chunks into the engine's cache. Arguments as `pack`."""
        for plan, stacks in self._stacks:
            for block_row, views in _walk(plan, stacks, block_ids, chunks, slots):
                for place, block in enumerate(block_row):
                    if block < 0:
                        continue
                    for chunk, engine in views:
                        run = engine.shape[-1]
                        engine[:, :, block] = chunk[:, :, :, place, :, :run]


_Array = NDArray[np.uint8]
_Stack = tuple[slice, slice, _Array]
"""Layers, halves, their bytes `[layers, halves, num_blocks, heads, block_tokens, run_bytes]`."""


def _walk(
    plan: CopyPlan, stacks: list[_Stack], block_ids: Any, chunks: Any, slots: Any
) -> list[tuple[list[int], list[tuple[_Array, _Array]]]]:
    """Check the arguments; return per chunk its block ids and its pairs of chunk and engine bytes.

    The chunk's side is `[layers, halves, heads, blocks_per_chunk, block_tokens, stored_bytes]`.
    """
    ids = np.asarray(block_ids, dtype=np.int64)
    rows = np.asarray(slots, dtype=np.int64)
    if ids.ndim != 2 or ids.shape[1] != plan.blocks_per_chunk or rows.shape != ids.shape[:1]:
        raise Malformed(
            f"block ids {list(ids.shape)} and slots {list(rows.shape)}",
            f"not [n, {plan.blocks_per_chunk}] and [n]",
        )
    if ids.size and ids.max() >= plan.shape[0]:
        raise Malformed(f"block id {ids.max()}", f"the cache has {plan.shape[0]} blocks")
    if rows.size and (rows.min() < 0 or rows.max() >= len(chunks)):
        raise Malformed(f"slots {rows.min()}..{rows.max()}", f"there are {len(chunks)}")
    pairs = list[tuple[list[int], list[tuple[_Array, _Array]]]]()
    for row, slot in zip(ids.tolist(), rows.tolist(), strict=True):
        whole = _chunk_view(plan, chunks[slot])
        pairs.append((row, [(whole[layers, halves], engine) for layers, halves, engine in stacks]))
    return pairs


def _chunk_view(plan: CopyPlan, chunk: Any) -> _Array:
    is_buffer = not hasattr(chunk, "__array__")
    flat = np.frombuffer(chunk, np.uint8) if is_buffer else np.asarray(chunk).view(np.uint8)
    if flat.ndim != 1 or flat.nbytes < plan.chunk_bytes:
        raise ConfigError(
            "slot_bytes",
            f"a buffer of {flat.nbytes} bytes for a chunk of {plan.chunk_bytes}",
            "Give the pool slots that hold the largest chunk of any group",
        )
    _, heads, tokens, _ = plan.shape
    return np.ndarray(
        (plan.layers, plan.halves, heads, plan.blocks_per_chunk, tokens, plan.stored_bytes),
        np.uint8,
        flat,
        plan.chunk_offset,
        (
            plan.page_stride,
            plan.half_stride,
            plan.head_stride,
            plan.block_stride,
            plan.stored_bytes,
            1,
        ),
    )


def _stacks(plan: CopyPlan) -> list[_Stack]:
    """View layers and halves as one array where their addresses allow it, else as several."""
    whole = _stack(plan.parts)
    if whole is not None:
        return [(slice(None), slice(None), whole)]
    stacks = list[_Stack]()
    for layer, parts in enumerate(plan.parts):
        both = _stack((parts,))
        if both is not None:
            stacks.append((slice(layer, layer + 1), slice(None), both))
            continue
        for half, part in enumerate(parts):
            one = part.array[None, None]
            stacks.append((slice(layer, layer + 1), slice(half, half + 1), one))
    return stacks


def _stack(parts: Sequence[Sequence[Part]]) -> _Array | None:
    """Return `[layers, halves, ...]` over parts evenly spaced in one allocation, else None."""
    first = parts[0][0]
    layer_step = parts[1][0].address - first.address if len(parts) > 1 else 0
    half_step = parts[0][1].address - first.address if len(parts[0]) > 1 else 0
    for layer, halves in enumerate(parts):
        for half, part in enumerate(halves):
            expected = first.address + layer * layer_step + half * half_step
            if part.memory != first.memory or part.address != expected:
                return None
    return np.lib.stride_tricks.as_strided(
        first.array,
        (len(parts), len(parts[0]), *first.shape),
        (layer_step, half_step, *first.array.strides),
    )
