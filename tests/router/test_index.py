"""The residency index against a linear oracle, and its rules one by one."""

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfabric.fabric.errors import ConfigError
from kvfabric.fabric.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Snapshot,
    SnapshotSection,
)
from kvfabric.fabric.types import Medium
from kvfabric.router.index import ENTRY_BYTES, RESIDENCY_BYTES, Holding, PrefixIndex, Span


def stored(hashes, medium="CPU", group=0):
    return BlockStored(tuple(hashes), None, (), 16, None, medium, None, group_idx=group)


def removed(hashes, medium="CPU", group=0):
    return BlockRemoved(tuple(hashes), medium, group)


def make(**sources):
    index = PrefixIndex()
    for source, events in sources.items():
        index.apply(source, events)
        index.set_trust(source, trusted=True)
    return index


class Oracle:
    """Residency as a plain counter, and every question answered chunk by chunk."""

    def __init__(self):
        self.count = collections.Counter()
        self.untrusted = set()

    def apply(self, source, events):
        for event in events:
            if isinstance(event, AllBlocksCleared):
                for key in [k for k in self.count if k[0] == source and k[3] == "GPU"]:
                    del self.count[key]
                continue
            for value in event.block_hashes:
                key = (source, event.group_idx, value, event.medium)
                if isinstance(event, BlockStored):
                    self.count[key] += 1
                elif self.count[key]:
                    self.count[key] -= 1

    def drop(self, source):
        for key in [k for k in self.count if k[0] == source]:
            del self.count[key]

    def media(self, source, group, value):
        return {m for m in Medium if self.count[source, group, value, m.name]}

    def holders(self, value, groups, sources):
        found = {}
        for source in sources:
            media = [self.media(source, group, value) for group in groups]
            if source not in self.untrusted and all(media):
                found[source] = max(min(one) for one in media)
        return found

    def pooled(self, value, groups, sources):
        found = {}
        for source in sources:
            media = [self.media(source, group, value) - {Medium.GPU} for group in groups]
            if source not in self.untrusted and all(media):
                found[source] = max(min(one) for one in media)
        return found

    def common(self, source, value, groups):
        media = [self.media(source, group, value) for group in groups]
        if not all(media):
            return set()
        return set.intersection(*media) | {max(min(one) for one in media)}

    def spans(self, hashes, groups, sources):
        runs = []
        for position, value in enumerate(hashes):
            holders = self.holders(value, groups, sources)
            if not holders:
                break
            if runs and runs[-1][2] == holders:
                runs[-1][1] += 1
            else:
                runs.append([position, 1, holders])
        return runs

    def prefixes(self, hashes, groups, sources):
        found = {}
        for source in sources:
            if source in self.untrusted:
                continue
            marks = [0] * 4
            for medium in Medium:
                while marks[medium] < len(hashes) and medium in self.common(
                    source, hashes[marks[medium]], groups
                ):
                    marks[medium] += 1
            while marks[3] < len(hashes) and self.common(source, hashes[marks[3]], groups):
                marks[3] += 1
            if marks[3]:
                found[source] = (marks[3], tuple(marks[:3]))
        return found


SOURCES = ("a", "b", "c")
small = st.integers(0, 7)
action = st.one_of(
    st.tuples(
        st.just("store"),
        st.sampled_from(SOURCES),
        st.lists(small, max_size=5),
        st.sampled_from(["GPU", "CPU", "STORAGE"]),
        st.integers(0, 1),
    ),
    st.tuples(
        st.just("remove"),
        st.sampled_from(SOURCES),
        st.lists(small, max_size=5),
        st.sampled_from(["GPU", "CPU", "STORAGE"]),
        st.integers(0, 1),
    ),
    st.tuples(st.sampled_from(["clear", "drop", "trust", "distrust"]), st.sampled_from(SOURCES)),
)


