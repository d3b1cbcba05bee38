"""Pack and unpack on a GPU: one launch for all chunks, blocks, layers, halves and heads of a plan.

A program copies one tile of one block of one layer and half, in the order of the chunk, as the
widest aligned word. The engine's side is reached through a table of addresses, one per layer and
half. All that is known when the engine attaches is a compile-time constant, so that divisions are
multiplications and the compiler sees how far addresses are aligned.

Calls only enqueue on the current stream: they read nothing back, have fixed shapes for a given
number of chunks, and can be captured in a graph. A block id or a slot that is negative or too large
is skipped: both lie on the device, so they cannot be refused here. The numpy twin, which is the
specification, refuses ids that are too large and all such slots.

`chunks` lies on the device, or in host memory that is registered with it.
"""
# Arguments and values inside a kernel have Triton's types, which a checker of Python cannot follow.
# pyright: basic, reportArgumentType=false
# ruff: noqa: ANN001

from collections.abc import Sequence
from enum import Enum
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl

from ...fabric.errors import ConfigError, Malformed
from ...fabric.layout import GroupLayout
from ..jit import Variant, kernel
from .plan import CopyPlan, plan_copies
from .view import CacheOrder, EngineCacheView

TILE_WORDS_MAX = 1024
"""With 4 warps, 8 words of 8 bytes per thread: four 16-byte loads in flight."""
WARPS = 4


class Direction(Enum):
    """Which way the bytes go."""

    PACK = "engine to chunk"
    UNPACK = "chunk to engine"


