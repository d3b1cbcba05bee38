"""From vLLM's configuration and tensors to a geometry and its copier.

Where the attention backend keeps K and V as they are, chunks have the canonical layout, which does
not know the engine's block size. Elsewhere, and with several tensor-parallel ranks, whose parts of
one chunk cannot be written by several processes yet, blocks are kept as vLLM has them: which
backend writes them, and how, is part of the layout's tag.
"""
# pyright: reportMissingImports=false

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm import __version__ as vllm_version
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from ....fabric.errors import ConfigError, Unsupported
from ....fabric.layout import GroupLayout
from ....kernels.pack import EngineCacheView
from .copier import BlockCopier, CanonicalViews, GroupCopier, OpaqueViews, block_rows
from .geometry import CacheGeometry, RankGroup

TAG_ALPHABET = frozenset("/,:")
PLAIN_BACKENDS = frozenset({"FLASH_ATTN", "FLEX_ATTENTION", "TRITON_ATTN"})
"""Attention backends of vLLM 0.32 that keep a token's K in the first half of its `2 x head_dim` row
and its V in the second (each splits the cache so itself). Of others the bytes are taken as they
are: CPU_ATTN packs them for the machine's instructions."""
PLAIN_MLA_BACKENDS = frozenset({"CUTLASS_MLA", "FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA"})
"""Of these one row for each token, latent and rotary part one after the other."""


def describe_cache(
    vllm_config: Any,
    kv_cache_config: Any,
    kv_caches: Mapping[str, torch.Tensor],
    *,
    rank: int,
    size: int,
    chunk_tokens: int | None,
) -> tuple[CacheGeometry, BlockCopier]:
    """Describe one rank's cache. Raises `Unsupported` for a cache that chunks cannot hold."""
    groups: list[RankGroup] = []
    copiers: list[GroupCopier] = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec, names = group.kv_cache_spec, group.layer_names
        layer = vllm_config.compilation_config.static_forward_context[names[0]]
        cache = GroupCache(
            spec,
            str(layer.get_attn_backend().get_name()),
            # Layers may share one cache; a dict keeps their order.
            tuple({kv_caches[name].data_ptr(): kv_caches[name] for name in names}.values()),
            int(kv_cache_config.num_blocks),
            chunk_tokens or int(spec.block_size),
            _window(spec),
        )
        layout, copier = cache.canonical() if size == 1 and cache.is_plain else cache.opaque(size)
        groups.append(RankGroup(index, layout, int(spec.block_size)))
        copiers.append(copier)
    dtype = str(vllm_config.cache_config.cache_dtype)
    if dtype == "auto":
        dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise Unsupported(
            "calculate_kv_scales", "True", "Engines that compute their own scales cannot share KV."
        )
    scales = "static" if dtype.startswith("fp8") else "none"
    return CacheGeometry(rank, size, tuple(groups), dtype, scales), BlockCopier(copiers)


@dataclass(frozen=True, slots=True)
class GroupCache:
    """One cache group as an engine keeps it: vLLM's spec, and a tensor for each of its layers.

    A tensor's axes are `[blocks, heads, block_tokens, content]`, in any order in memory.
    """

    spec: Any
    backend: str
    tensors: tuple[torch.Tensor, ...]
    blocks: int
    chunk_tokens: int
    window_tokens: int | None

    @property
    def is_plain(self) -> bool:
        """Whether it is known where each byte lies, and every byte is K or V."""
        spec, first = self.spec, self.tensors[0]
        mla = isinstance(spec, MLAAttentionSpec)
        known = PLAIN_MLA_BACKENDS if mla else PLAIN_BACKENDS
        content = spec.head_size if mla else 2 * spec.head_size
        shape = (self.blocks, 1 if mla else spec.num_kv_heads, spec.block_size, content)
        return (
            self.backend in known
            and spec.kv_quant_mode == KVQuantMode.NONE
            and spec.tokens_per_state == 1
            and (mla or spec.head_size_v == spec.head_size)
            and first.is_floating_point()
            and all(tuple(each.shape) == shape for each in self.tensors)
            and all(each.stride() == first.stride() for each in self.tensors)
            and first.stride(-1) == 1
        )

    def canonical(self) -> tuple[GroupLayout, GroupCopier]:
        """Return the canonical layout and what copies it."""
        spec, element = self.spec, self.tensors[0].element_size()
        if isinstance(spec, MLAAttentionSpec):
            row_bytes = spec.head_size * element
            layout = GroupLayout.mla(len(self.tensors), row_bytes, self.chunk_tokens)
            views = [EngineCacheView.mla(each[:, 0]) for each in self.tensors]
            return layout, CanonicalViews(layout, views)
        layout = GroupLayout.dense(
            len(self.tensors),
            spec.num_kv_heads,
            spec.head_size,
            element,
            self.chunk_tokens,
            window_tokens=self.window_tokens,
        )
        views = [
            EngineCacheView.split(*each.split(spec.head_size, dim=-1), tokens_first=False)
            for each in self.tensors
        ]
        return layout, CanonicalViews(layout, views)

    def opaque(self, ranks: int) -> tuple[GroupLayout, GroupCopier]:
        """Return a layout of whole blocks as they are. Raises `Unsupported` if they have gaps."""
        rows: list[torch.Tensor] = []
        for tensor in self.tensors:
            row = block_rows(tensor, self.blocks)
            if row is None:
                raise Unsupported(
                    "kv_cache_layout",
                    str(tuple(tensor.shape)),
                    "A block must be one run of memory in each layer's cache; "
                    "set VLLM_KV_CACHE_LAYOUT or use another attention backend.",
                )
            rows.append(row)
        view = OpaqueViews(tuple(rows))
        layout = GroupLayout.opaque(
            len(self.tensors),
            view.block_bytes,
            int(self.spec.block_size),
            self.chunk_tokens,
            _tag(self.backend, self.tensors[0], ranks),
            window_tokens=self.window_tokens,
        )
        return layout, view


def _window(spec: Any) -> int | None:
    if isinstance(spec, SlidingWindowSpec):
        return int(spec.sliding_window)
    if isinstance(spec, FullAttentionSpec | MLAAttentionSpec):
        return None
    raise Unsupported(
        "kv_cache_group",
        type(spec).__name__,
        "Only full attention, MLA and sliding windows can be shared yet.",
    )


def _tag(backend: str, tensor: torch.Tensor, ranks: int) -> str:
    """Name everything that decides what the bytes of a block mean."""
    parts = [
        f"vllm{vllm_version}",
        backend,
        f"{tensor.device.type}{_instructions(tensor.device)}",
        "x".join(str(size) for size in tensor.shape[1:]),
        "x".join(str(step) for step in tensor.stride()[1:]),
        f"tp{ranks}",
    ]
    tag = "|".join(parts)
    if not TAG_ALPHABET.isdisjoint(tag):
        raise ConfigError("layout", f"tag {tag!r}", "This name cannot be part of a layout")
    return tag


def _instructions(device: torch.device) -> str:
    if device.type == "cpu":
        # CPU_ATTN packs K and V for the widest instructions that it finds.
        return f"-{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}"
    major, minor = torch.cuda.get_device_capability(device)
    return f"-sm{major}{minor}"
