"""Pack and unpack on the CPU, against a layout written down independently of the code."""

import hashlib
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from kvfabric.fabric.errors import ConfigError, Malformed, Unsupported
from kvfabric.fabric.layout import GroupLayout
from kvfabric.kernels.gpu_checks import PACK_CASES, PackCase, check_pack
from kvfabric.kernels.pack import CacheOrder, EngineCacheView, make_packer
from kvfabric.kernels.pack.naive import NumpyPacker

LAYERS, HEADS, DIM, CHUNK = 2, 4, 6, 32
POISON = 0x5A

GOLDEN_DENSE = "4038573e10949aae3e4755d32e51863020adefdd9e22102a45575668543ecd8d"
GOLDEN_MLA = "fa26a9ce93b1cf16e615bf9363bc0bcc322219d90a6e61dd05284b80f216cebb"
"""SHA-256 of the chunks in docs/protocol.md."""


def tokens_of(count: int, itemsize: int) -> np.ndarray:
    """Logical KV bytes [layers, 2, tokens, heads, dim * itemsize], a fixed pattern."""
    shape = (LAYERS, 2, count, HEADS, DIM * itemsize)
    return ((np.arange(np.prod(shape)) * 131 + 7) % 251).astype(np.uint8).reshape(shape)


def canonical(tokens: np.ndarray) -> np.ndarray:
    """Chunks [n, chunk_bytes] by the definition: layer, K/V, head, token, dim."""
    layers, _, count, heads, run = tokens.shape
    split = tokens.reshape(layers, 2, count // CHUNK, CHUNK, heads, run)
    return split.transpose(2, 0, 1, 4, 3, 5).reshape(count // CHUNK, -1)


def paged(
    tokens: np.ndarray, order: CacheOrder, block_tokens: int, blocks: np.ndarray, heads: slice
) -> list[np.ndarray]:
    """What an engine holds per layer: the tokens' blocks scattered over a poisoned cache."""
    layers, _, count, _, run = tokens.shape
    caches = []
    for layer in range(layers):
        mine = tokens[layer, :, :, heads].reshape(2, count // block_tokens, block_tokens, -1, run)
        cache = np.full((2, blocks.max() + 3, *mine.shape[2:]), POISON, np.uint8)
        cache[:, blocks] = mine
        if not order.tokens_first:
            cache = cache.transpose(0, 1, 3, 2, 4)
        if order.halves_axis == 1:
            cache = cache.swapaxes(0, 1)
        caches.append(cache.copy(order="C"))
    return caches


@pytest.mark.parametrize("order", CacheOrder)
@pytest.mark.parametrize("blocks_per_chunk", [1, 4, 16])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_engine_and_every_tp_size_writes_and_reads_the_same_bytes(
    order: CacheOrder, blocks_per_chunk: int, size: int
):
    group = GroupLayout.dense(LAYERS, HEADS, DIM, 2, CHUNK)
    tokens = tokens_of(3 * CHUNK, 2)
    block_tokens = CHUNK // blocks_per_chunk
    rng = np.random.default_rng(blocks_per_chunk)
    blocks = rng.permutation(3 * blocks_per_chunk + 5)[: 3 * blocks_per_chunk]
    ids, slots = blocks.reshape(3, -1), np.array([2, 0, 3])
    chunks = np.full((4, group.chunk_bytes + 64), POISON, np.uint8)
    for rank in range(size):
        mine = slice(rank * HEADS // size, (rank + 1) * HEADS // size)
        caches = paged(tokens, order, block_tokens, blocks, mine)
        views = [EngineCacheView.dense(cache, order) for cache in caches]
        make_packer(group, views, rank, size).pack(ids, chunks, slots)
    np.testing.assert_array_equal(chunks[slots, : group.chunk_bytes], canonical(tokens))
    assert (chunks[:, group.chunk_bytes :] == POISON).all()
    assert (chunks[1] == POISON).all()
    for rank in range(size):
        mine = slice(rank * HEADS // size, (rank + 1) * HEADS // size)
        wanted = paged(tokens, order, block_tokens, blocks, mine)
        empty = [np.full_like(cache, POISON) for cache in wanted]
        views = [EngineCacheView.dense(cache, order) for cache in empty]
        make_packer(group, views, rank, size).unpack(ids, chunks, slots)
        for found, cache in zip(empty, wanted, strict=True):
            np.testing.assert_array_equal(found, cache)


def test_golden_bytes():
    tokens = tokens_of(CHUNK, 2)
    group = GroupLayout.dense(LAYERS, HEADS, DIM, 2, CHUNK)
    blocks = np.array([3, 0, 2, 5])
    views = [
        EngineCacheView.dense(cache, CacheOrder.NHD)
        for cache in paged(tokens, CacheOrder.NHD, 8, blocks, slice(None))
    ]
    chunk = bytearray(group.chunk_bytes)
    make_packer(group, views).pack([blocks], [memoryview(chunk)], [0])
    assert hashlib.sha256(chunk).hexdigest() == GOLDEN_DENSE
    rows = ((np.arange(2 * 4 * 132) * 131 + 7) % 251).astype(np.uint8).reshape(2, 4, 132)
    mla = GroupLayout.mla(2, 132, 4)
    chunk = bytearray(b"\xff" * mla.chunk_bytes)
    views = [EngineCacheView.mla(layer.reshape(2, 2, 132)) for layer in rows]
    make_packer(mla, views).pack([[0, 1]], [chunk], [0])
    assert bytes(chunk) == b"".join(row.tobytes() + bytes(12) for row in rows.reshape(-1, 132))
    assert hashlib.sha256(chunk).hexdigest() == GOLDEN_MLA
    back = np.zeros((2, 2, 2, 132), np.uint8)
    packer = make_packer(mla, [EngineCacheView.mla(layer) for layer in back])
    packer.unpack([[0, 1]], [bytes(chunk)], [0])
    np.testing.assert_array_equal(back.reshape(rows.shape), rows)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_state_is_its_sections_with_the_ranks_in_order(size: int):
    group = GroupLayout.state(2, (24, 640), 16)
    state = np.random.default_rng(3).integers(0, 256, (2, 664), dtype=np.uint8)
    chunks = np.full((1, group.chunk_bytes), POISON, np.uint8)
    for rank in range(size):
        views = []
        for layer in state:
            conv, space = np.zeros((3, 24 // size), np.uint8), np.zeros((3, 640 // size), np.uint8)
            conv[2] = np.split(layer[:24], size)[rank]
            space[2] = np.split(layer[24:], size)[rank]
            separate = EngineCacheView.state(conv, space.reshape(3, 4, -1).view(np.float32))
            blob = np.concatenate([conv, space], axis=1)
            together = EngineCacheView.state_blob(blob, (24 // size, 640 // size))
            views.append((separate, together)[rank % 2])
        if rank % 2 == 0 or size == 1:
            make_packer(group, views, rank, size).pack([[2]], chunks, [0])
        else:
            make_packer(group, views, rank, size).pack(torch.tensor([[2]]), chunks, (0,))
    np.testing.assert_array_equal(chunks[0], state.ravel())


@pytest.mark.parametrize("order", CacheOrder)
def test_a_window_does_not_change_where_bytes_lie(order: CacheOrder):
    tokens = tokens_of(2 * CHUNK, 2)
    blocks = np.array([6, 1, 4, 0])
    chunks = {}
    for window in (None, 24):
        group = GroupLayout.dense(LAYERS, HEADS, DIM, 2, CHUNK, window_tokens=window)
        caches = paged(tokens, order, CHUNK // 2, blocks, slice(None))
        packer = make_packer(group, [EngineCacheView.dense(cache, order) for cache in caches])
        chunks[window] = np.zeros((2, group.chunk_bytes), np.uint8)
        packer.pack(blocks.reshape(2, 2), chunks[window], [0, 1])
    np.testing.assert_array_equal(chunks[24], canonical(tokens))
    np.testing.assert_array_equal(chunks[24], chunks[None])


@pytest.mark.parametrize("row_bytes", [576, 577])
def test_blocks_of_a_window_that_the_engine_has_freed_are_zeros_and_left_alone(row_bytes: int):
    group = GroupLayout.mla(2, row_bytes, 16, window_tokens=6)
    caches = np.random.default_rng(8).integers(1, 256, (2, 5, 4, row_bytes), dtype=np.uint8)
    chunk = np.zeros((1, group.chunk_bytes), np.uint8)
    packer = make_packer(group, [EngineCacheView.mla(cache) for cache in caches])
    packer.pack([[-1, -1, 3, 1]], chunk, [0])
    rows = chunk.reshape(2, 16, group.row_stride_bytes)
    np.testing.assert_array_equal(
        rows[:, 8:, :row_bytes], caches[:, [3, 1]].reshape(2, 8, row_bytes)
    )
    assert (rows[:, :8] == 0).all()
    assert (rows[:, :, row_bytes:] == 0).all()
    before = caches.copy()
    packer.unpack([[-1, -1, 4, 2]], chunk, [0])
    np.testing.assert_array_equal(caches[:, [4, 2]], before[:, [3, 1]])
    np.testing.assert_array_equal(caches[:, [0, 1, 3]], before[:, [0, 1, 3]])


@pytest.mark.parametrize("blocks_per_chunk", [1, 4, 16])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_writes_and_reads_the_same_rows_of_mla(blocks_per_chunk: int, size: int):
    group = GroupLayout.mla(2, 132, 16)
    tokens = np.random.default_rng(9).integers(0, 256, (2, 16, 132), dtype=np.uint8)
    cache = tokens.reshape(2, blocks_per_chunk, -1, 132)
    ids = [list(range(blocks_per_chunk))]
    wanted = np.zeros((2, 16, group.row_stride_bytes), np.uint8)
    wanted[:, :, :132] = tokens
    for rank in range(size):
        chunk = np.full((1, group.chunk_bytes), POISON, np.uint8)
        views = [EngineCacheView.mla(layer) for layer in cache]
        make_packer(group, views, rank, size).pack(ids, chunk, [0])
        np.testing.assert_array_equal(chunk[0], wanted.ravel())
        back = np.full_like(cache, POISON)
        views = [EngineCacheView.mla(layer) for layer in back]
        make_packer(group, views, rank, size).unpack(ids, chunk, [0])
        np.testing.assert_array_equal(back, cache)


@pytest.mark.parametrize("case", PACK_CASES, ids=lambda case: case.name)
def test_every_case_equals_the_same_bytes_in_the_plain_order_of_axes(case: PackCase):
    check_pack(case, NumpyPacker, "cpu")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("stacked", [True, False], ids=["one tensor", "a tensor per layer"])
def test_torch_caches_are_read_and_written_in_place(dtype: torch.dtype, stacked: bool):
    itemsize = dtype.itemsize
    group = GroupLayout.dense(LAYERS, HEADS, DIM, itemsize, CHUNK)
    tokens = tokens_of(CHUNK, itemsize)
    blocks = np.arange(4)[::-1].copy()
    arrays = paged(tokens, CacheOrder.NHD, 8, blocks, slice(None))
    whole = torch.from_numpy(np.stack(arrays)).view(dtype)
    caches = list(whole) if stacked else [layer.clone() for layer in whole]
    packer = make_packer(group, [EngineCacheView.dense(c, CacheOrder.NHD) for c in caches])
    chunk = np.zeros((1, group.chunk_bytes), np.uint8)
    packer.pack(torch.from_numpy(blocks[None]), chunk, torch.zeros(1, dtype=torch.int64))
    np.testing.assert_array_equal(chunk, canonical(tokens))
    for cache in caches:
        cache.view(torch.uint8).fill_(POISON)
    packer.unpack([blocks.tolist()], torch.from_numpy(chunk), [0])
    for cache, array in zip(caches, arrays, strict=True):
        np.testing.assert_array_equal(cache.view(torch.uint8).numpy(), array)


def test_k_and_v_in_tensors_of_their_own():
    group = GroupLayout.dense(LAYERS, HEADS, DIM, 2, CHUNK)
    tokens = tokens_of(CHUNK, 2)
    views = []
    for layer in tokens:
        k, v = (half.reshape(4, 8, HEADS, -1).copy() for half in layer)
        views.append(EngineCacheView.split(k, v, tokens_first=True))
    chunk = np.zeros((1, group.chunk_bytes), np.uint8)
    make_packer(group, views).pack([[0, 1, 2, 3]], chunk, [0])
    np.testing.assert_array_equal(chunk, canonical(tokens))


def test_replicated_heads_write_the_same_bytes():
    group = GroupLayout.dense(1, 2, DIM, 2, 8)
    rng = np.random.default_rng(5)
    head = rng.integers(0, 256, (2, 2, 2, 1, 8, DIM * 2), dtype=np.uint8)
    chunks = np.zeros((2, group.chunk_bytes), np.uint8)
    for rank in range(4):
        view = EngineCacheView.dense(head[rank // 2], CacheOrder.HND)
        packer = make_packer(group, [view], rank, 4)
        packer.pack([[0]], chunks, [rank % 2])
    np.testing.assert_array_equal(chunks[0], chunks[1])


def simple() -> tuple[GroupLayout, np.ndarray, NumpyPacker]:
    group = GroupLayout.dense(1, 2, 4, 1, 8)
    cache = np.arange(2 * 6 * 4 * 2 * 4, dtype=np.uint8).reshape(2, 6, 4, 2, 4)
    view = EngineCacheView.dense(cache, CacheOrder.NHD)
    return group, cache, NumpyPacker(group, [view])


def test_padding_ids_are_neither_read_nor_written():
    group, cache, packer = simple()
    chunks = np.full((1, group.chunk_bytes), POISON, np.uint8)
    packer.pack([[-1, -1]], chunks, [0])
    assert (chunks == POISON).all()
    before = cache.copy()
    packer.unpack([[-1, 2]], chunks, [0])
    changed = (cache != before).any(axis=(0, 2, 3, 4))
    assert changed.tolist() == [False, False, True, False, False, False]


@pytest.mark.parametrize(
    ("ids", "slots", "error"),
    [
        ([[0, 6]], [0], Malformed),
        ([[0, 1], [2, 6]], [0, 1], Malformed),
        ([[0, 1, 2]], [0], Malformed),
        ([0, 1], [0], Malformed),
        ([[0, 1]], [0, 1], Malformed),
        ([[0, 1]], [2], Malformed),
        ([[0, 1]], [-1], Malformed),
    ],
)
def test_a_refused_call_has_moved_nothing(
    ids: Sequence[object], slots: Sequence[int], error: type[Exception]
):
    group, cache, packer = simple()
    chunks = np.full((2, group.chunk_bytes), POISON, np.uint8)
    before = cache.copy()
    for move in (packer.pack, packer.unpack):
        with pytest.raises(error):
            move(ids, chunks, slots)
    assert (chunks == POISON).all()
    np.testing.assert_array_equal(cache, before)


def test_a_slot_too_small_for_a_chunk_is_refused():
    group, _, packer = simple()
    small = np.zeros((1, group.chunk_bytes - 1), np.uint8)
    with pytest.raises(ConfigError, match="slot_bytes"):
        packer.pack([[0, 1]], small, [0])


def test_caches_that_do_not_fit_the_group_are_refused():
    group = GroupLayout.dense(2, 4, 8, 2, 16)

    def view(blocks: int = 3, tokens: int = 4, heads: int = 4, dim: int = 8) -> EngineCacheView:
        cache = np.zeros((2, blocks, tokens, heads, dim), np.uint16)
        return EngineCacheView.dense(cache, CacheOrder.NHD)

    bad: list[tuple[list[EngineCacheView], str]] = [
        ([view()], "1 views"),
        ([view(), view(blocks=4)], "differ"),
        ([view(heads=2)] * 2, "2 heads"),
        ([view(dim=4)] * 2, "8 bytes of a token"),
        ([view(tokens=3)] * 2, "does not divide"),
        ([EngineCacheView.mla(np.zeros((3, 4, 16), np.uint8))] * 2, "1 tensors per layer"),
    ]
    for views, message in bad:
        with pytest.raises(ConfigError, match=message):
            make_packer(group, views)
    with pytest.raises(ConfigError, match="4 heads"):
        make_packer(group, [view()] * 2, 0, 2)
    with pytest.raises(Unsupported, match="tensor_parallel"):
        make_packer(group, [view()] * 2, 0, 3)


@pytest.mark.parametrize("convert", [lambda array: array, torch.from_numpy], ids=["numpy", "torch"])
def test_a_cache_that_cannot_be_seen_in_place_is_refused(convert):
    dense = convert(np.zeros((2, 3, 4, 2, 8), np.float32))
    for bad in (
        lambda: EngineCacheView.dense(dense[..., ::2], CacheOrder.NHD),
        lambda: EngineCacheView.dense(dense[0], CacheOrder.NHD),
        lambda: EngineCacheView.dense(dense, CacheOrder.BLOCKS_NHD),
        lambda: EngineCacheView.split(dense, dense, tokens_first=True),
        lambda: EngineCacheView.mla(dense),
        lambda: EngineCacheView.state(dense[0, :, :, :, :4]),
        lambda: EngineCacheView.state_blob(dense[0, 0, 0], (30,)),
    ):
        with pytest.raises(Unsupported, match="engine cache"):
            bad()
