"""The namespace of an engine: from vLLM's configuration, and what a user says beyond it."""
# pyright: reportMissingImports=false

import hashlib
import os
from typing import Any

from ....fabric.errors import ConfigError
from ....fabric.namespace import Namespace
from .geometry import CacheGeometry
from .settings import ConnectorSettings

SEED_VARIABLE = "PYTHONHASHSEED"
DEFAULT_SEED = "vllm-none-hash"
"""What vLLM takes for its cryptographic hashes where the variable is not set."""
DIGEST_CHARACTERS = 16


def engine_namespace(
    vllm_config: Any,
    settings: ConnectorSettings,
    geometry: CacheGeometry,
    hash_tokens: int,
    resets: int,
) -> Namespace:
    """Say everything that must agree before another engine may use this one's KV.

    After a reset of the engine's cache the namespace is its own and new: it finds nothing that was
    stored before, and what others have stays as it is. Raises `ConfigError` for an engine whose
    block hashes mean nothing to others.
    """
    model = vllm_config.model_config
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    seed = os.environ.get(SEED_VARIABLE)
    if seed is None and algorithm.startswith("xxhash"):
        raise ConfigError(
            "prefix_caching_hash_algo",
            f"is {algorithm}, whose seed is random in each process",
            f"Set {SEED_VARIABLE} to one value for all engines, or use sha256",
        )
    version = settings.weights_version or _weights(vllm_config)
    tenant = settings.tenant
    if resets:
        version = f"{version}+{resets}"
        tenant = f"{tenant}!{vllm_config.kv_transfer_config.engine_id}"
    parallel = vllm_config.parallel_config
    context = getattr(parallel, "prefill_context_parallel_size", 1) * getattr(
        parallel, "decode_context_parallel_size", 1
    )
    return Namespace(
        model=settings.model or f"{model.model}@{_shape(vllm_config)}",
        weights_version=version,
        kv_dtype=geometry.kv_dtype,
        kv_scales=geometry.kv_scales,
        rope=_rope(model.hf_text_config),
        max_model_len=str(model.max_model_len) if _rope_needs_length(model) else "",
        layout=geometry.layout,
        chunk_tokens=geometry.chunk_tokens,
        tokens_per_hash=str(hash_tokens),
        hash_algorithm=algorithm,
        hash_seed=DEFAULT_SEED if seed is None else seed,
        pipeline_parallel=str(parallel.pipeline_parallel_size),
        context_parallel=str(context),
        tenant=tenant,
    )


def _weights(vllm_config: Any) -> str:
    model = vllm_config.model_config
    if str(vllm_config.load_config.load_format) == "dummy":
        return f"dummy-{model.seed}"
    return str(model.revision or "")


def _shape(vllm_config: Any) -> str:
    """Digest what changes the values in the cache although the model's name stays."""
    model = vllm_config.model_config
    draft = vllm_config.speculative_config
    parts = (
        model.hf_config.to_json_string(use_diff=False),
        str(model.quantization),
        str(model.dtype),
        "" if draft is None else str(draft.model),
    )
    text = "\n".join(parts)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARACTERS]


def _rope(config: Any) -> str:
    values = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return ",".join(f"{name}={values[name]}" for name in sorted(values))


def _rope_needs_length(model: Any) -> bool:
    """Whether positions are scaled by the length that the engine was started for."""
    rope = _rope(model.hf_text_config)
    return "dynamic" in rope or "longrope" in rope
