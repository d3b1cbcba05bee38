"""Copies chunks between an engine's blocks and slots of host memory, one chunk a call.

A packer of the CPU reads and writes a slot in place. One of a GPU wants its arguments on the
device, so the chunk passes through a buffer there, which lives as long as the call. Both calls
return when the bytes are in place. Threading: any thread, for different blocks and slots.
"""

from typing import Any

import numpy as np
import torch

from ...kernels.pack import Packer


class SlotCopier:
    """The packer of one cache, for chunks that lie in host memory."""

    def __init__(self, packer: Packer, device: torch.device) -> None:
        self._packer = packer
        self._device = device

    def pack(self, blocks: np.ndarray[Any, Any], slot: memoryview) -> None:
        """Copy `blocks` (int [blocks_per_chunk]) into a slot of at least a chunk's bytes."""
        if self._device.type == "cpu":
            self._packer.pack(blocks[None], [slot], [0])
            return
        ids, zero, chunk = self._on_device(blocks)
        self._packer.pack(ids, chunk, zero)
        chunk_bytes = self._packer.group.chunk_bytes
        torch.frombuffer(slot, dtype=torch.uint8, count=chunk_bytes).copy_(chunk[0])

    def unpack(self, blocks: np.ndarray[Any, Any], slot: memoryview) -> None:
        """Copy a slot, which may be read-only, into `blocks`."""
        if self._device.type == "cpu":
            self._packer.unpack(blocks[None], [slot], [0])
            return
        ids, zero, chunk = self._on_device(blocks)
        # A copy, because torch does not take read-only memory.
        whole = np.frombuffer(slot, np.uint8, count=self._packer.group.chunk_bytes).copy()
        chunk[0].copy_(torch.from_numpy(whole))
        self._packer.unpack(ids, chunk, zero)

    def _on_device(
        self, blocks: np.ndarray[Any, Any]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ids = torch.from_numpy(blocks[None].astype(np.int64)).to(self._device)
        zero = torch.zeros(1, dtype=torch.int64, device=self._device)
        shape = (1, self._packer.group.chunk_bytes)
        return ids, zero, torch.empty(shape, dtype=torch.uint8, device=self._device)