def play(index, oracle, step):
    kind, source, *rest = step
    if kind in ("store", "remove"):
        hashes, medium, group = rest
        event = (stored if kind == "store" else removed)(hashes, medium, group)
        index.apply(source, [event])
        oracle.apply(source, [event])
    elif kind == "clear":
        index.apply(source, [AllBlocksCleared()])
        oracle.apply(source, [AllBlocksCleared()])
    elif kind == "drop":
        trusted = source not in oracle.untrusted
        index.drop_source(source)
        index.set_trust(source, trusted=trusted)
        oracle.drop(source)
    else:
        index.set_trust(source, trusted=kind == "trust")
        (oracle.untrusted.discard if kind == "trust" else oracle.untrusted.add)(source)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(
    steps=st.lists(action, max_size=40),
    prompt=st.lists(small, max_size=8),
    groups=st.sampled_from([(0,), (1,), (0, 1)]),
)
def test_equals_a_linear_oracle(steps, prompt, groups):
    index, oracle = PrefixIndex(), Oracle()
    for source in SOURCES:
        index.set_trust(source, trusted=True)
    for step in steps:
        play(index, oracle, step)
    index.check()
    for hashes in (prompt, np.array(prompt, dtype=np.uint64), list(range(8))):
        plain = [int(value) for value in hashes]
        holders = [
            oracle.holders(value, groups, SOURCES)
            for span in index.spans(hashes, groups)
            for value in plain[span.start : span.start + span.count]
        ]
        assert [
            span.holders for span in index.spans(hashes, groups) for _ in range(span.count)
        ] == holders
        for span in index.spans(hashes, groups):
            for value in plain[span.start : span.start + span.count]:
                pooled = {source: span.in_pool(source) for source in SOURCES}
                assert {
                    source: medium for source, medium in pooled.items() if medium is not None
                } == oracle.pooled(value, groups, SOURCES)
        assert len(holders) == sum(run[1] for run in oracle.spans(plain, groups, SOURCES))
        assert {
            one.source: (one.prefix, one.by_medium) for one in index.longest_prefix(hashes, groups)
        } == oracle.prefixes(plain, groups, SOURCES)


@settings(deadline=None, max_examples=50, derandomize=True)
@given(steps=st.lists(action, max_size=40))
def test_dump_and_load_keep_everything(steps):
    index, oracle = PrefixIndex(), Oracle()
    for step in steps:
        play(index, oracle, step)
    copy = PrefixIndex()
    for source in index.sources:
        copy.load(source, Snapshot(source, 0, 0, 0.0, index.dump(source)))
        assert copy.dump(source) == index.dump(source)
        for (owner, group, value, medium), count in oracle.count.items():
            if owner == source:
                for _ in range(count):
                    copy.apply(source, [removed([value], medium, group)])
    copy.check()
    assert copy.residencies == 0
    assert copy.counts.unknown_removals == 0


def test_spans_and_prefixes():
    index = make(
        a=[stored([1, 2, 3]), stored([4], "STORAGE")],
        b=[stored([1, 2], "GPU"), stored([3, 4, 5])],
    )
    assert index.spans([1, 2, 3, 4, 5, 6]) == (
        Span(0, 2, {"a": Medium.CPU, "b": Medium.GPU}, {"a": Medium.CPU}),
        Span(2, 1, {"a": Medium.CPU, "b": Medium.CPU}),
        Span(3, 1, {"a": Medium.STORAGE, "b": Medium.CPU}),
        Span(4, 1, {"b": Medium.CPU}),
    )
    assert index.longest_prefix([1, 2, 3, 4, 5, 6]) == (
        Holding("b", 5, (2, 0, 0)),
        Holding("a", 4, (0, 3, 0)),
    )
    assert index.longest_prefix([9, 1]) == ()
    assert index.spans([]) == ()
    assert index.spans(np.array([], dtype=np.uint64)) == ()


def test_a_group_that_lacks_a_chunk_ends_the_prefix():
    index = make(a=[stored([1, 2, 3], group=0), stored([1, 3], group=1)])
    assert index.longest_prefix([1, 2, 3], (0, 1)) == (Holding("a", 1, (0, 1, 0)),)
    assert index.longest_prefix([1, 2, 3], (0, 7)) == ()


