"""Sequences, blocks and pieces of the reference engine."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfabric.fabric.errors import Closed, ConfigError, Conservation, Unsupported
from kvfabric.kernels.reference.cache import Allocated, BlockAllocator, Full
from kvfabric.kernels.reference.config import ModelConfig
from kvfabric.kernels.reference.engine import Engine, Sequence

TINY = ModelConfig(layers=1, hidden=16, heads=2, kv_heads=1, head_dim=8, mlp_hidden=16, max_len=200)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def engine(num_blocks=16) -> Engine:
    return Engine(TINY, 8, num_blocks, 32, device="cpu")


def begin(made: Engine, tokens: list[int], output_tokens: int = 0) -> Sequence:
    sequence = made.start(tokens, output_tokens)
    assert not isinstance(sequence, Full)
    return sequence


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=40))
@settings(deadline=None, max_examples=60, derandomize=True)
def test_allocator_against_a_set(steps):
    allocator = BlockAllocator(16)
    held: list[tuple[int, ...]] = []
    for take, number in steps:
        if take:
            free = 16 - sum(map(len, held))
            taken = allocator.allocate(number)
            if number > free:
                assert taken == Full(number, free)
            else:
                assert isinstance(taken, Allocated)
                assert len(taken.blocks) == number
                held.append(taken.blocks)
        elif held:
            allocator.release(held.pop(number % len(held)))
        everything = [block for blocks in held for block in blocks]
        assert len(set(everything)) == len(everything) == allocator.used_blocks
        allocator.check()


@pytest.mark.parametrize("blocks", [(0, 0), (0, 5), (99,)])
def test_giving_back_what_is_not_out_changes_nothing(blocks):
    allocator = BlockAllocator(8)
    assert allocator.allocate(2) == Allocated((0, 1))
    with pytest.raises(Conservation):
        allocator.release(blocks)
    assert allocator.used_blocks == 2
    allocator.check()


def test_a_full_cache_is_an_answer_and_takes_nothing():
    made = engine(num_blocks=4)
    first = begin(made, [1] * 17)
    assert made.start([1] * 9, 0) == Full(2, 1)
    made.check()
    made.finish(first)
    assert made.cache.allocator.free_blocks == 4
    begin(made, [1] * 9)
    made.check()


def test_blocks_cover_what_will_be_generated():
    made = engine()
    sequence = begin(made, [1] * 7, 4)
    assert len(sequence.blocks) == 2
    assert len(made.generate(sequence, 4)) == 4
    assert sequence.cached_tokens == len(sequence.tokens) - 1 == 10
    with pytest.raises(Unsupported, match="room for 0"):
        made.decode(sequence, 1)


@pytest.mark.parametrize(
    ("length", "cached", "pieces"),
    [
        (5, 0, [(0, 5)]),
        (32, 0, [(0, 32)]),
        (70, 0, [(0, 32), (32, 64), (64, 70)]),
        (70, 40, [(40, 64), (64, 70)]),
        (70, 64, [(64, 70)]),
        (70, 70, [(69, 70)]),
        (64, 64, [(63, 64)]),
    ],
)
def test_pieces_end_at_boundaries_and_are_told_when_in_place(length, cached, pieces):
    made = engine()
    sequence = begin(made, [3] * length)
    sequence.mark_cached(cached)
    told: list[tuple[int, int]] = []

    def on_piece(start: int, end: int) -> None:
        assert sequence.cached_tokens == max(end, cached)
        told.append((start, end))

    made.prefill(sequence, on_piece)
    assert told == pieces
    assert sequence.computed_tokens == sum(end - start for start, end in pieces)


def test_marking_cached():
    made = engine()
    sequence = begin(made, [1] * 20)
    sequence.mark_cached(8)
    for wrong in (7, 21):
        with pytest.raises(Unsupported, match="Give 8 to 20"):
            sequence.mark_cached(wrong)
    assert sequence.cached_tokens == 8


def test_a_finished_sequence_is_refused():
    made = engine()
    sequence = begin(made, [1, 2, 3], 2)
    with pytest.raises(Unsupported, match="prefill first"):
        made.decode(sequence, 1)
    made.finish(sequence)
    for use in (made.prefill, made.finish, lambda s: made.decode(s, 1)):
        with pytest.raises(Closed):
            use(sequence)
    made.check()


@pytest.mark.parametrize(
    ("tokens", "output_tokens"), [([], 1), ([1], -1), ([259], 0), ([-1], 0), ([1] * 199, 2)]
)
def test_bad_requests_take_nothing(tokens, output_tokens):
    made = engine(num_blocks=32)
    with pytest.raises(Unsupported):
        made.start(tokens, output_tokens)
    assert made.cache.allocator.used_blocks == 0


@pytest.mark.parametrize("sizes", [(0, 1, 32), (8, 0, 32), (8, 1, 0), (12, 1, 32), (64, 1, 32)])
def test_bad_sizes_are_refused(sizes):
    with pytest.raises(ConfigError):
        Engine(TINY, *sizes, device="cpu")


def test_the_last_position_of_max_len_is_usable():
    made = engine(num_blocks=25)
    sequence = begin(made, [9] * 190, 10)
    assert len(made.generate(sequence, 10)) == 10
    assert len(sequence.tokens) == 200


def test_numerics_tell_apart_what_changes_bits():
    wide = Engine(TINY, 8, 4, 64, device="cpu")
    assert engine().numerics == engine(num_blocks=4).numerics
    assert engine().numerics != wide.numerics
