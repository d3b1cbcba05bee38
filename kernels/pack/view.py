"""How an engine keeps one layer of its KV cache, brought to one form for every engine.

Whatever the order of axes in memory, a view is one or more *parts* (K and V; the MLA rows; the
sections of a state), each seen as bytes with the axes `[num_blocks, heads, block_tokens,
run_bytes]`. Only strides differ between engines. MLA has one head; a state has one head and one
token. The last axis is contiguous, no byte is copied, and a part keeps its tensor alive.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...fabric.errors import Unsupported

Cache = NDArray[Any] | torch.Tensor
"""What an engine hands in: any element type, on any device."""

Bytes = NDArray[np.uint8] | torch.Tensor
"""The same memory as uint8."""


class CacheOrder(Enum):
    """The axes of a dense cache in one tensor. N: tokens of a block, H: heads, D: head_dim."""

    NHD = "[2, num_blocks, block_tokens, heads, head_dim]"
    HND = "[2, num_blocks, heads, block_tokens, head_dim]"
    BLOCKS_NHD = "[num_blocks, 2, block_tokens, heads, head_dim]"
    BLOCKS_HND = "[num_blocks, 2, heads, block_tokens, head_dim]"

    @property
    def halves_axis(self) -> int:
        """Where K and V are told apart."""
        return 0 if self in (CacheOrder.NHD, CacheOrder.HND) else 1

    @property
    def tokens_first(self) -> bool:
        """Whether the tokens of a block come before its heads."""
        return self in (CacheOrder.NHD, CacheOrder.BLOCKS_NHD)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """uint8 `[num_blocks, heads, block_tokens, run_bytes]` at an address."""

    data: Bytes
    address: int
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int]
    """Of blocks, heads and tokens, in bytes."""
    memory: tuple[int, int]
    """First address and length of the allocation that it lies in."""

    @property
    def device(self) -> str:
        """`cpu`, `cuda` (also for AMD), ..."""
        return self.data.device.type if isinstance(self.data, torch.Tensor) else "cpu"

    @property
    def array(self) -> NDArray[np.uint8]:
        """The bytes as numpy; of a tensor on the CPU without a copy."""
        return self.data.numpy() if isinstance(self.data, torch.Tensor) else self.data


@dataclass(frozen=True, slots=True, eq=False)
class EngineCacheView:
    """One layer of an engine's cache."""

    parts: tuple[Part, ...]

    @classmethod
    def dense(cls, cache: Cache, order: CacheOrder) -> "EngineCacheView":
        """View a tensor of five axes that holds K and V. Errors as `split`."""
        if cache.ndim != 5 or cache.shape[order.halves_axis] != 2:
            raise _not_viewable(cache, f"give a tensor {order.value}")
        if order.halves_axis == 0:
            return cls.split(cache[0], cache[1], tokens_first=order.tokens_first)
        return cls.split(cache[:, 0], cache[:, 1], tokens_first=order.tokens_first)

    @classmethod
    def split(cls, k: Cache, v: Cache, *, tokens_first: bool) -> "EngineCacheView":
        """View K and V apart: `[num_blocks, block_tokens, heads, head_dim]`, or heads first.

        Raises `Unsupported` if `head_dim` is not contiguous.
        """
        order = (0, 2, 1, 3) if tokens_first else (0, 1, 2, 3)
        return cls(tuple(_part(_permuted(half, order)) for half in (k, v)))

    @classmethod
    def mla(cls, cache: Cache) -> "EngineCacheView":
        """View `[num_blocks, block_tokens, row]`. Raises `Unsupported` if rows have gaps inside."""
        if cache.ndim != 3:
            raise _not_viewable(cache, "give a tensor [num_blocks, block_tokens, row]")
        return cls((_part(cache[:, None]),))

    @classmethod
    def state(cls, *sections: Cache) -> "EngineCacheView":
        """View the sections of a state, each `[num_blocks, ...]` and contiguous inside a block."""
        return cls(tuple(_part(_flat(section)) for section in sections))

    @classmethod
    def state_blob(cls, cache: Cache, section_bytes: Sequence[int]) -> "EngineCacheView":
        """View `[num_blocks, state_bytes]` whose sections follow each other, so many bytes each."""
        blob = _as_bytes(cache)
        if blob.ndim != 2 or blob.shape[1] != sum(section_bytes):
            raise _not_viewable(cache, f"give [num_blocks, {sum(section_bytes)} bytes]")
        ends = np.cumsum(section_bytes).tolist()
        return cls.state(
            *(blob[:, end - size : end] for end, size in zip(ends, section_bytes, strict=True))
        )


def _part(cache: Cache) -> Part:
    data = _as_bytes(cache)
    blocks, heads, tokens, run = data.shape
    if isinstance(data, torch.Tensor):
        storage = data.untyped_storage()
        memory = (storage.data_ptr(), storage.nbytes())
        address, strides = data.data_ptr(), data.stride()
    else:
        memory, address, strides = _allocation(data), data.ctypes.data, data.strides
    return Part(
        data, address, (blocks, heads, tokens, run), (strides[0], strides[1], strides[2]), memory
    )


def _permuted(cache: Cache, order: tuple[int, int, int, int]) -> Cache:
    if cache.ndim != 4:
        raise _not_viewable(cache, "give K and V with four axes each")
    return cache.permute(order) if isinstance(cache, torch.Tensor) else cache.transpose(order)


def _flat(cache: Cache) -> Cache:
    """`[num_blocks, ...]` to `[num_blocks, 1, 1, everything else]`, without a copy."""
    shape = (cache.shape[0], 1, 1, -1)
    try:
        if isinstance(cache, torch.Tensor):
            return cache.view(shape)
        flat = cache.reshape(shape, copy=False)
    except (ValueError, RuntimeError) as error:
        raise _not_viewable(cache, "keep each block's state contiguous") from error
    return flat


def _as_bytes(cache: Cache) -> Bytes:
    try:
        if isinstance(cache, torch.Tensor):
            return cache.view(torch.uint8)
        return cache.view(np.uint8)
    except (ValueError, RuntimeError) as error:
        raise _not_viewable(cache, "keep the last axis contiguous") from error


def _allocation(array: NDArray[Any]) -> tuple[int, int]:
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    first, end = np.lib.array_utils.byte_bounds(root)
    return first, end - first


def _not_viewable(cache: Cache, remedy: str) -> Unsupported:
    strides = cache.stride() if isinstance(cache, torch.Tensor) else cache.strides
    value = f"{cache.dtype}{list(cache.shape)} with strides {list(strides)}"
    return Unsupported("engine cache", value, f"To be seen as bytes in place, {remedy}.")
