"""What the reference model is. Imports no torch, so that a namespace can be built without it."""

import hashlib
from dataclasses import asdict, dataclass
from typing import Literal

import msgspec

from ...fabric.errors import ConfigError
from .tokenizer import VOCAB

Dtype = Literal["float32", "bfloat16"]

DTYPE_BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A dense decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

    Equal configs give equal weights on every device. Raises `ConfigError` for a shape that cannot
    be.
    """

    name: str = "reference-dense"
    layers: int = 4
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32
    mlp_hidden: int = 1024
    vocab: int = VOCAB
    max_len: int = 8192
    """Prompt and generated tokens of one sequence together."""
    rope_theta: float = 10_000.0
    seed: int = 0
    dtype: Dtype = "float32"

    def __post_init__(self) -> None:
        for field, value in asdict(self).items():
            if isinstance(value, int) and field != "seed" and value < 1:
                raise ConfigError(field, f"is {value}", "Give a whole number above 0")
        if self.heads % self.kv_heads:
            problem = f"{self.heads} heads do not divide among {self.kv_heads} KV heads"
            raise ConfigError("kv_heads", problem, "Make heads a multiple of kv_heads")
        if self.head_dim % 2:
            problem = f"{self.head_dim} is odd"
            raise ConfigError("head_dim", problem, "Rotary positions turn pairs: make it even")
        if self.vocab < VOCAB:
            problem = f"{self.vocab} is below the tokenizer's {VOCAB}"
            raise ConfigError("vocab", problem, f"Give at least {VOCAB}")
        if self.dtype not in DTYPE_BYTES:
            problem = f"{self.dtype!r} is unknown"
            raise ConfigError("dtype", problem, f"Use one of {', '.join(DTYPE_BYTES)}")

    @property
    def digest(self) -> str:
        """Hex SHA-256 over the msgpack array of [name, value] pairs, in order of the fields.

        It stands for the weights, because they follow from the fields.
        """
        pairs = [[name, value] for name, value in asdict(self).items()]
        return hashlib.sha256(msgspec.msgpack.encode(pairs)).hexdigest()

    @property
    def rope(self) -> str:
        """The rotary settings, as the namespace states them."""
        return f"neox/theta={self.rope_theta:g}/dim={self.head_dim}"

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of keys and values of one token, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]
