"""Values that go between the connector's halves: runs, reports, geometry."""

import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_yard import BLOCK_BYTES, geometry, group, hashes

from kvfabric.actors.engines.vllm.geometry import CacheGeometry, RankGroup
from kvfabric.actors.engines.vllm.transfers import (
    ChunkRun,
    LoadJob,
    SaveJob,
    StepPlan,
    WorkerReport,
)
from kvfabric.fabric.errors import ConfigError
from kvfabric.fabric.layout import GroupLayout
from kvfabric.fabric.types import key_digest, key_group, make_key


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 9))
def test_a_run_gives_each_chunk_its_key_and_its_blocks(chunks, blocks, index) -> None:
    digests, ids = hashes("run", chunks), list(range(100, 100 + chunks * blocks))
    run = ChunkRun(0, 3, digests, ids)
    assert run.keys(index) == [make_key(digest, index) for digest in digests]
    parts = [list(run.blocks_of(at)) for at in range(chunks)]
    assert all(len(part) == blocks for part in parts)
    assert [block for part in parts for block in part] == ids


def test_a_plan_survives_the_way_to_another_process() -> None:
    run = ChunkRun(0, 0, hashes("x", 2), [4, 5])
    plan = StepPlan(1, (3,), (SaveJob(4, (run,)),), (LoadJob("r", (run,)),))
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_reports_of_ranks_add_up() -> None:
    assert WorkerReport().empty
    whole = WorkerReport(saved=[1])
    whole.add(WorkerReport(saved=[1, 2], failed_loads=["a"]))
    whole.add(WorkerReport(silent=True))
    whole.add(WorkerReport())
    assert whole == WorkerReport([1, 1, 2], ["a"], silent=True)
    assert not whole.empty


DENSE = RankGroup(1, GroupLayout.dense(2, 4, 8, 2, 16), 16)


def ranks(size: int, *groups: RankGroup) -> list[CacheGeometry]:
    return [CacheGeometry(rank, size, groups, "bfloat16", "none") for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_opaque_chunks_of_ranks_have_cache_groups_of_their_own(size) -> None:
    opaque = geometry(group(0, 16), group(1, 8)).groups
    of_ranks = ranks(size, *opaque)
    written = [each.index(at) for each in of_ranks for at in range(2)]
    assert len(set(written)) == 2 * size
    for each in of_ranks:
        for at in range(2):
            assert each.indices(at) == tuple(rank.index(at) for rank in of_ranks)
        sizes = {wire.group: (wire.chunk_tokens, wire.chunk_bytes) for wire in each.wire_groups}
        assert set(sizes) == set(written)
        for at, chunk_bytes in ((0, 4 * BLOCK_BYTES), (1, 2 * BLOCK_BYTES)):
            assert sizes[each.index(at)] == (opaque[at].layout.chunk_tokens, chunk_bytes)


def test_a_group_that_ranks_share_never_meets_a_rank_of_an_opaque_one() -> None:
    opaque = geometry(group(0, 16), group(2, 16)).groups
    of_ranks = ranks(4, opaque[0], DENSE, opaque[1])
    assert {each.index(1) for each in of_ranks} == {1}
    assert of_ranks[3].indices(1) == (1,)
    own = {each.index(at) for each in of_ranks for at in (0, 2)}
    assert len(own) == 8
    assert 1 not in own


def test_a_rank_keeps_the_engines_number_of_a_group_where_it_is_alone() -> None:
    cache = geometry(group(0, 16), group(3, 16))
    assert [cache.indices(at) for at in range(2)] == [(0,), (3,)]
    assert key_group(make_key(hashes("x", 1)[0], cache.index(1))) == 3
    assert key_digest(make_key(hashes("x", 1)[0], 3)) == hashes("x", 1)[0]


def test_what_the_namespace_says_of_a_cache() -> None:
    cache = geometry(group(0, 16), group(1, 8, window=24))
    assert cache.layout == "kvf1:opaque/l1/b8/k4/xtest/t16,opaque/l1/b8/k4/xtest/t8/w24"
    assert cache.chunk_tokens == "16,8"


def test_blocks_of_a_failed_load_are_of_use_in_one_group_without_a_window() -> None:
    assert geometry(group(0, 16)).keeps_blocks
    assert not geometry(group(0, 16, window=24)).keeps_blocks
    assert not geometry(group(0, 16), group(1, 16)).keeps_blocks


def test_ranks_must_have_one_cache() -> None:
    first, second = ranks(2, *geometry(group(0, 16)).groups)
    first.require_same(second)
    for other in (
        replace(second, kv_dtype="fp8"),
        replace(second, kv_scales="static"),
        replace(second, size=4),
        replace(second, groups=geometry(group(0, 8)).groups),
        replace(second, groups=(*second.groups, DENSE)),
    ):
        with pytest.raises(ConfigError, match="rank 1 differs from that of rank 0") as caught:
            first.require_same(other)
        assert caught.value.field == "kv_cache"
