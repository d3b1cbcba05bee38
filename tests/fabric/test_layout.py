import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfabric.fabric.errors import ConfigError, Malformed, Unsupported
from kvfabric.fabric.layout import (
    GroupKind,
    GroupLayout,
    Half,
    Run,
    Share,
    chunk_tokens_text,
    common_tokens,
    layout_id,
)

DENSE = GroupLayout.dense(3, 8, 64, 2, 16)
MLA = GroupLayout.mla(2, 132, 64)
STATE = GroupLayout.state(4, (96, 4096), 512)
OPAQUE = GroupLayout.opaque(2, 4096, 16, 64, "any|tp2")


def test_golden_offsets_of_a_dense_chunk():
    assert (DENSE.head_bytes, DENSE.page_bytes, DENSE.chunk_bytes) == (2048, 32768, 98304)
    assert [DENSE.page_offset(layer) for layer in range(3)] == [0, 32768, 65536]
    assert DENSE.head_run(0, Half.K, 0, 8) == Run(0, 16384)
    assert DENSE.head_run(0, Half.V, 0, 8) == Run(16384, 16384)
    assert DENSE.head_run(2, Half.K, 3, 1) == Run(65536 + 6144, 2048)
    assert DENSE.head_run(2, Half.V, 6, 2) == Run(65536 + 16384 + 12288, 4096)


def test_golden_offsets_of_mla_and_state_chunks():
    assert (MLA.row_stride_bytes, MLA.page_bytes, MLA.chunk_bytes) == (144, 9216, 18432)
    assert (STATE.page_bytes, STATE.chunk_bytes) == (4192, 16768)
    assert STATE.section_runs(1, STATE.share(1, 2)) == (Run(4240, 48), Run(6336, 2048))
    for row_bytes, stride in ((1, 16), (16, 16), (17, 32), (656, 656), (1152, 1152)):
        assert GroupLayout.mla(1, row_bytes, 1).row_stride_bytes == stride


def test_golden_runs_of_ranks():
    assert DENSE.tp_runs(0, 1) == (Run(0, 98304),)
    assert DENSE.tp_runs(1, 2) == tuple(Run(8192 + half * 16384, 8192) for half in range(6))
    assert DENSE.tp_runs(3, 4) == tuple(Run(12288 + half * 16384, 4096) for half in range(6))
    assert MLA.tp_runs(3, 4) == (Run(0, 18432),)
    assert STATE.tp_runs(0, 1) == (Run(0, 16768),)
    assert STATE.tp_runs(1, 2)[:3] == (Run(48, 48), Run(96 + 2048, 2048), Run(4192 + 48, 48))


def test_golden_ids():
    window = GroupLayout.dense(2, 1, 8, 1, 4, window_tokens=128)
    groups = (DENSE, window, MLA, STATE)
    assert layout_id(groups) == (
        "kvf1:dense/l3/h8/d64/e2/t16,dense/l2/h1/d8/e1/t4/w128,mla/l2/r132/t64,"
        "state/l4/s96+4096/t512"
    )
    assert chunk_tokens_text(groups) == "16,4,64,512"
    assert common_tokens(groups) == 512


def test_golden_id_and_size_of_an_opaque_chunk():
    window = GroupLayout.opaque(1, 96, 8, 8, "x", window_tokens=24)
    assert layout_id([OPAQUE, window]) == (
        "kvf1:opaque/l2/b4096/k16/xany|tp2/t64,opaque/l1/b96/k8/xx/t8/w24"
    )
    assert (OPAQUE.chunk_bytes, window.chunk_bytes) == (4 * 4096, 96)
    assert (OPAQUE.blocks_per_chunk(16), window.blocks_per_chunk(8)) == (4, 1)
    assert common_tokens([OPAQUE, window]) == 64


def test_an_opaque_group_needs_chunks_as_any_other_does():
    window = GroupLayout.opaque(1, 96, 8, 16, "x", window_tokens=18)
    assert OPAQUE.chunks_needed(256) == range(4)
    assert window.chunks_needed(64) == range(2, 4)


