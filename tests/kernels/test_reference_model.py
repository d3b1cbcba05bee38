"""The decoder against a plain numpy reading of the same architecture, and its habits."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvfabric.fabric.errors import ConfigError
from kvfabric.kernels.reference import tokenizer
from kvfabric.kernels.reference.cache import Full
from kvfabric.kernels.reference.config import ModelConfig
from kvfabric.kernels.reference.engine import Engine
from kvfabric.kernels.reference.model import Decoder

SMALL = ModelConfig(layers=2, hidden=48, heads=6, kv_heads=2, head_dim=8, mlp_hidden=80)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def twin_logits(decoder: Decoder, tokens: list[int]) -> np.ndarray:
    """Float64 logits `[vocab]` after the last token: whole prompt at once, head by head."""
    config = decoder.config

    def norm(x):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)

    def rotate(x):
        half = config.head_dim // 2
        angles = np.arange(len(x))[:, None] / config.rope_theta ** (np.arange(half) / half)
        turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles)
        return np.concatenate((turned.real, turned.imag), -1)

    x = decoder.embedding.numpy().astype(np.float64)[tokens]
    dim, heads, kv_heads = config.head_dim, config.heads, config.kv_heads
    future = np.triu(np.full((len(tokens), len(tokens)), -np.inf), 1)
    for weights in decoder.layers:
        columns = norm(x) @ weights.qkv.numpy().T
        parts = np.split(columns, columns.shape[1] // dim, axis=1)
        mixed = []
        for head in range(heads):
            shared = head // (heads // kv_heads)
            key, value = parts[heads + shared], parts[heads + kv_heads + shared]
            scores = rotate(parts[head]) @ rotate(key).T / np.sqrt(dim) + future
            odds = np.exp(scores - scores.max(-1, keepdims=True))
            mixed.append(odds / odds.sum(-1, keepdims=True) @ value)
        x = x + np.concatenate(mixed, -1) @ weights.out.numpy().T
        gate, up = np.split(norm(x) @ weights.gate_up.numpy().T, 2, axis=1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights.down.numpy().T
    return norm(x[-1]) @ decoder.head.numpy().T


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 100])
def test_logits_are_those_of_the_numpy_twin(length):
    rng = random.Random(length)
    tokens = [rng.randrange(tokenizer.VOCAB) for _ in range(length)]
    engine = Engine(SMALL, 16, 16, device="cpu")
    sequence = engine.start(tokens, 0)
    assert not isinstance(sequence, Full)
    engine.prefill(sequence)
    assert sequence.logits is not None
    expected = twin_logits(Decoder(SMALL, 32, torch.device("cpu")), tokens)
    np.testing.assert_allclose(sequence.logits.numpy(), expected, atol=2e-5)


def test_outputs_vary_with_the_prompt_and_along_it():
    rng = random.Random(5)
    engine = Engine(ModelConfig(), 16, 16, device="cpu")
    seen: set[tuple[int, ...]] = set()
    firsts: set[int] = set()
    ending = [rng.randrange(256) for _ in range(16)]
    for _ in range(8):
        sequence = engine.start([rng.randrange(256) for _ in range(64)] + ending, 20)
        assert not isinstance(sequence, Full)
        outputs = engine.generate(sequence, 20)
        assert len(set(outputs)) >= 10
        assert max(outputs) < tokenizer.BYTES
        seen.add(tuple(outputs))
        firsts.add(outputs[0])
        engine.finish(sequence)
    assert len(seen) == 8
    assert len(firsts) >= 4


def test_weights_follow_from_the_seed():
    def embedding(seed):
        config = ModelConfig(layers=1, hidden=16, heads=2, kv_heads=1, head_dim=8, seed=seed)
        return Decoder(config, 32, torch.device("cpu")).embedding

    assert torch.equal(embedding(3), embedding(3))
    assert not torch.equal(embedding(3), embedding(4))


def test_digest_is_golden_and_tells_configs_apart():
    assert (
        ModelConfig().digest == "c6271f9d6e6632fe284bd36cc3e5c1d0c78a9423ecc1956edb1acdae9e17fffa"
    )
    assert ModelConfig(seed=1).digest != ModelConfig().digest
    assert ModelConfig(dtype="bfloat16").digest != ModelConfig().digest


def test_kv_bytes():
    assert ModelConfig().kv_token_bytes == 2048
    assert ModelConfig(dtype="bfloat16").kv_token_bytes == 1024


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("layers", {"layers": 0}),
        ("kv_heads", {"kv_heads": 3}),
        ("head_dim", {"head_dim": 7}),
        ("vocab", {"vocab": 256}),
        ("dtype", {"dtype": "float16"}),
    ],
)
def test_bad_shapes_name_the_field(field, values):
    with pytest.raises(ConfigError) as caught:
        ModelConfig(**values)
    assert caught.value.field == field


def test_tokenizer_round_trip():
    text = "Ein Stück KV: ✓"
    tokens = tokenizer.encode(text)
    assert tokens[0] == tokenizer.BOS
    assert tokenizer.decode([*tokens, tokenizer.EOS, tokenizer.PAD]) == text
    assert tokenizer.decode([0xFF]) == "�"
