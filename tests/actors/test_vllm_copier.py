"""Blocks into slots and back, bit for bit, against a twin of numpy; nothing else is touched."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvfabric.actors.engines.vllm.copier import BlockCopier, OpaqueViews, block_rows

POISON = 0xA5
BLOCKS = 7
SHAPES = [(2, 4, 3), (5,), (1, 2)]
DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.float16]


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a tensor of random bytes, NaN and all."""
    size = int(np.prod(shape)) * dtype.itemsize
    data = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    return torch.from_numpy(data).view(dtype).reshape(shape)


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).reshape(tensor.shape[0], -1).numpy()


def views(tensors: list[torch.Tensor]) -> OpaqueViews:
    rows = [block_rows(tensor, BLOCKS) for tensor in tensors]
    assert all(row is not None for row in rows)
    return OpaqueViews(tuple(row for row in rows if row is not None))


def naive(tensors: list[torch.Tensor], blocks: list[int]) -> bytes:
    """The twin: block after block, each tensor's bytes of it in order."""
    return b"".join(raw(tensor)[block].tobytes() for block in blocks for tensor in tensors)


caches = st.lists(
    st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES)), min_size=1, max_size=3
)
chunks = st.lists(st.integers(0, BLOCKS - 1), max_size=4, unique=True)


@given(caches, chunks, st.integers(0, 1000))
def test_a_chunk_goes_to_its_slot_and_back(cache, blocks, seed) -> None:
    tensors = [
        filled((BLOCKS, *shape), dtype, seed + at) for at, (shape, dtype) in enumerate(cache)
    ]
    before = [raw(tensor).copy() for tensor in tensors]
    group = views(tensors)
    copier = BlockCopier([views([filled((BLOCKS, 3), torch.uint8, 1)]), group])
    margin = 16
    memory = bytearray([POISON]) * (len(blocks) * group.block_bytes + margin)
    slot = memoryview(memory)[: len(blocks) * group.block_bytes]
    if not blocks:
        return
    copier.pack(1, blocks, slot)
    assert bytes(slot) == naive(tensors, blocks)
    assert memory[-margin:] == bytes([POISON]) * margin
    assert all((raw(t) == b).all() for t, b in zip(tensors, before, strict=True))

    others = [torch.full_like(raw_view, POISON) for raw_view in group.rows]
    target = BlockCopier([OpaqueViews(tuple(others))])
    target.unpack(0, blocks, slot)
    for other, was in zip(others, before, strict=True):
        untouched = np.full_like(was, POISON)
        untouched[blocks] = was[blocks]
        assert (other.numpy() == untouched).all()


def test_blocks_of_a_chunk_need_not_be_neighbours_nor_in_order() -> None:
    tensor = filled((BLOCKS, 4), torch.uint8, 3)
    slot = bytearray(12)
    BlockCopier([views([tensor])]).pack(0, [6, 0, 3], memoryview(slot))
    assert bytes(slot) == b"".join(bytes(raw(tensor)[block]) for block in (6, 0, 3))


def test_a_load_over_the_null_block_leaves_the_others_alone() -> None:
    tensor = filled((BLOCKS, 4), torch.uint8, 3)
    was = raw(tensor).copy()
    BlockCopier([views([tensor])]).unpack(0, [0, 2, 0], memoryview(bytearray(range(12))))
    assert bytes(raw(tensor)[2]) == bytes(range(4, 8))
    assert (raw(tensor)[[1, 3, 4, 5, 6]] == was[[1, 3, 4, 5, 6]]).all()


@pytest.mark.parametrize("length", [3, 0])
def test_a_slot_that_is_too_short_is_refused(length) -> None:
    copier = BlockCopier([views([filled((BLOCKS, 4), torch.uint8, 3)])])
    with pytest.raises((RuntimeError, ValueError)):
        copier.pack(0, [1], memoryview(bytearray(length)))


def test_rows_are_views_of_the_engines_memory() -> None:
    tensor = filled((BLOCKS, 2, 4), torch.float32, 3)
    rows = block_rows(tensor, BLOCKS)
    assert rows is not None
    assert (rows.shape, rows.dtype) == ((BLOCKS, 32), torch.uint8)
    assert rows.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, BLOCKS, 4, 3),
        torch.zeros(2, BLOCKS, 4, 3).transpose(0, 1),
        torch.zeros(BLOCKS, 8)[:, ::2],
        torch.zeros(BLOCKS, 4, 8)[:, :, :4],
        torch.zeros(1, 4).expand(BLOCKS, 4),
    ],
)
def test_what_does_not_lie_block_by_block_is_refused(tensor) -> None:
    assert block_rows(tensor, BLOCKS) is None


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(BLOCKS * 12).view(BLOCKS, 4, 3).transpose(1, 2),
        torch.arange(BLOCKS * 8).view(BLOCKS, 8)[:, :4],
        torch.arange(2 * BLOCKS * 4).view(2 * BLOCKS, 4)[::2],
    ],
)
def test_a_block_may_lie_apart_from_the_next_and_its_axes_in_any_order(tensor) -> None:
    rows = block_rows(tensor, BLOCKS)
    assert rows is not None
    assert rows.data_ptr() == tensor.data_ptr()
    assert rows.shape == (BLOCKS, tensor[0].numel() * tensor.element_size())
    for block in range(BLOCKS):
        begin = block * tensor.stride(0)
        flat = torch.as_strided(tensor, (tensor[0].numel(),), (1,), begin)
        assert (rows[block] == flat.view(torch.uint8)).all()