def test_an_opaque_block_has_no_inside():
    for inside in (
        lambda: OPAQUE.page_bytes,
        lambda: OPAQUE.page_offset(0),
        lambda: OPAQUE.head_run(0, Half.K, 0, 1),
        lambda: OPAQUE.share(0, 2),
        lambda: OPAQUE.tp_runs(0, 2),
    ):
        with pytest.raises(Malformed, match="opaque"):
            inside()
    for bad in (8, 32, 64, 0):
        with pytest.raises(ConfigError, match="block_tokens"):
            OPAQUE.blocks_per_chunk(bad)


def test_heads_are_dealt_out_in_order_and_replicas_take_turns_at_writing():
    few = GroupLayout.dense(1, 2, 8, 2, 4)
    assert [few.share(rank, 4) for rank in range(4)] == [
        Share(0, 4, 0, 1, 0, 2),
        Share(1, 4, 0, 1, 1, 2),
        Share(2, 4, 1, 1, 0, 2),
        Share(3, 4, 1, 1, 1, 2),
    ]
    for group, size in ((few, 4), (MLA, 4), (DENSE, 4), (STATE, 4)):
        for ordinal in range(5):
            writers = [rank for rank in range(size) if group.share(rank, size).writes(ordinal)]
            written = sorted(run for rank in writers for run in group.tp_runs(rank, size))
            assert sum(run.length for run in written) == group.chunk_bytes
            assert len(set(written)) == len(written)


@pytest.mark.parametrize("group", [GroupLayout.dense(1, 6, 8, 2, 4), STATE])
def test_what_cannot_be_dealt_out_is_refused_by_name(group: GroupLayout):
    with pytest.raises(Unsupported, match="tensor_parallel=5") as caught:
        group.share(0, 5)
    assert group.id in str(caught.value)


def test_blocks_fill_a_chunk_or_are_refused():
    assert [DENSE.blocks_per_chunk(tokens) for tokens in (16, 4, 1)] == [1, 4, 16]
    assert STATE.blocks_per_chunk(128) == 1
    for bad in (32, 3, 0, -4):
        with pytest.raises(ConfigError, match="block_tokens"):
            DENSE.blocks_per_chunk(bad)


def test_which_chunks_of_a_prefix_a_group_needs():
    def window(tokens: int) -> GroupLayout:
        return GroupLayout.dense(1, 1, 8, 2, 16, window_tokens=tokens)

    assert DENSE.chunks_needed(64) == range(4)
    assert DENSE.chunks_needed(0) == range(0)
    assert STATE.chunks_needed(1024) == range(1, 2)
    assert STATE.chunks_needed(0) == range(0)
    # The next token sees itself and window - 1 before it.
    assert window(1).chunks_needed(64) == range(4, 4)
    assert window(2).chunks_needed(64) == range(3, 4)
    assert window(17).chunks_needed(64) == range(3, 4)
    assert window(18).chunks_needed(64) == range(2, 4)
    assert window(1000).chunks_needed(64) == range(4)
    for bad in (63, -16):
        with pytest.raises(Malformed, match="whole chunks"):
            DENSE.chunks_needed(bad)


