"""What is known of one request: how much of it is computed, and which blocks still hold it."""

from hypothesis import given
from hypothesis import strategies as st
from vllm_yard import group, request

from kvfabric.actors.engines.vllm.prefix import PrefixRules
from kvfabric.actors.engines.vllm.requests import NEVER, Tracked

RULES = PrefixRules([group(0, 8), group(1, 8, window=12)])
"""Two blocks a chunk."""


def tracked(tokens: int = 40) -> Tracked:
    return Tracked(request(tokens=tokens), [0, 0])


def test_tokens_count_when_an_output_has_shown_them() -> None:
    one = tracked()
    one.request.num_computed_tokens = 16
    one.request.num_in_flight_tokens = 16
    assert one.confirmed_tokens == 0
    one.request.num_in_flight_tokens = 0
    assert one.confirmed_tokens == 16


def test_tokens_of_its_admission_count_with_the_first_output_beyond() -> None:
    one = tracked()
    one.admitted_tokens = 16
    one.request.num_computed_tokens = 16
    assert one.confirmed_tokens == 0
    one.request.num_computed_tokens, one.request.num_in_flight_tokens = 24, 8
    assert one.confirmed_tokens == 0
    one.request.num_in_flight_tokens = 0
    assert one.confirmed_tokens == 24


def test_nothing_counts_of_a_request_that_was_preempted_in_flight() -> None:
    one = tracked()
    one.request.num_computed_tokens, one.request.num_in_flight_tokens = 0, 16
    assert one.confirmed_tokens == 0
    assert not one.unsaved(RULES)


def test_no_more_counts_than_there_is() -> None:
    one = tracked(tokens=40)
    one.request.num_computed_tokens = 43  # speculative tokens
    assert one.confirmed_tokens == 40


def test_what_is_of_before_a_reset_never_counts() -> None:
    one = tracked()
    one.admitted_tokens = NEVER
    one.request.num_computed_tokens = 40
    assert one.confirmed_tokens == 0


def test_a_request_has_unsaved_chunks_if_any_group_has() -> None:
    one = tracked()
    one.request.num_computed_tokens = 23
    one.saved = [2, 2]
    assert not one.unsaved(RULES)
    one.saved = [2, 1]
    assert one.unsaved(RULES)


def test_blocks_that_left_a_window_are_known_until_somebody_has_them() -> None:
    one = tracked()
    one.hold(RULES, [[1, 2, 3, 4], [11, 12, 13, 14]])
    assert one.table(1, [0, 0, 13, 14, 15]) == [11, 12, 13, 14, 15]
    assert one.table(0, [0, 2, 3, 4]) == [0, 2, 3, 4]
    one.lose({12, 99})
    assert one.table(1, [0, 0, 13, 14]) == [11, 0, 13, 14]
    one.hold(RULES, [[1, 2, 3, 4, 5, 6], [0, 0, 0, 14, 15, 16]])
    assert one.table(1, [0, 0, 0, 0, 0, 16]) == [11, 0, 13, 14, 15, 16]


def test_what_was_saved_is_held_no_longer() -> None:
    one = tracked()
    one.hold(RULES, [[], [11, 12, 13, 14]])
    one.saved = [0, 1]
    one.hold(RULES, [[], [0, 0, 13, 14, 15]])
    assert one.held == {1: {2: 13, 3: 14, 4: 15}}


@given(st.lists(st.tuples(st.integers(0, 3), st.sets(st.integers(1, 30), max_size=4)), max_size=12))
def test_a_held_block_is_the_last_that_stood_there_and_was_given_to_nobody(steps) -> None:
    one = tracked()
    numbers = iter(range(1, 1000))
    table: list[int] = []
    stood: dict[int, int] = {}
    gone = 0
    for grown, overwritten in steps:
        one.lose(overwritten)
        stood = {index: block for index, block in stood.items() if block not in overwritten}
        gone = min(gone + grown // 2, len(table))
        table = [0] * gone + table[gone:] + [next(numbers) for _ in range(grown)]
        one.hold(RULES, [[], table])
        stood.update((at, block) for at, block in enumerate(table) if block)
        expected = [block or stood.get(at, 0) for at, block in enumerate(table)]
        assert list(one.table(1, table)) == expected
