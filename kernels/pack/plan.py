"""What a copy between an engine's cache and canonical chunks consists of: numbers only.

A rank's part of a group is one `CopyPlan` (dense, MLA) or one per section (state). A plan is one
strided copy over `[chunk, block of the chunk, layer, half, head, token, byte]` with a stride per
axis on either side. The numpy twin and the GPU kernel both execute it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd

from ...fabric.errors import ConfigError
from ...fabric.layout import ROW_ALIGN_BYTES, GroupKind, GroupLayout, Half, Share
from .view import EngineCacheView, Part


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlan:
    """Sizes are counts, strides and offsets are bytes."""

    parts: tuple[tuple[Part, ...], ...]
    """[layer][half]. All have the same shape and strides."""
    blocks_per_chunk: int
    stored_bytes: int
    """What `run_bytes` of the engine take in the chunk; the rest is zeros."""
    chunk_bytes: int
    chunk_offset: int
    page_stride: int
    half_stride: int
    head_stride: int

    @property
    def layers(self) -> int:
        """Layers of the group."""
        return len(self.parts)

    @property
    def halves(self) -> int:
        """K and V, or one."""
        return len(self.parts[0])

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The engine's `num_blocks, heads, block_tokens, run_bytes`."""
        return self.parts[0][0].shape

    @property
    def engine_strides(self) -> tuple[int, int, int]:
        """Of blocks, heads and tokens."""
        return self.parts[0][0].strides

    @property
    def block_stride(self) -> int:
        """From one engine block to the next inside a head of a chunk."""
        return self.shape[2] * self.stored_bytes

    @property
    def bytes_per_chunk(self) -> int:
        """What one chunk moves, without padding."""
        _, heads, tokens, run = self.shape
        return self.layers * self.halves * self.blocks_per_chunk * heads * tokens * run

    def align_bytes(self) -> int:
        """Return the largest power of two up to 16 that divides every address and stride."""
        align = gcd(
            ROW_ALIGN_BYTES,
            self.shape[3],
            self.stored_bytes,
            self.chunk_offset,
            self.page_stride,
            self.half_stride,
            self.head_stride,
            *self.engine_strides,
        )
        return gcd(align, *(part.address for layer in self.parts for part in layer))


def plan_copies(
    group: GroupLayout, caches: Sequence[EngineCacheView], rank: int, size: int
) -> tuple[CopyPlan, ...]:
    """Return the copies that move a rank's part of a group.

    `caches` has one view per layer, of what this rank holds. Raises `ConfigError` where a view does
    not fit the group, `Unsupported` as `GroupLayout.share`.
    """
    share = group.share(rank, size)
    if len(caches) != group.layers:
        raise ConfigError("caches", f"{len(caches)} views for {group.id}", "Give one per layer")
    if group.kind is GroupKind.STATE:
        return _state_plans(group, caches, share)
    heads, run, stored, halves = share.head_count, group.row_bytes, group.row_stride_bytes, 1
    if group.kind is GroupKind.DENSE:
        halves, run = len(Half), group.head_dim * group.element_bytes
        stored = run
    parts = _same_parts(tuple(view.parts for view in caches), halves, group)
    _, found_heads, block_tokens, found_run = parts[0][0].shape
    _expect(group, "heads", found_heads, heads)
    _expect(group, "bytes of a token", found_run, run)
    plan = CopyPlan(
        parts=parts,
        blocks_per_chunk=group.blocks_per_chunk(block_tokens),
        stored_bytes=stored,
        chunk_bytes=group.chunk_bytes,
        chunk_offset=share.head_first * group.head_bytes,
        page_stride=group.page_bytes,
        half_stride=group.kv_heads * group.head_bytes,
        head_stride=group.head_bytes,
    )
    return (plan,)


def _state_plans(
    group: GroupLayout, caches: Sequence[EngineCacheView], share: Share
) -> tuple[CopyPlan, ...]:
    plans = list[CopyPlan]()
    runs = group.section_runs(0, share)
    for view in caches:
        _expect(group, "state sections", len(view.parts), len(runs))
    for section, run in enumerate(runs):
        parts = _same_parts(tuple((view.parts[section],) for view in caches), 1, group)
        _expect(group, f"bytes of section {section}", parts[0][0].shape[3], run.length)
        plan = CopyPlan(
            parts=parts,
            blocks_per_chunk=1,
            stored_bytes=run.length,
            chunk_bytes=group.chunk_bytes,
            chunk_offset=run.offset,
            page_stride=group.page_bytes,
            half_stride=0,
            head_stride=0,
        )
        plans.append(plan)
    return tuple(plans)


def _same_parts(
    layers: tuple[tuple[Part, ...], ...], halves: int, group: GroupLayout
) -> tuple[tuple[Part, ...], ...]:
    for parts in layers:
        _expect(group, "tensors per layer", len(parts), halves)
    for one, other in pairwise(part for parts in layers for part in parts):
        if (one.shape, one.strides, one.device) != (other.shape, other.strides, other.device):
            raise ConfigError(
                "caches",
                f"layers or halves of {group.id} differ in shape, strides or device: "
                f"{one.shape} {one.strides} {one.device}, "
                f"{other.shape} {other.strides} {other.device}",
                "Put layers that differ into groups of their own",
            )
    return layers


def _expect(group: GroupLayout, what: str, found: int, needed: int) -> None:
    if found != needed:
        raise ConfigError(
            "caches",
            f"{found} {what} where {group.id} needs {needed}",
            "Attach with the group's layout and this rank's share of it",
        )
