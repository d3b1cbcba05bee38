"""Tiny models for the laboratory.

They have random weights from a fixed seed, as wide as those of a trained one: with vLLM's dummy
weights attention hardly looks at positions, and wrong KV could go unnoticed.
"""

import json
from pathlib import Path
from typing import Any

VOCABULARY = 512
PLAIN = "plain"
HYBRID = "hybrid"
WINDOW_TOKENS = 64
MODEL_TOKENS_MAX = 2048
WEIGHT_SEED = 11


def make_model(folder: Path, kind: str = PLAIN) -> Path:
    """Write a model's folder: plain attention, or every second layer with a sliding window."""
    from safetensors.torch import save_file

    layers = 2 if kind == PLAIN else 4
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": MODEL_TOKENS_MAX,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
    }
    if kind == HYBRID:
        config["layer_types"] = ["sliding_attention", "full_attention"] * (layers // 2)
        config["sliding_window"] = WINDOW_TOKENS
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(layers), str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def _weights(layers: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(WEIGHT_SEED)

    def drawn(rows: int, columns: int) -> Any:
        return torch.randn(rows, columns, generator=generator) * 0.2

    weights = {
        "model.embed_tokens.weight": drawn(VOCABULARY, 128),
        "lm_head.weight": drawn(VOCABULARY, 128),
        "model.norm.weight": torch.ones(128),
    }
    for layer in range(layers):
        shapes = {
            "self_attn.q_proj": (128, 128),
            "self_attn.k_proj": (64, 128),
            "self_attn.v_proj": (64, 128),
            "self_attn.o_proj": (128, 128),
            "mlp.gate_proj": (256, 128),
            "mlp.up_proj": (256, 128),
            "mlp.down_proj": (128, 256),
        }
        for name, (rows, columns) in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = drawn(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = torch.ones(128)
    return weights
