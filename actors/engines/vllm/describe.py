"""From vLLM's configuration and tensors to a geometry and its copier.

Blocks are kept as vLLM has them: which backend writes them, and how, is part of the layout's tag.
"""
# pyright: reportMissingImports=false

import platform
from collections.abc import Mapping
from typing import Any

import torch
from vllm import __version__ as vllm_version
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

from ....fabric.errors import ConfigError, Unsupported
from ....fabric.layout import GroupLayout
from .copier import BlockCopier, OpaqueViews, block_rows
from .geometry import CacheGeometry, RankGroup

TAG_ALPHABET = frozenset("/,:")


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
    views: list[OpaqueViews] = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        layout_spec = group.kv_cache_spec
        window = _window(layout_spec)
        tensors = {
            tensor.data_ptr(): tensor for tensor in (kv_caches[name] for name in group.layer_names)
        }
        rows: list[torch.Tensor] = []
        for tensor in tensors.values():
            row = block_rows(tensor, kv_cache_config.num_blocks)
            if row is None:
                raise Unsupported(
                    "kv_cache_layout",
                    str(tuple(tensor.shape)),
                    "A block must be one run of memory in each layer's cache; "
                    "set VLLM_KV_CACHE_LAYOUT or use another attention backend.",
                )
            rows.append(row)
        name = group.layer_names[0]
        view = OpaqueViews(tuple(rows))
        block_tokens = int(layout_spec.block_size)
        layout = GroupLayout.opaque(
            len(group.layer_names),
            view.block_bytes,
            block_tokens,
            chunk_tokens or block_tokens,
            _tag(vllm_config, name, kv_caches[name], size),
            window_tokens=window,
        )
        groups.append(RankGroup(index, layout, block_tokens))
        views.append(view)
    dtype = str(vllm_config.cache_config.cache_dtype)
    if dtype == "auto":
        dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise Unsupported(
            "calculate_kv_scales", "True", "Engines that compute their own scales cannot share KV."
        )
    scales = "static" if dtype.startswith("fp8") else "none"
    return CacheGeometry(rank, size, tuple(groups), dtype, scales), BlockCopier(views)


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


def _tag(vllm_config: Any, layer_name: str, tensor: torch.Tensor, rank_count: int) -> str:
    """Name everything that decides what the bytes of a block mean."""
    layer = vllm_config.compilation_config.static_forward_context[layer_name]
    parts = [
        f"vllm{vllm_version}",
        str(layer.get_attn_backend().get_name()),
        f"{tensor.device.type}{_instructions(tensor.device)}",
        "x".join(str(size) for size in tensor.shape[1:]),
        f"tp{rank_count}",
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
