"""Costs, plans, calibration and promises: each rule with numbers that a reader can check."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfabric.fabric.errors import ConfigError, Unavailable
from kvfabric.fabric.events import BlockStored
from kvfabric.fabric.types import SourceRange
from kvfabric.router.book import BookLimits
from kvfabric.router.decider import Decider
from kvfabric.router.index import PrefixIndex
from kvfabric.router.plan import Candidate, Origin, Prompt
from kvfabric.router.policy import Calibration, RateKind, Rates

# 100 tokens take 0.1 s to compute; a chunk of 1,000 bytes 0.001 s to load, 0.01 s from a tier or
# a peer.
RATES = Rates(
    prefill_tokens_s=1000.0,
    load_bytes_s=1e6,
    tier_bytes_s=1e5,
    pull_bytes_s=1e5,
    pull_setup_s=0.001,
)
NODES = ("a", "b", "c", "d")
WORKERS = [Candidate(f"w-{node}", node) for node in NODES]


def prompt(chunks=100, first=0, tail=10):
    return Prompt(range(first, first + chunks), chunks * 100 + tail, 100, 1000)


def decider(rates=RATES, limits=None, **held):
    made = Decider(PrefixIndex(), Calibration(rates), limits)
    for node in NODES:
        made.set_pool(node, f"tcp://{node}")
    for source, parts in held.items():
        for medium, hashes in parts.items():
            event = BlockStored(tuple(hashes), None, (), 100, None, medium, None, group_idx=0)
            made.index.apply(source, [event])
        made.index.set_trust(source, trusted=True)
    return made


def shape(ranges):
    return [(one.origin.name, one.start, one.count, one.source) for one in ranges]


def test_runs_where_the_prefix_is():
    made = decider(b={"CPU": range(100)})
    plan = made.decide(prompt(), WORKERS, 0.0)
    assert (plan.worker, plan.node) == ("w-b", "b")
    assert shape(plan.ranges) == [("HOST", 0, 100, ""), ("COMPUTE", 100, 0, "")]
    assert plan.sources == ()
    assert plan.expected_s == pytest.approx(0.1 + 0.01)
    assert plan.chunks(Origin.HOST) == 100
    assert plan.explanation[0].worker == "w-b"
    assert len(plan.explanation) == 4
    assert made.plan_pull("b", prompt()) == ()


def test_pulls_where_the_holder_is_busy():
    made = decider(b={"CPU": range(100)})
    workers = [Candidate("w-a", "a"), Candidate("w-b", "b", queued_tokens=5000)]
    plan = made.decide(prompt(), workers, 0.0)
    assert plan.worker == "w-a"
    assert plan.sources == (SourceRange("b", "tcp://b", 0, 100),)
    assert plan.expected_s == pytest.approx(1.0 + 0.001 + 0.1 + 0.01)
    assert plan.explanation[1].queue_s == pytest.approx(5.0)


def test_host_tier_peer_and_compute_join_in_one_plan():
    made = decider(
        a={"CPU": range(40), "STORAGE": range(40, 60)},
        b={"CPU": range(20, 80)},
    )
    ranges = made.decide(prompt(), [Candidate("w-a", "a")], 0.0).ranges
    # From the tier 0.2 s against 0.201 s from the peer, then what only the peer has.
    assert shape(ranges) == [
        ("HOST", 0, 20, ""), ("HOST", 20, 20, ""), ("TIER", 40, 20, ""), ("PEER", 60, 20, "b"),
        ("COMPUTE", 80, 20, ""),
    ]  # fmt: skip
    assert made.plan_pull("a", prompt()) == (SourceRange("b", "tcp://b", 60, 20),)


def test_the_gpu_of_the_worker_itself_is_free():
    made = decider(**{"engine-a": {"GPU": range(100)}})
    plan = made.decide(prompt(), [Candidate("w-a", "a", 0, "engine-a")], 0.0)
    assert shape(plan.ranges) == [("GPU", 0, 100, ""), ("COMPUTE", 100, 0, "")]
    other = made.decide(prompt(), [Candidate("w-b", "b")], 0.0)
    assert shape(other.ranges) == [("COMPUTE", 0, 100, "")]


def test_a_gpu_hides_neither_its_node_s_host_nor_its_tiers():
    made = decider(
        a={"GPU": range(100), "CPU": range(60), "STORAGE": range(100)},
        b={"GPU": range(100), "CPU": range(100)},
    )
    made.set_pool("b", "")
    plan = made.decide(prompt(), [Candidate("w-a", "a")], 0.0)
    assert shape(plan.ranges)[:2] == [("HOST", 0, 60, ""), ("TIER", 60, 40, "")]
    made.set_pool("b", "tcp://b")
    assert {one.node for one in made.plan_pull("c", prompt(100))} == {"a", "b"}
    alone = made.decide(prompt(), [Candidate("w-a", "a", 0, "a")], 0.0)
    assert alone.chunks(Origin.GPU) == 100


def test_what_only_a_gpu_of_a_node_has_is_neither_loaded_nor_pulled():
    made = decider(a={"GPU": range(100)})
    for worker in (Candidate("w-a", "a"), Candidate("w-b", "b")):
        plan = made.decide(prompt(), [worker], 0.0)
        assert shape(plan.ranges) == [("COMPUTE", 0, 100, "")]
    assert made.plan_pull("b", prompt()) == ()


def test_a_long_range_is_dealt_to_several_sources():
    held = {"CPU": range(96)}
    made = decider(b=held, c=held, d=held)
    pulls = made.plan_pull("a", prompt(96))
    assert sum(one.count for one in pulls) == 96
    assert {one.node for one in pulls} == {"b", "c", "d"}
    assert [one.start for one in pulls] == sorted(one.start for one in pulls)
    cost = made.costs(prompt(96), [Candidate("w-a", "a")], 0.0)[0]
    assert cost.pull_s == pytest.approx(0.001 + 0.96 / 3)


def test_a_source_that_is_sending_already_is_spared():
    held = {"CPU": range(16)}
    made = decider(b=held, c=held)
    first = made.decide(prompt(16), [Candidate("w-a", "a")], 0.0)
    assert [one.node for one in first.sources] == ["b"]
    assert made.book.sending_bytes == {"b": 16_000}
    second = made.decide(prompt(16), [Candidate("w-d", "d")], 0.0)
    assert [one.node for one in second.sources] == ["c"]
    made.settle(first.reservation)
    made.settle(first.reservation)
    assert made.book.sending_bytes == {"c": 16_000}
    made.book.check()


def test_never_from_itself_from_the_untrusted_or_from_the_unknown():
    held = {"CPU": range(50)}
    made = decider(a=held, b=held, zz=held)
    made.index.set_trust("b", trusted=False)
    assert made.plan_pull("a", prompt(50)) == ()
    assert [one.node for one in made.plan_pull("c", prompt(50))] == ["a"]
    made.set_pool("a", "")
    assert made.plan_pull("c", prompt(50)) == ()
    made.index.set_trust("a", trusted=False)
    plan = made.decide(prompt(50), [Candidate("w-a", "a")], 0.0)
    assert shape(plan.ranges) == [("COMPUTE", 0, 50, "")]


def test_what_is_faster_recomputed_is_recomputed():
    slow = Rates(1000.0, 1e6, 1e5, 5e3, 0.001)
    made = decider(slow, b={"CPU": range(50)})
    assert made.plan_pull("a", prompt(50)) == ()
    setup = Rates(1000.0, 1e6, 1e5, 1e5, 3.0)
    assert decider(setup, b={"CPU": range(20)}).plan_pull("a", prompt(20)) == ()
    assert decider(setup, b={"CPU": range(50)}).plan_pull("a", prompt(50)) != ()


def test_behind_a_range_too_dear_nothing_is_reused():
    slow = Rates(1000.0, 1e6, 1e5, 5e3, 0.001)
    made = decider(slow, a={"CPU": [*range(10), *range(30, 40)]}, b={"CPU": range(10, 30)})
    ranges = made.decide(prompt(40), [Candidate("w-a", "a")], 0.0).ranges
    # Ten chunks to load behind twenty to pull: pulling costs 4 s and saves 2 s + 1 s.
    assert shape(ranges) == [("HOST", 0, 10, ""), ("COMPUTE", 10, 30, "")]
    made = decider(slow, a={"CPU": [*range(10), *range(30, 99)]}, b={"CPU": range(10, 30)})
    ranges = made.decide(prompt(99), [Candidate("w-a", "a")], 0.0).ranges
    assert [one.origin.name for one in ranges] == ["HOST", "PEER", "HOST", "COMPUTE"]


def test_equal_prompts_at_once_spread_over_workers():
    made = decider()
    chosen = [made.decide(prompt(), WORKERS, 0.0).worker for _ in range(40)]
    assert {chosen.count(worker.worker) for worker in WORKERS} <= {9, 10, 11}
    assert len(set(chosen[:4])) == 4
    made.book.check()


def test_a_later_prompt_follows_one_still_computing():
    made = decider()
    first = made.decide(prompt(), WORKERS, 0.0)
    made.settle(first.reservation)
    second = made.decide(prompt(110), WORKERS, 1.0)
    assert second.worker == first.worker
    assert second.chunks(Origin.HOST) == 100
    assert made.plan_pull("d", prompt(110)) == ()


def test_promises_end_by_themselves_and_can_be_taken_back():
    made = decider(limits=BookLimits(hold_s=5.0, reservations_max=3))
    plan = made.decide(prompt(), WORKERS[:1], 0.0)
    assert made.book.reserved_s == {"w-a": pytest.approx(10.01)}
    made.cancel(plan.reservation)
    made.cancel(plan.reservation)
    assert made.book.reserved_s == {}
    assert made.book.expected_chunks(prompt()) == {}
    for number in range(5):
        made.decide(prompt(10, first=1000 * number), WORKERS[:1], 1.0)
    assert len(made.book) == 3
    made.book.check()
    assert made.costs(prompt(), WORKERS[:1], 6.0)[0].queue_s == 0.0
    assert len(made.book) == 0
    made.book.check()


def test_nobody_to_run_is_an_error_and_reserves_nothing():
    made = decider()
    with pytest.raises(Unavailable):
        made.decide(prompt(), [], 0.0)
    assert len(made.book) == 0


def test_a_prompt_without_a_full_chunk_goes_to_the_shortest_queue():
    made = decider()
    workers = [Candidate("w-a", "a", 500), Candidate("w-b", "b", 100)]
    plan = made.decide(prompt(0), workers, 0.0)
    assert plan.worker == "w-b"
    assert plan.expected_s == pytest.approx(0.11)


def test_rates_are_learnt_per_key_and_in_the_mean():
    rates = Calibration(RATES, weight=0.5, keys_max=2)
    for _ in range(20):
        rates.observe(RateKind.PULL, "b", 4e5, 1.0)
    assert rates.rate(RateKind.PULL, "b") == pytest.approx(4e5, rel=0.01)
    assert rates.rate(RateKind.PULL, "new") == pytest.approx(4e5, rel=0.01)
    rates.observe(RateKind.PULL, "c", 1e5, 1.0)
    assert rates.rate(RateKind.PULL, "c") == pytest.approx(2.5e5, rel=0.01)
    rates.observe(RateKind.PULL, "c", 0, 1.0)
    rates.observe(RateKind.PULL, "c", 5, 0.0)
    assert rates.ignored == 2
    rates.observe(RateKind.PULL, "d", 1e5, 1.0)
    assert rates.rate(RateKind.PULL, "b") == rates.rate(RateKind.PULL, "new")
    with pytest.raises(ConfigError):
        Calibration(Rates(prefill_tokens_s=0))
    with pytest.raises(ConfigError):
        Calibration(RATES, weight=0)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(
    held=st.dictionaries(
        st.sampled_from(NODES),
        st.lists(st.tuples(st.integers(0, 39), st.sampled_from(["CPU", "STORAGE"])), max_size=40),
    ),
    queues=st.lists(st.integers(0, 9000), min_size=4, max_size=4),
    requests=st.integers(1, 6),
)
def test_every_plan_is_whole_honest_and_the_cheapest_of_its_own_list(held, queues, requests):
    made = decider()
    truth = {}
    for source, chunks in held.items():
        for value, medium in chunks:
            truth.setdefault((source, value), set()).add(medium)
            event = BlockStored((value,), None, (), 100, None, medium, None, group_idx=0)
            made.index.apply(source, [event])
        made.index.set_trust(source, trusted=True)
    workers = [Candidate(f"w-{n}", n, q) for n, q in zip(NODES, queues, strict=True)]
    ask = prompt(40)
    for number in range(requests):
        expected = made.book.expected_chunks(ask)
        plan = made.decide(ask, workers, float(number))
        covered = [at for one in plan.ranges for at in range(one.start, one.start + one.count)]
        assert covered == list(range(40))
        assert plan.ranges[-1].origin is Origin.COMPUTE
        assert plan.expected_s == min(cost.total_s for cost in plan.explanation)
        for cost in plan.explanation:
            assert cost.total_s <= cost.queue_s + ask.tokens / 1000 + 1e-9
            assert cost.busy_s >= 0
        for one in plan.ranges:
            for at in range(one.start, one.start + one.count):
                if one.origin is Origin.PEER:
                    assert one.source != plan.node
                    assert "CPU" in truth[one.source, at]
                elif one.origin is Origin.HOST:
                    on_its_way = at < expected.get(plan.node, 0)
                    assert on_its_way or "CPU" in truth[plan.node, at]
                elif one.origin is Origin.TIER:
                    assert "STORAGE" in truth[plan.node, at]
    made.book.check()
    made.index.check()