def test_references_are_counted():
    index = make(a=[stored([1]), stored([1]), removed([1])])
    assert index.longest_prefix([1])[0].prefix == 1
    index.apply("a", [removed([1])])
    assert index.longest_prefix([1]) == ()
    index.apply("a", [removed([1])])
    assert index.counts.unknown_removals == 1
    index.check()


def test_clearing_touches_the_gpu_of_one_source_only():
    index = make(
        a=[stored([1], "GPU"), stored([1], "CPU"), stored([2], "GPU"), stored([2], "GPU")],
        b=[stored([2], "GPU")],
    )
    index.apply("a", [AllBlocksCleared()])
    assert index.spans([1]) == (Span(0, 1, {"a": Medium.CPU}),)
    assert index.spans([2]) == (Span(0, 1, {"b": Medium.GPU}, {}),)
    index.apply("a", [stored([2], "GPU"), removed([2], "GPU")])
    assert index.spans([2]) == (Span(0, 1, {"b": Medium.GPU}, {}),)
    index.check()


def test_unknown_media_give_no_credit_and_absent_ones_mean_gpu():
    index = make(a=[stored([1], "MOON"), removed([1], "MOON"), stored([2], None)])
    assert index.longest_prefix([1]) == ()
    assert index.spans([2])[0].holders == {"a": Medium.GPU}
    assert index.counts.unknown_media == 2


def test_hashes_come_in_any_form():
    digest = bytes(24) + (5).to_bytes(8, "big")
    index = make(a=[stored([digest]), stored([-1])])
    assert index.longest_prefix([5, 2**64 - 1])[0].prefix == 2
    assert index.longest_prefix(np.array([5, 2**64 - 1], dtype=np.uint64))[0].prefix == 2


def test_an_untrusted_source_gives_no_credit_but_is_not_forgotten():
    index = make(a=[stored([1, 2])], b=[stored([1])])
    index.set_trust("a", trusted=False)
    assert [one.source for one in index.longest_prefix([1, 2])] == ["b"]
    assert index.spans([1, 2]) == (Span(0, 1, {"b": Medium.CPU}),)
    index.set_trust("a", trusted=True)
    assert index.longest_prefix([1, 2])[0].prefix == 2
    index.apply("new", [stored([1])])
    assert not index.trusted("new")


def test_dropping_a_source_frees_its_slot_and_leaves_no_trace():
    index = make(a=[stored([1, 2])], b=[stored([2, 3])])
    index.drop_source("a")
    index.drop_source("a")
    index.check()
    index.apply("c", [stored([9])])
    assert index.longest_prefix([9]) == ()
    index.set_trust("c", trusted=True)
    assert index.spans([9, 2]) == (
        Span(0, 1, {"c": Medium.CPU}), Span(1, 1, {"b": Medium.CPU}),
    )  # fmt: skip
    index.drop_source("b")
    index.drop_source("c")
    assert index.estimated_bytes == 0
    assert index.sources == ()


def test_load_replaces_and_keeps_trust():
    index = make(a=[stored([1, 2])])
    section = SnapshotSection(0, "STORAGE", 16, np.array([2, 7], dtype="<u8").tobytes())
    moon = SnapshotSection(0, "MOON", 16, np.array([8], dtype="<u8").tobytes())
    index.load("a", Snapshot("a", 1, 0, 0.0, (section, moon)))
    assert index.spans([2, 7]) == (Span(0, 2, {"a": Medium.STORAGE}),)
    assert index.spans([1]) == ()
    assert index.dump("a") == (section,)
    assert index.dump("nobody") == ()


def test_memory_is_bounded_and_a_full_index_refuses():
    index = PrefixIndex(bytes_max=10 * (ENTRY_BYTES + RESIDENCY_BYTES))
    index.set_trust("a", trusted=True)
    index.apply("a", [stored(range(25))])
    assert index.estimated_bytes <= index.bytes_max
    assert index.counts.refused == 15
    assert index.longest_prefix(range(25))[0].prefix == 10
    index.apply("a", [removed(range(25)), stored(range(100, 110))])
    assert index.longest_prefix(range(100, 110))[0].prefix == 10
    assert index.counts.unknown_removals == 15
    index.check()
    with pytest.raises(ConfigError):
        PrefixIndex(bytes_max=1)
