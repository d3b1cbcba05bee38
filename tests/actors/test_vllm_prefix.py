"""Which prefix is usable and what it takes, against an oracle that looks at every token."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_yard import HASH_TOKENS, group, hashes

from kvfabric.actors.engines.vllm.prefix import EngineGroup, PrefixRules
from kvfabric.actors.engines.vllm.transfers import NULL_BLOCK

TOKENS_MAX = 96
PROMPT = hashes("prompt", TOKENS_MAX // HASH_TOKENS)


class Held:
    """A `ChunkIndex` over sets of chunk numbers."""

    def __init__(self, groups: Sequence[EngineGroup], held: Sequence[set[int]]) -> None:
        self._digests = {
            each.engine_group: {
                PROMPT[(chunk + 1) * each.layout.chunk_tokens // HASH_TOKENS - 1]
                for chunk in chunks
                if (chunk + 1) * each.layout.chunk_tokens <= TOKENS_MAX
            }
            for each, chunks in zip(groups, held, strict=True)
        }

    def present(self, group: int, digests: Sequence[bytes]) -> np.ndarray:
        return np.array([each in self._digests[group] for each in digests], np.bool_)

    def leading(self, group: int, digests: Sequence[bytes]) -> int:
        return next(
            (at for at, each in enumerate(digests) if each not in self._digests[group]),
            len(digests),
        )


def needed(each: EngineGroup, prefix: int) -> set[int]:
    """The naive twin: the chunks with a token that the next token sees."""
    window = each.layout.window_tokens or prefix + 1
    seen = range(max(0, prefix - window + 1), prefix)
    return {token // each.layout.chunk_tokens for token in seen}


def longest(groups: Sequence[EngineGroup], held: Sequence[set[int]], cap: int) -> int:
    """The naive twin of `usable`."""
    for prefix in range(cap, 0, -1):
        whole = all(prefix % each.layout.chunk_tokens == 0 for each in groups)
        if whole and all(needed(g, prefix) <= has for g, has in zip(groups, held, strict=True)):
            return prefix
    return 0


@st.composite
def some_groups(draw: st.DrawFn) -> list[EngineGroup]:
    found: list[EngineGroup] = []
    for number in range(draw(st.integers(1, 3))):
        block = draw(st.sampled_from([4, 8]))
        chunk = block * draw(st.sampled_from([1, 2, 3]))
        window = draw(st.none() | st.integers(1, 40))
        found.append(group(number, chunk, block, window))
    return found


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[EngineGroup], list[set[int]], int]:
    groups = draw(some_groups())
    held: list[set[int]] = []
    for each in groups:
        chunks = TOKENS_MAX // each.layout.chunk_tokens
        lacks = draw(st.sets(st.integers(0, chunks - 1), max_size=3))
        held.append(set(range(chunks)) - lacks)
    return groups, held, draw(st.integers(0, TOKENS_MAX))


@given(worlds(), st.integers(0, 12))
def test_the_usable_prefix_is_the_longest_that_every_group_has(world, local_blocks) -> None:
    groups, held, cap = world
    local = local_blocks * 8
    usable = PrefixRules(groups).usable(PROMPT, local, cap, Held(groups, held))
    have = [
        has | set(range(local // each.layout.chunk_tokens))
        for each, has in zip(groups, held, strict=True)
    ]
    assert usable.tokens == longest(groups, have, cap)
    for each, row, has in zip(groups, usable.rows, held, strict=True):
        assert set(range(row)) <= has
        assert not (each.windowed and row)


@given(worlds(), st.integers(0, TOKENS_MAX // 8), st.randoms(use_true_random=False))
def test_a_load_brings_what_the_next_token_sees_and_writes_no_local_block(
    world, local_blocks, random
) -> None:
    groups, held, cap = world
    rules = PrefixRules(groups)
    tokens = longest(groups, held, cap)
    local = local_blocks * 8
    if tokens <= local:
        return
    numbers = list(range(1, 1000))
    random.shuffle(numbers)
    tables = [[numbers.pop() for _ in range(tokens // each.block_tokens)] for each in groups]
    runs = {run.engine_group: run for run in rules.load(PROMPT, local, tokens, tables)}
    for each, table in zip(groups, tables, strict=True):
        first = local // each.layout.chunk_tokens
        wanted = sorted(chunk for chunk in needed(each, tokens) if chunk >= first)
        run = runs.get(each.engine_group)
        if not wanted:
            assert run is None
            continue
        assert run is not None
        assert list(range(run.first, run.first + len(run.digests))) == wanted
        size = each.layout.chunk_tokens // HASH_TOKENS
        assert list(run.digests) == [PROMPT[(chunk + 1) * size - 1] for chunk in wanted]
        blocks = each.layout.chunk_tokens // each.block_tokens
        for at, chunk in enumerate(wanted):
            for part, block in enumerate(run.blocks_of(at)):
                index = chunk * blocks + part
                is_local = (index + 1) * each.block_tokens <= local
                assert block == (NULL_BLOCK if is_local else table[index])


@given(worlds(), st.integers(0, 12), st.booleans())
def test_wanted_is_what_a_load_would_bring_of_full_groups_or_of_windows(
    world, local_blocks, windows
) -> None:
    groups, _, cap = world
    rules = PrefixRules(groups)
    tokens, local = rules.floor(cap), local_blocks * 8
    tables = [[1] * (tokens // each.block_tokens) for each in groups]
    loaded = {
        (run.engine_group, run.first): list(run.digests)
        for run in rules.load(PROMPT, local, tokens, tables)
    }
    wanted = rules.wanted(PROMPT, local, tokens, windows=windows)
    assert {(each.engine_group, first): list(d) for each, first, d in wanted} == {
        (number, first): digests
        for (number, first), digests in loaded.items()
        if groups[number].windowed == windows
    }
    assert rules.has_windows == any(each.windowed for each in groups)
    assert rules.has_full == any(not each.windowed for each in groups)


@given(some_groups(), st.data())
def test_a_save_has_every_chunk_whose_blocks_are_all_there(groups, data) -> None:
    rules = PrefixRules(groups)
    for each in groups:
        blocks = each.layout.chunk_tokens // each.block_tokens
        table = data.draw(
            st.lists(st.integers(0, 3), min_size=4 * blocks, max_size=4 * blocks), label="table"
        )
        first = data.draw(st.integers(0, 3))
        end = data.draw(st.integers(first + 1, 4))
        saved: dict[int, tuple[bytes, list[int]]] = {}
        for run in rules.save(each, PROMPT, first, end, table):
            assert run.engine_group == each.engine_group
            for at, key in enumerate(run.digests):
                saved[run.first + at] = key, list(run.blocks_of(at))
        size = each.layout.chunk_tokens // HASH_TOKENS
        assert saved == {
            chunk: (PROMPT[(chunk + 1) * size - 1], table[chunk * blocks : (chunk + 1) * blocks])
            for chunk in range(first, end)
            if NULL_BLOCK not in table[chunk * blocks : (chunk + 1) * blocks]
        }


def test_windows_that_lack_different_chunks_agree_on_one_prefix() -> None:
    groups = [group(0, 4), group(1, 4, window=8), group(2, 4, window=8)]
    # Of a prefix of 24 tokens the second window lacks chunk 4; of 16 the first lacks chunk 3.
    held = [set(range(6)), {0, 1, 2, 4, 5}, {0, 1, 2, 3, 5}]
    usable = PrefixRules(groups).usable(PROMPT, 0, 24, Held(groups, held))
    assert usable.tokens == longest(groups, held, 24) == 12


@pytest.mark.parametrize("cap", [0, 1, 3])
def test_less_than_a_chunk_is_nothing(cap) -> None:
    groups = [group(0, 4), group(1, 4, window=8)]
    held = [set(range(24)), set(range(24))]
    assert PrefixRules(groups).usable(PROMPT, 0, cap, Held(groups, held)).tokens == 0
    assert PrefixRules(groups).load(PROMPT, 0, 0, [[], []]) == ()
