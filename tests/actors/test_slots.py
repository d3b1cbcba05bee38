"""Slots of host memory and an engine's blocks, by the way of the CPU and by that of a GPU.

The GPU's way also runs without one: what is put on the device stays on the CPU, and the check of
the GPU's packer judges the arguments.
"""

import numpy as np
import pytest
import torch

from kvfabric.actors.engines.slots import SlotCopier
from kvfabric.fabric.layout import GroupLayout
from kvfabric.kernels.pack import CacheOrder, EngineCacheView
from kvfabric.kernels.pack.naive import NumpyPacker
from kvfabric.kernels.pack.triton import TritonPacker, _check

GROUP = GroupLayout.dense(2, 2, 8, 4, 16)


class StrictPacker(NumpyPacker):
    """Takes only what the packer of a GPU takes."""

    def pack(self, block_ids, chunks, slots):
        _check(self.plans[0], block_ids, chunks, slots)
        super().pack(block_ids, chunks, slots)

    def unpack(self, block_ids, chunks, slots):
        _check(self.plans[0], block_ids, chunks, slots)
        super().unpack(block_ids, chunks, slots)


class Beside(SlotCopier):
    """Goes the GPU's way, with the CPU's memory for the device's."""

    def _on_device(self, blocks):
        self._device = torch.device("cpu")
        taken = super()._on_device(blocks)
        self._device = torch.device("cuda")
        return taken


def copier(kind, cache):
    views = [EngineCacheView.dense(layer, CacheOrder.NHD) for layer in cache]
    if kind == "cpu":
        return SlotCopier(NumpyPacker(GROUP, views), torch.device("cpu"))
    return Beside(StrictPacker(GROUP, views), torch.device("cuda"))


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_a_chunk_goes_to_a_slot_and_back_to_other_blocks(kind):
    generator = torch.Generator().manual_seed(1)
    cache = torch.randn((2, 2, 9, 4, 2, 8), generator=generator)
    before = cache.clone()
    slot = bytearray(b"\xa5" * (GROUP.chunk_bytes + 64))
    copies = copier(kind, cache)
    copies.pack(np.array([7, 2, 0, 5]), memoryview(slot))
    assert torch.equal(cache, before)
    assert slot[GROUP.chunk_bytes :] == b"\xa5" * 64
    copies.unpack(np.array([1, 3, 4, 8]), memoryview(bytes(slot)))
    assert torch.equal(cache[:, :, [1, 3, 4, 8]], before[:, :, [7, 2, 0, 5]])
    assert torch.equal(cache[:, :, [0, 2, 5, 6, 7]], before[:, :, [0, 2, 5, 6, 7]])


def test_the_packer_of_a_gpu_refuses_what_the_cpu_takes():
    cache = torch.zeros((2, 2, 9, 4, 2, 8))
    packer = StrictPacker(GROUP, [EngineCacheView.dense(c, CacheOrder.NHD) for c in cache])
    with pytest.raises((AttributeError, TypeError)):
        packer.pack(np.array([[0, 1, 2, 3]]), [memoryview(bytearray(GROUP.chunk_bytes))], [0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_chunk_goes_through_a_real_gpu():
    cache = torch.randn((2, 2, 9, 4, 2, 8), device="cuda")
    before = cache.clone()
    slot = bytearray(GROUP.chunk_bytes)
    views = [EngineCacheView.dense(layer, CacheOrder.NHD) for layer in cache]
    copies = SlotCopier(TritonPacker(GROUP, views), torch.device("cuda"))
    copies.pack(np.array([7, 2, 0, 5]), memoryview(slot))
    copies.unpack(np.array([1, 3, 4, 8]), memoryview(bytes(slot)))
    assert torch.equal(cache[:, :, [1, 3, 4, 8]], before[:, :, [7, 2, 0, 5]])