@given(st.integers(1, 80), st.integers(0, 20), st.integers(1, 16))
@settings(deadline=None, max_examples=60, derandomize=True)
def test_a_window_needs_exactly_the_chunks_with_a_visible_token(window, chunks, chunk_tokens):
    group = GroupLayout.mla(1, 16, chunk_tokens, window_tokens=window)
    prefix = chunks * chunk_tokens
    visible = {token // chunk_tokens for token in range(max(0, prefix - window + 1), prefix)}
    assert set(group.chunks_needed(prefix)) == visible


@given(st.integers(1, 3), st.integers(1, 8), st.integers(1, 5), st.sampled_from([1, 2, 4, 8]))
@settings(deadline=None, max_examples=60, derandomize=True)
def test_the_ranks_of_a_chunk_tile_it(layers, heads, dim, size):
    groups = (
        GroupLayout.dense(layers, heads * size, dim, 2, 4),
        GroupLayout.state(layers, (dim * size, heads * size), 4),
    )
    for group in groups:
        covered = bytearray(group.chunk_bytes)
        for rank in range(size):
            for run in group.tp_runs(rank, size):
                for place in range(run.offset, run.end):
                    covered[place] += 1
        assert covered == bytes([1]) * group.chunk_bytes


def row_bytes_of_a_state() -> GroupLayout:
    return GroupLayout(
        kind=GroupKind.STATE, layers=1, chunk_tokens=1, row_bytes=1, state_sections=(1,)
    )


def dense_with_a_tag() -> GroupLayout:
    return GroupLayout(
        kind=GroupKind.DENSE,
        layers=1,
        chunk_tokens=1,
        kv_heads=1,
        head_dim=1,
        element_bytes=1,
        tag="x",
    )


def dense_with_blocks() -> GroupLayout:
    return GroupLayout(
        kind=GroupKind.DENSE,
        layers=1,
        chunk_tokens=1,
        kv_heads=1,
        head_dim=1,
        element_bytes=1,
        block_tokens=1,
    )


def test_a_shape_that_cannot_be_is_refused_by_its_field():
    bad = [
        ("tag", dense_with_a_tag),
        ("block_tokens", dense_with_blocks),
        ("tag", lambda: GroupLayout.opaque(1, 16, 16, 16, "")),
        ("tag", lambda: GroupLayout.opaque(1, 16, 16, 16, "a/b")),
        ("tag", lambda: GroupLayout.opaque(1, 16, 16, 16, "a,b")),
        ("tag", lambda: GroupLayout.opaque(1, 16, 16, 16, "a:b")),
        ("layers", lambda: GroupLayout.opaque(0, 16, 16, 16, "a")),
        ("block_bytes", lambda: GroupLayout.opaque(1, 0, 16, 16, "a")),
        ("block_tokens", lambda: GroupLayout.opaque(1, 16, 0, 16, "a")),
        ("chunk_tokens", lambda: GroupLayout.opaque(1, 16, 16, 24, "a")),
        ("window_tokens", lambda: GroupLayout.opaque(1, 16, 16, 16, "a", window_tokens=0)),
        ("layers", lambda: GroupLayout.dense(0, 1, 1, 1, 1)),
        ("kv_heads", lambda: GroupLayout.dense(1, 0, 1, 1, 1)),
        ("element_bytes", lambda: GroupLayout.dense(1, 1, 1, -2, 1)),
        ("chunk_tokens", lambda: GroupLayout.mla(1, 16, 0)),
        ("row_bytes", lambda: GroupLayout.mla(1, 0, 16)),
        ("row_bytes", row_bytes_of_a_state),
        ("state_sections", lambda: GroupLayout.state(1, (), 16)),
        ("state_sections", lambda: GroupLayout.state(1, (16, 0), 16)),
        ("window_tokens", lambda: GroupLayout.mla(1, 16, 16, window_tokens=0)),
    ]
    for field, make in bad:
        with pytest.raises(ConfigError) as caught:
            make()
        assert caught.value.field == field


def test_places_outside_a_group_are_refused():
    for outside in (
        lambda: DENSE.page_offset(3),
        lambda: DENSE.head_run(0, Half.K, 8, 1),
        lambda: DENSE.head_run(0, Half.K, 6, 3),
        lambda: MLA.head_run(0, Half.K, 0, 1),
        lambda: DENSE.tp_runs(2, 2),
        lambda: DENSE.tp_runs(-1, 2),
    ):
        with pytest.raises(Malformed):
            outside()


def test_layouts_are_values():
    for group in (DENSE, MLA, STATE, OPAQUE):
        assert pickle.loads(pickle.dumps(group)) == group
        assert hash(group) == hash(pickle.loads(pickle.dumps(group)))
