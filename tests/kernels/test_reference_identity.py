"""KV bytes and logits do not depend on how the cache was filled: the demo rests on this."""

import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kvfabric.kernels.reference.cache import Full
from kvfabric.kernels.reference.config import ModelConfig
from kvfabric.kernels.reference.engine import Engine, Sequence

SMALL = ModelConfig(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, mlp_hidden=96)
SEED = 20260101


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As workers run. With two, a busy machine waits for the slower: those cases are kept few."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest, one_thread: None) -> int:
    torch.set_num_threads(request.param)
    return request.param


def engine(config=SMALL, block_tokens=16, num_blocks=160, prefill_tokens=32) -> Engine:
    """An engine whose unwritten cache is poison."""
    made = Engine(config, block_tokens, num_blocks, prefill_tokens, device="cpu")
    for layer in made.cache.layers:
        layer.fill_(torch.nan)
    return made


def begin(made: Engine, tokens: list[int], output_tokens: int = 0) -> Sequence:
    sequence = made.start(tokens, output_tokens)
    assert not isinstance(sequence, Full)
    return sequence


def kv(made: Engine, sequence: Sequence, end: int) -> list[torch.Tensor]:
    """Per layer `[2, end, kv_heads, head_dim]`, read without the engine's own gather."""
    blocks = list(sequence.blocks)
    return [layer[:, blocks].flatten(1, 2)[:, :end].clone() for layer in made.cache.layers]


def load(made: Engine, sequence: Sequence, saved: list[torch.Tensor], end: int) -> None:
    """What a fabric does: put KV of the first `end` tokens into the sequence's blocks."""
    size = made.cache.block_tokens
    for layer, values in zip(made.cache.layers, saved, strict=True):
        for position in range(end):
            layer[:, sequence.blocks[position // size], position % size] = values[:, position]
    sequence.mark_cached(end)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and torch.equal(
        left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)
    )


def assert_same(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert all(same_bits(a, b) for a, b in zip(left, right, strict=True))


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(256) for _ in range(length)]


def shuffle_blocks(made: Engine, rng: random.Random) -> None:
    """Leave the free list in another order, so that block numbers tell nothing."""
    taken = [begin(made, prompt(rng, rng.randrange(1, 100))) for _ in range(8)]
    rng.shuffle(taken)
    for sequence in taken:
        made.finish(sequence)


def test_any_loaded_prefix_gives_the_bits_of_a_full_prefill(threads):
    rng = random.Random(SEED)
    for _ in range(8 // threads**2):
        length = rng.randrange(1, 400)
        tokens = prompt(rng, length)
        full = engine()
        whole = begin(full, tokens, 6)
        outputs = full.generate(whole, 6)
        saved = kv(full, whole, length + 5)
        other = engine()
        for _ in range(6 // threads):
            shuffle_blocks(other, rng)
            prefix = rng.choice((0, length, length - 1, rng.randrange(length + 1)))
            sequence = begin(other, tokens, 6)
            load(other, sequence, saved, prefix)
            assert other.generate(sequence, 6) == outputs, (length, prefix)
            assert sequence.computed_tokens == max(length - prefix, 1) + 5
            assert_same(kv(other, sequence, length + 5), saved)
            assert whole.logits is not None
            assert sequence.logits is not None
            assert same_bits(sequence.logits, whole.logits)
            other.finish(sequence)
            other.check()


def test_decode_writes_the_bits_that_prefill_writes(threads):
    rng = random.Random(SEED + 1)
    for length in (1, 31, 32, 33, 100)[:: 2 * threads - 1]:
        decoding = engine()
        talked = begin(decoding, prompt(rng, length), 70)
        decoding.generate(talked, 70)
        tokens = talked.tokens
        prefilling = engine()
        read = begin(prefilling, tokens[:-1])
        assert prefilling.prefill(read) == tokens[-1]
        assert_same(kv(prefilling, read, length + 69), kv(decoding, talked, length + 69))


def test_a_longer_prompt_has_the_bits_of_its_prefix(threads):
    rng = random.Random(SEED + 2)
    tokens = prompt(rng, 300)
    made = engine()
    sequence = begin(made, tokens)
    made.prefill(sequence)
    for length in (1, 17, 32, 50, 255):
        shorter = begin(made, tokens[:length])
        made.prefill(shorter)
        assert_same(kv(made, shorter, length), kv(made, sequence, length))
        made.finish(shorter)


@pytest.mark.parametrize("block_tokens", [1, 4, 32])
def test_block_size_is_not_in_the_bits(block_tokens):
    tokens = prompt(random.Random(SEED + 3), 90)
    usual = engine()
    left = begin(usual, tokens, 5)
    other = engine(block_tokens=block_tokens, num_blocks=200)
    right = begin(other, tokens, 5)
    assert usual.generate(left, 5) == other.generate(right, 5)
    assert_same(kv(usual, left, 94), kv(other, right, 94))


@pytest.mark.parametrize(
    "config", [replace(SMALL, dtype="bfloat16"), ModelConfig()], ids=["bfloat16", "demo"]
)
def test_other_models(config):
    tokens = prompt(random.Random(SEED + 4), 150)
    full = engine(config)
    whole = begin(full, tokens, 3)
    outputs = full.generate(whole, 3)
    for prefix in (16, 32, 77, 128, 150):
        other = engine(config)
        sequence = begin(other, tokens, 3)
        load(other, sequence, kv(full, whole, prefix), prefix)
        assert other.generate(sequence, 3) == outputs
        assert_same(kv(other, sequence, 152), kv(full, whole, 152))


def test_interleaved_sequences_do_not_touch_each_other():
    rng = random.Random(SEED + 5)
    prompts = [prompt(rng, rng.randrange(1, 120)) for _ in range(6)]
    alone: list[list[int]] = []
    for tokens in prompts:
        made = engine()
        alone.append(made.generate(begin(made, tokens, 8), 8))
    made = engine()
    sequences = [begin(made, tokens, 8) for tokens in prompts]
    outputs = [[made.prefill(sequence)] for sequence in sequences]
    for _ in range(7):
        for sequence, output in zip(sequences, outputs, strict=True):
            output += made.decode(sequence, 1)
    assert outputs == alone


def test_a_wrong_chunk_shows_in_the_logits():
    tokens = prompt(random.Random(SEED + 6), 128)
    made = engine(ModelConfig())
    right = begin(made, tokens)
    made.prefill(right)
    saved = kv(made, right, 96)
    for layer in saved:
        layer[:, 16:32] = layer[:, 32:48].clone()
    wrong = begin(made, tokens)
    load(made, wrong, saved, 96)
    made.prefill(wrong)
    assert right.logits is not None
    assert wrong.logits is not None
    assert (right.logits - wrong.logits).abs().max() > 0.05


OTHER_PROCESS = """
import hashlib, torch
torch.set_num_threads(1)
from kvfabric.kernels.reference.config import ModelConfig
from kvfabric.kernels.reference.engine import Engine
engine = Engine(ModelConfig(), 16, 32, device="cpu")
sequence = engine.start([i * 7 % 256 for i in range(200)], 4)
tokens = engine.generate(sequence, 4)
raw = b"".join(layer.numpy().tobytes() for layer in engine.cache.layers)
print(tokens, hashlib.sha256(raw).hexdigest())
"""


@pytest.mark.slow
def test_two_processes_agree():
    said = {
        subprocess.run(
            [sys.executable, "-c", OTHER_PROCESS], capture_output=True, check=True, timeout=50
        ).stdout
        for _ in range(2)
    }
    assert len(said) == 1