@kernel
def copy_blocks(
    table,
    block_ids,
    slots,
    chunks,
    num_blocks,
    num_slots,
    PACK: tl.constexpr,
    WORD: tl.constexpr,
    ALIGN: tl.constexpr,
    TILE: tl.constexpr,
    LAYERS: tl.constexpr,
    HALVES: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    RUN: tl.constexpr,
    STORED: tl.constexpr,
    BLOCKS: tl.constexpr,
    ENGINE_BLOCK: tl.constexpr,
    ENGINE_HEAD: tl.constexpr,
    ENGINE_TOKEN: tl.constexpr,
    CHUNK_SLOT: tl.constexpr,
    CHUNK_OFFSET: tl.constexpr,
    CHUNK_PAGE: tl.constexpr,
    CHUNK_HALF: tl.constexpr,
    CHUNK_HEAD: tl.constexpr,
) -> None:
    """Copy one tile. Sizes, strides and offsets of the constants are in words, ALIGN in bytes.

    table int64 [LAYERS, HALVES] holds addresses, block_ids int64 [n, BLOCKS], slots int64 [n];
    chunks are any type.
    """
    UNIT: tl.constexpr = HEADS * TOKENS * STORED
    TILES: tl.constexpr = (UNIT + TILE - 1) // TILE
    tile = tl.program_id(0)
    half = tile // TILES
    layer = half // HALVES
    place = layer // LAYERS
    chunk = place // BLOCKS
    tile = tile % TILES
    half = half % HALVES
    layer = layer % LAYERS

    block = tl.load(block_ids + place)
    slot = tl.load(slots + chunk)
    valid = (block >= 0) & (block < num_blocks) & (slot >= 0) & (slot < num_slots)
    # The hint must be on the pointer: on the integer before the cast the compiler forgets it.
    engine = tl.multiple_of(tl.load(table + layer * HALVES + half).to(tl.pointer_type(WORD)), ALIGN)
    engine += block * ENGINE_BLOCK
    stored = tl.multiple_of(chunks.to(tl.pointer_type(WORD), bitcast=True), ALIGN)
    stored += slot * CHUNK_SLOT + CHUNK_OFFSET + layer.to(tl.int64) * CHUNK_PAGE
    stored += half.to(tl.int64) * CHUNK_HALF + (place % BLOCKS).to(tl.int64) * (TOKENS * STORED)

    # Every remainder is of `unit` itself: after a remainder of a remainder the compiler no longer
    # sees how many words follow each other, and halves the width of the accesses.
    unit = tile * TILE + tl.arange(0, TILE)
    head = (unit // (TOKENS * STORED)).to(tl.int64)
    rest = unit % (TOKENS * STORED)
    token = ((unit // STORED) % TOKENS).to(tl.int64)
    word = unit % STORED
    engine += head * ENGINE_HEAD + token * ENGINE_TOKEN + word
    stored += head * CHUNK_HEAD + rest
    inside = (unit < UNIT) & valid
    in_run = inside
    # Only where rows are padded: the comparison would cost whole rows their widest access.
    if RUN < STORED:
        in_run = inside & (word < RUN)
    if PACK:
        words = tl.load(engine, mask=in_run, other=0, cache_modifier=".cg")
        tl.store(stored, words, mask=inside, cache_modifier=".cg")
    else:
        words = tl.load(stored, mask=in_run, other=0, cache_modifier=".cg")
        tl.store(engine, words, mask=in_run, cache_modifier=".cg")


class TritonPacker:
    """Pack and unpack between caches on a GPU and chunks that it can reach."""

    def __init__(
        self, group: GroupLayout, caches: Sequence[EngineCacheView], rank: int = 0, size: int = 1
    ) -> None:
        self.group = group
        self.plans = plan_copies(group, caches, rank, size)
        self._ready = [(plan, plan.align_bytes(), _addresses(plan)) for plan in self.plans]

    def pack(self, block_ids: torch.Tensor, chunks: torch.Tensor, slots: torch.Tensor) -> None:
        """Copy this rank's part of some chunks out of the engine's cache.

        `block_ids` int64 `[n, blocks_per_chunk]` and `slots` int64 `[n]` on the device, `chunks`
        uint8 `[num_slots, >= chunk_bytes]`. Raises `Malformed` for other shapes or types,
        `ConfigError` for slots too small for a chunk.
        """
        self._launch(Direction.PACK, block_ids, chunks, slots)

    def unpack(self, block_ids: torch.Tensor, chunks: torch.Tensor, slots: torch.Tensor) -> None:
        """Copy this rank's part of some chunks into the engine's cache. Arguments as `pack`."""
        self._launch(Direction.UNPACK, block_ids, chunks, slots)

    def _launch(
        self,
        direction: Direction,
        block_ids: torch.Tensor,
        chunks: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        for plan, align, table in self._ready:
            _check(plan, block_ids, chunks, slots)
            constants = launch_constants(
                plan, direction, gcd(align, chunks.data_ptr()), chunks.stride(0)
            )
            grid = block_ids.numel() * programs_per_block(plan, constants)
            if grid:
                launch = copy_blocks[(grid,)]
                sizes = (plan.shape[0], chunks.shape[0])
                launch(table, block_ids, slots, chunks, *sizes, **constants, num_warps=WARPS)


def _addresses(plan: CopyPlan) -> torch.Tensor:
    """Return int64 [layers, halves] on the device."""
    return torch.tensor(
        [[part.address for part in layer] for layer in plan.parts],
        dtype=torch.int64,
        device=plan.parts[0][0].data.device,
    )


def launch_constants(
    plan: CopyPlan, direction: Direction, align: int, slot_stride: int
) -> dict[str, Any]:
    """Return the compile-time constants of a launch.

    `align` divides the addresses of caches and chunks and all strides of the plan; slots lie
    `slot_stride` bytes apart.
    """
    align = gcd(align, slot_stride)
    word = min(align, 8)
    _, heads, tokens, run = plan.shape
    unit = heads * tokens * plan.stored_bytes // word
    sizes = {
        "RUN": run,
        "STORED": plan.stored_bytes,
        "ENGINE_BLOCK": plan.engine_strides[0],
        "ENGINE_HEAD": plan.engine_strides[1],
        "ENGINE_TOKEN": plan.engine_strides[2],
        "CHUNK_SLOT": slot_stride,
        "CHUNK_OFFSET": plan.chunk_offset,
        "CHUNK_PAGE": plan.page_stride,
        "CHUNK_HALF": plan.half_stride,
        "CHUNK_HEAD": plan.head_stride,
    }
    return {
        "PACK": direction is Direction.PACK,
        "WORD": {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}[word],
        "ALIGN": align,
        "TILE": min(TILE_WORDS_MAX, triton.next_power_of_2(unit)),
        "LAYERS": plan.layers,
        "HALVES": plan.halves,
        "HEADS": heads,
        "TOKENS": tokens,
        "BLOCKS": plan.blocks_per_chunk,
    } | {name: size // word for name, size in sizes.items()}


def programs_per_block(plan: CopyPlan, constants: dict[str, Any]) -> int:
    """Return how many programs copy one engine block of every layer."""
    unit = constants["HEADS"] * constants["TOKENS"] * constants["STORED"]
    return plan.layers * plan.halves * -(-unit // constants["TILE"])


def aot_variants() -> tuple[Variant, ...]:
    """Return the kernel as real models launch it, both ways, to be compiled without a GPU."""
    dense = GroupLayout.dense(32, 8, 128, 2, 256)
    nhd = torch.empty((2, 1024, 16, 8, 128), dtype=torch.bfloat16, device="meta")
    hnd = torch.empty((1024, 2, 8, 16, 128), dtype=torch.bfloat16, device="meta")
    odd = torch.empty((2, 1024, 16, 3, 5), dtype=torch.uint8, device="meta")
    rows = torch.empty((1024, 64, 656), dtype=torch.uint8, device="meta")
    index_rows = torch.empty((1024, 64, 132), dtype=torch.uint8, device="meta")
    state = torch.empty((64, 1 << 20), dtype=torch.uint8, device="meta")
    uses = (
        ("dense_nhd", dense, EngineCacheView.dense(nhd, CacheOrder.NHD)),
        ("dense_blocks_hnd", dense, EngineCacheView.dense(hnd, CacheOrder.BLOCKS_HND)),
        (
            "dense_odd_bytes",
            GroupLayout.dense(2, 3, 5, 1, 16),
            EngineCacheView.dense(odd, CacheOrder.NHD),
        ),
        ("mla_656", GroupLayout.mla(61, 656, 256), EngineCacheView.mla(rows)),
        ("mla_132", GroupLayout.mla(61, 132, 256), EngineCacheView.mla(index_rows)),
        ("state_1mib", GroupLayout.state(48, (1 << 20,), 512), EngineCacheView.state(state)),
    )
    return tuple(
        _variant(f"{direction.name.lower()}_{name}", group, view, direction)
        for name, group, view in uses
        for direction in Direction
    )


def _variant(name: str, group: GroupLayout, view: EngineCacheView, direction: Direction) -> Variant:
    (plan,) = plan_copies(group, [view] * group.layers, 0, 1)
    slot_stride = -(-group.chunk_bytes // 4096) * 4096
    return Variant(
        name,
        copy_blocks,
        {"table": "*i64", "block_ids": "*i64", "slots": "*i64", "chunks": "*u8"},
        {"num_blocks": "i32", "num_slots": "i32"},
        launch_constants(plan, direction, plan.align_bytes(), slot_stride),
        {"num_warps": WARPS},
    )


def _check(
    plan: CopyPlan, block_ids: torch.Tensor, chunks: torch.Tensor, slots: torch.Tensor
) -> None:
    ids_ok = block_ids.ndim == 2 and block_ids.shape[1] == plan.blocks_per_chunk
    types_ok = block_ids.dtype == slots.dtype == torch.int64 and chunks.dtype == torch.uint8
    packed = block_ids.is_contiguous() and slots.is_contiguous() and chunks.stride(-1) == 1
    if not (ids_ok and types_ok and packed and slots.shape == block_ids.shape[:1]):
        raise Malformed(
            f"block ids {block_ids.dtype}{list(block_ids.shape)}, slots {slots.dtype}"
            f"{list(slots.shape)}, chunks {chunks.dtype}",
            f"not contiguous int64 [n, {plan.blocks_per_chunk}], int64 [n] and uint8",
        )
    if chunks.ndim != 2 or chunks.shape[1] < plan.chunk_bytes:
        raise ConfigError(
            "slot_bytes",
            f"slots {list(chunks.shape)} for a chunk of {plan.chunk_bytes} bytes",
            "Give the pool slots that hold the largest chunk of any group",
        )
