"""The pool's index asked for all ranks at once: a chunk is here if every rank's part is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_yard import DictPool, geometry, group, hashes

from kvfabric.actors.engines.vllm.lookups import FIRST_LOOK_CHUNKS, SharedIndex
from kvfabric.fabric.types import make_key

MOST = 3 * FIRST_LOOK_CHUNKS
PROMPT = hashes("prompt", MOST)


@given(
    st.integers(1, 3),
    st.integers(0, MOST),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, MOST - 1)), max_size=3),
)
def test_a_chunk_is_here_if_every_rank_has_its_part(size, asked, lacks) -> None:
    cache = geometry(group(0, 4), group(1, 4), size=size)
    pool = DictPool()
    for rank in range(size):
        pool.put(
            make_key(PROMPT[chunk], cache.index(1, rank))
            for chunk in range(MOST)
            if (rank, chunk) not in lacks
        )
    index = SharedIndex(pool.attach(), cache)
    missing = {chunk for rank, chunk in lacks if rank < size}
    here = [chunk not in missing for chunk in range(asked)]
    assert index.present(1, PROMPT[:asked]).tolist() == here
    assert index.leading(1, PROMPT[:asked]) == [*here, False].index(False)
    assert index.leading(0, PROMPT[:asked]) == 0


@pytest.mark.parametrize("held", [FIRST_LOOK_CHUNKS - 1, FIRST_LOOK_CHUNKS, FIRST_LOOK_CHUNKS + 1])
def test_the_row_goes_on_behind_the_first_look(held) -> None:
    cache, pool = geometry(group(0, 4)), DictPool()
    pool.put(make_key(each, 0) for each in PROMPT[:held])
    index = SharedIndex(pool.attach(), cache)
    assert index.leading(0, PROMPT) == held
    assert index.leading(0, PROMPT[:FIRST_LOOK_CHUNKS]) == min(held, FIRST_LOOK_CHUNKS)
