"""An attention backend for the laboratory: plain torch, and a cache whose every byte has a meaning.

vLLM's own backend for CPUs packs K and V for the machine's instructions, so that its cache can only
be copied block by block. This one keeps them as the backends of GPUs do, `[blocks, heads, tokens,
2 x head_dim]` in the memory order that VLLM_KV_CACHE_LAYOUT names, under the name of one of them:
with it the connector finds what it finds on a GPU. `install` puts it in the place of vLLM's.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import KVCacheLayout

BLOCK_TOKENS = 16


def install() -> None:
    """Let vLLM use this backend on the CPU, in this process."""
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.PlainAttention")


class PlainAttention(AttentionBackend):
    """What vLLM asks of a backend."""

    forward_includes_kv_cache_update: bool = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32]

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(BLOCK_TOKENS)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBNHC, KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @staticmethod
    def get_impl_cls() -> type["PlainImpl"]:
        return PlainImpl

    @staticmethod
    def get_builder_cls() -> type["PlainBuilder"]:
        return PlainBuilder


@dataclass
class PlainMetadata:
    """One step: for each request its query's place, its length so far and its blocks."""

    starts: list[int]
    lengths: list[int]
    blocks: torch.Tensor
    slots: torch.Tensor


class PlainBuilder(AttentionMetadataBuilder[PlainMetadata]):
    """Reads off what is needed."""

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PlainMetadata:
        common = common_attn_metadata
        return PlainMetadata(
            common.query_start_loc_cpu.tolist(),
            common.seq_lens.tolist(),
            common.block_table_tensor.long(),
            common.slot_mapping[: common.num_actual_tokens].long(),
        )


class PlainImpl(AttentionImpl):
    """Attention request by request, each step over all that came before."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: Any = None,
        sliding_window: int | None = None,
        *_: Any,
        **__: Any,
    ) -> None:
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_size, self.scale = head_size, scale
        self.window = sliding_window

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PlainMetadata | None,
        output: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        if attn_metadata is None:
            return output
        step, size = attn_metadata, kv_cache.shape[2]
        count = len(step.slots)
        new = torch.cat([key[:count], value[:count]], dim=-1)
        kv_cache[step.slots // size, :, step.slots % size] = new
        for request, length in enumerate(step.lengths):
            begin, end = step.starts[request], step.starts[request + 1]
            if end == begin:
                continue
            ids = step.blocks[request, : -(-length // size)]
            seen = kv_cache[ids].transpose(0, 1).flatten(1, 2)[:, :length]
            keys, values = seen.split(self.head_size, dim=-1)
            at = torch.arange(length - (end - begin), length)[:, None]
            other = torch.arange(length)[None]
            mask = other <= at
            if self.window is not None:
                mask &= other > at - self.window
            group = self.num_heads // self.num_kv_heads
            said = torch.nn.functional.scaled_dot_product_attention(
                query[begin:end].transpose(0, 1),
                keys.repeat_interleave(group, 0),
                values.repeat_interleave(group, 0),
                attn_mask=mask,
                scale=self.scale,
            )
            output[begin:end] = said.transpose(0, 1).reshape(output[begin:end].shape)
        return output
