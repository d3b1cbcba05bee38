"""The decoder's arithmetic, one piece of rows at a time.

A piece always has `piece_rows` rows: row i of piece k stands for position `k * piece_rows + i`, in
use or not. So every product of the model has a shape that depends on k alone, the libraries below
choose the same kernel and the same order of additions for it, and row i depends on nothing but its
own tokens: not on which of the other rows are in use, and not on who computed the keys and values
before it. That is why KV bytes and logits are the same, bit for bit, whether a position is computed
by a whole prefill, after a loaded prefix of any length, or alone by a decode step.

The promise holds between engines of one device kind, one torch build and one number of threads
(`Engine.numerics`), not between a CPU and a GPU.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from .config import ModelConfig
from .tokenizer import BYTES

NORM_EPSILON = 1e-5

ATTENTION_GAIN = 2.0
"""On query and key weights. With plain 1/sqrt(n) weights attention is nearly an average, every
prompt looks alike to the last row, and a wrong KV byte would not show in the tokens."""

KvExchange = Callable[[int, torch.Tensor], torch.Tensor]
"""Takes a layer and the piece's `[2, piece_rows, kv_heads, head_dim]`; stores the rows in use and
returns `[2, (k + 1) * piece_rows, kv_heads, head_dim]`: the whole context, zero where nothing is
yet."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Matrices of one layer, `[outputs, inputs]`."""

    qkv: torch.Tensor
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Decoder:
    """Weights and rotary tables on a device. Holds no state of any sequence."""

    def __init__(self, config: ModelConfig, piece_rows: int, device: torch.device) -> None:
        self.config = config
        self.piece_rows = piece_rows
        self._device = device
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        generator = torch.Generator(device="cpu").manual_seed(config.seed)
        self.embedding = self._draw(generator, config.vocab, config.hidden, gain=config.hidden**0.5)
        self.layers = [self._draw_layer(generator) for _ in range(config.layers)]
        self.head = self._draw(generator, config.vocab, config.hidden)
        self._cos, self._sin = self._rotary_tables()

    def _draw(
        self, generator: torch.Generator, outputs: int, inputs: int, gain: float = 1.0
    ) -> torch.Tensor:
        """Draw on the CPU in float32, so that every device and dtype starts from the same."""
        weights = torch.randn(outputs, inputs, generator=generator) * (gain / math.sqrt(inputs))
        return weights.to(self._device, self._dtype)

    def _draw_layer(self, generator: torch.Generator) -> LayerWeights:
        config = self.config
        attended = config.heads * config.head_dim
        shared = config.kv_heads * config.head_dim
        query_key = self._draw(generator, attended + shared, config.hidden, gain=ATTENTION_GAIN)
        value = self._draw(generator, shared, config.hidden)
        return LayerWeights(
            qkv=torch.cat((query_key, value)),
            out=self._draw(generator, config.hidden, attended),
            gate_up=self._draw(generator, 2 * config.mlp_hidden, config.hidden),
            down=self._draw(generator, config.hidden, config.mlp_hidden),
        )

    def _rotary_tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, float32 `[positions, 1, head_dim / 2]`, from float64 on the CPU."""
        half = self.config.head_dim // 2
        positions = -(-self.config.max_len // self.piece_rows) * self.piece_rows
        powers = torch.arange(half, dtype=torch.float64) / half
        speeds = self.config.rope_theta**-powers
        angles = torch.arange(positions, dtype=torch.float64)[:, None, None] * speeds
        cos, sin = angles.cos(), angles.sin()
        return cos.to(self._device, torch.float32), sin.to(self._device, torch.float32)

    def _rotate(self, rows: torch.Tensor, start: int) -> torch.Tensor:
        """Turn `[piece_rows, heads, head_dim]`, pairing the halves as GPT-NeoX does."""
        cos = self._cos[start : start + self.piece_rows]
        sin = self._sin[start : start + self.piece_rows]
        first, second = rows.float().chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return turned.to(self._dtype)

    def _norm(self, rows: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(rows, (self.config.hidden,), eps=NORM_EPSILON)

    def _causal_mask(self, start: int) -> torch.Tensor:
        """What is added to scores, `[group * piece_rows, start + piece_rows]`."""
        rows = self.piece_rows
        past = torch.zeros(rows, start, dtype=self._dtype, device=self._device)
        own = torch.full((rows, rows), -math.inf, dtype=self._dtype, device=self._device).triu(1)
        group = self.config.heads // self.config.kv_heads
        return torch.cat((past, own), dim=1).repeat(group, 1)

    def _attend(
        self, query: torch.Tensor, keys_values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Grouped-query attention; the heads of a group are rows of one product.

        `query` is `[piece_rows, heads, head_dim]`; the result `[piece_rows, heads * head_dim]`.
        """
        rows, heads, dim = query.shape
        kv_heads = self.config.kv_heads
        grouped = query.view(rows, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
        keys, values = keys_values.permute(0, 2, 1, 3)
        mixed = functional.scaled_dot_product_attention(
            grouped.reshape(1, kv_heads, -1, dim), keys[None], values[None], attn_mask=mask
        )
        spread = mixed.view(kv_heads, heads // kv_heads, rows, dim).permute(2, 0, 1, 3)
        return spread.reshape(rows, heads * dim)

    def piece(self, tokens: torch.Tensor, start: int, exchange: KvExchange) -> torch.Tensor:
        """Run one piece through all layers and return its rows `[piece_rows, hidden]`.

        `tokens` is int64 `[piece_rows]` on the device; `start` the position of row 0, a multiple of
        `piece_rows`.
        """
        config = self.config
        mask = self._causal_mask(start)
        rows = functional.embedding(tokens, self.embedding)
        for index, weights in enumerate(self.layers):
            heads = functional.linear(self._norm(rows), weights.qkv)
            heads = heads.view(self.piece_rows, -1, config.head_dim)
            query_key, value = heads.split((config.heads + config.kv_heads, config.kv_heads), dim=1)
            query, key = self._rotate(query_key, start).split(
                (config.heads, config.kv_heads), dim=1
            )
            context = exchange(index, torch.stack((key, value)))
            rows = rows + functional.linear(self._attend(query, context, mask), weights.out)
            gate, up = functional.linear(self._norm(rows), weights.gate_up).chunk(2, dim=-1)
            rows = rows + functional.linear(functional.silu(gate) * up, weights.down)
        return rows

    def logits(self, row: torch.Tensor) -> torch.Tensor:
        """Return float32 `[vocab]` of a row `[hidden]`; one shape always, for the same reason."""
        return functional.linear(self._norm(row.clone()[None]), self.head)[0].float()

    def greedy(self, logits: torch.Tensor) -> int:
        """Return the likeliest byte; never a mark, so that a run is as long as was asked."""
        return int(logits[:BYTES].argmax())
