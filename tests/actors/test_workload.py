"""Traces and made-up workloads, and how much an unbounded prefix cache would reuse of them.

With KVFABRIC_TRACE naming a Mooncake-format file, its first 400 requests are used as well.
"""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from kvfabric.actors.demo.trace import Scale, made_up_tokens, prompt_tokens, read_trace
from kvfabric.actors.demo.workload import (
    Conversations,
    MultiTurnWorkload,
    Request,
    TraceWorkload,
    longest_tokens,
)
from kvfabric.fabric.errors import ConfigError, Malformed

EXCERPT = Path(__file__).parent.parent / "golden" / "trace_excerpt.jsonl"
TRACES = [
    EXCERPT,
    *([Path(os.environ["KVFABRIC_TRACE"])] if "KVFABRIC_TRACE" in os.environ else []),
]
SCALE = 1 / 32


def unbounded_reuse(prompts: Iterable[Sequence[int]], chunk_tokens: int) -> list[int]:
    """Tokens of each prompt that a prefix cache without bounds has seen, in whole chunks.

    The last token is always computed. The oracle: it keeps every prefix whole and hashes nothing.
    """
    seen: set[tuple[int, ...]] = set()
    reused: list[int] = []
    for prompt in prompts:
        ends = range(chunk_tokens, len(prompt) + 1, chunk_tokens)
        prefixes = [tuple(prompt[:end]) for end in ends]
        hits = next((i for i, prefix in enumerate(prefixes) if prefix not in seen), len(prefixes))
        reused.append(min(hits * chunk_tokens, len(prompt) - 1))
        seen.update(prefixes)
    return reused


def reuse_by_block_ids(path: Path, requests_max: int, block_tokens: int) -> list[int]:
    """The same from the trace's numbers alone, for chunks of one block."""
    seen: set[tuple[int, ...]] = set()
    reused: list[int] = []
    for line in path.read_text().splitlines()[:requests_max]:
        record = json.loads(line)
        length = -(-record["input_length"] * block_tokens // 512)
        ids = record["hash_ids"][: length // block_tokens]
        hits = 0
        while hits < len(ids) and tuple(ids[: hits + 1]) in seen:
            hits += 1
        reused.append(min(hits * block_tokens, length - 1))
        seen.update(tuple(ids[: end + 1]) for end in range(len(ids)))
    return reused


def test_oracle_by_hand():
    a, b = [1, 2, 3, 4], [1, 2, 3, 4, 5, 6]
    assert unbounded_reuse([a, b, b, a, [9]], 2) == [0, 4, 5, 3, 0]
    assert unbounded_reuse([a, b, [1, 2, 9, 9, 5, 6]], 4) == [0, 4, 0]


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_made_up_content_reuses_what_the_numbers_say(path):
    requests = list(TraceWorkload(path, SCALE, requests_max=400).requests())
    prompts = [request.new_tokens for request in requests]
    reused = unbounded_reuse(prompts, 16)
    assert reused == reuse_by_block_ids(path, 400, 16)
    assert sum(reused) > 0
    finer = unbounded_reuse(prompts, 4)
    assert all(0 <= fine - coarse < 16 for fine, coarse in zip(finer, reused, strict=True))


def test_excerpt_reuses_much_and_is_scaled():
    requests = list(TraceWorkload(EXCERPT, SCALE, requests_max=400).requests())
    prompts = [request.new_tokens for request in requests]
    records = list(read_trace(EXCERPT))
    assert [len(prompt) for prompt in prompts] == [-(-r.input_length // 32) for r in records]
    assert [r.output_tokens for r in requests] == [-(-r.output_length // 32) for r in records]
    assert [r.arrival_s for r in requests] == [r.timestamp / 1000 for r in records]
    assert 0.3 < sum(unbounded_reuse(prompts, 16)) / sum(map(len, prompts)) < 0.9
    assert all(0 <= token < 256 for prompt in prompts for token in prompt)
    assert longest_tokens(requests) == max(len(r.new_tokens) + r.output_tokens for r in requests)


def test_trace_workload_stops_where_told_and_repeats_itself():
    workload = TraceWorkload(EXCERPT, SCALE, requests_max=3)
    assert len(list(workload.requests())) == 3
    assert list(workload.requests()) == list(workload.requests())
    other = next(TraceWorkload(EXCERPT, SCALE, requests_max=1, seed=1).requests())
    assert other.new_tokens != next(workload.requests()).new_tokens


def test_made_up_tokens_are_golden():
    assert made_up_tokens("trace 0 block 7", 8) == (255, 137, 238, 107, 29, 45, 59, 233)
    record = next(read_trace(EXCERPT))
    tokens = prompt_tokens(record, Scale(SCALE), 0)
    assert tokens[:16] == made_up_tokens(f"trace 0 block {record.hash_ids[0]}", 16)


@pytest.mark.parametrize(("factor", "block"), [(1, 512), (0.5, 256), (1 / 512, 1), (3 / 512, 3)])
def test_scale_keeps_the_number_of_blocks(factor, block):
    scale = Scale(factor)
    assert scale.block_tokens == block
    for count in (0, 1, 511, 512, 513, 126195):
        assert -(-scale.tokens(count) // block) == max(1, -(-count // 512))


@pytest.mark.parametrize("factor", [0.1, 0.0, -0.5, 1.5, 1 / 1024, float("nan"), float("inf")])
def test_scales_that_split_a_token_are_refused(factor):
    with pytest.raises(ConfigError) as caught:
        Scale(factor)
    assert caught.value.field == "scale"


GOOD = '{"timestamp": 5, "input_length": 600, "output_length": 1, "hash_ids": [0, 1]}'


@pytest.mark.parametrize(
    "bad",
    [
        GOOD[:-1],
        GOOD[:40],
        "",
        "[1, 2]",
        "plain text",
        '{"timestamp": 5, "input_length": 600, "output_length": 1}',
        GOOD.replace("600", '"600"'),
        GOOD.replace("600", "0"),
        GOOD.replace("600", "6.5"),
        GOOD.replace("[0, 1]", "[0]"),
        GOOD.replace("[0, 1]", "[0, -1]"),
        GOOD.replace("[0, 1]", "[0, null]"),
        GOOD.replace("5,", "4,"),
        GOOD.replace("5,", "-1,"),
        GOOD.replace("1,", "-1,"),
        GOOD + GOOD,
        GOOD.replace("[0, 1]", "[" + " " * (1 << 20) + "0, 1]"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, bad):
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{GOOD}\n{bad}\n{GOOD}\n")
    records = read_trace(path)
    assert next(records).hash_ids == (0, 1)
    with pytest.raises(Malformed) as caught:
        next(records)
    assert caught.value.what == f"{path}:2"


def test_a_line_that_is_no_text_is_malformed(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'{"timestamp": 5, "\xff\xfe": 1}\n\x80\n')
    with pytest.raises(Malformed, match=r"trace\.jsonl:1"):
        next(read_trace(path))


def test_truncation_anywhere_is_noticed(tmp_path):
    """Every cut of the last line but the one that only loses the line's end."""
    path = tmp_path / "trace.jsonl"
    for cut in range(1, len(GOOD)):
        path.write_text(f"{GOOD}\n{GOOD[:cut]}")
        with pytest.raises(Malformed, match=":2 is malformed"):
            list(read_trace(path))
    path.write_text(f"{GOOD}\n{GOOD}")
    assert len(list(read_trace(path))) == 2


def test_a_file_that_cannot_be_read_is_a_config_error(tmp_path):
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(ConfigError) as caught:
            next(read_trace(path))
        assert caught.value.field == "trace"


def play(workload: MultiTurnWorkload) -> tuple[list[Request], list[tuple[int, ...]]]:
    """Answer every request with tokens that follow from its prompt."""
    conversations = Conversations()
    requests: list[Request] = []
    prompts: list[tuple[int, ...]] = []
    for request in workload.requests():
        prompt = conversations.next_prompt(request)
        conversations.answer(request, [sum(prompt) % 256] * request.output_tokens)
        requests.append(request)
        prompts.append(prompt)
    assert conversations.under_way == 0
    return requests, prompts


def test_published_workload_has_its_sizes():
    workload = MultiTurnWorkload(conversations=3, scale=SCALE)
    requests, prompts = play(workload)
    assert [request.request_id for request in requests] == list(range(24))
    assert longest_tokens(requests) == 384 + 7 * 128 + 8 * 16
    assert max(map(len, prompts)) == 384 + 7 * (128 + 16)
    for request, prompt in zip(requests, prompts, strict=True):
        assert len(prompt) == 384 + request.turn * (128 + 16)
        assert prompt[:64] == prompts[0][:64]
    firsts = {prompts[request.request_id][:65] for request in requests}
    assert len(firsts) == 3


def test_turns_continue_prompt_and_answer_and_interleave():
    requests, prompts = play(MultiTurnWorkload(conversations=4, scale=SCALE, seed=2))
    before: dict[int, tuple[int, ...]] = {}
    for request, prompt in zip(requests, prompts, strict=True):
        start = before.get(request.conversation, ())
        assert prompt == start + request.new_tokens
        before[request.conversation] = prompt + (sum(prompt) % 256,) * request.output_tokens
    arrivals = [request.arrival_s for request in requests]
    assert arrivals == sorted(arrivals)
    order = [request.conversation for request in requests]
    assert order != sorted(order)
    for conversation in range(4):
        turns = [r.turn for r in requests if r.conversation == conversation]
        assert turns == list(range(8))


def test_multi_turn_reuse_is_all_but_the_new_turn():
    requests, prompts = play(MultiTurnWorkload(conversations=3, scale=SCALE))
    for request, reused in zip(requests, unbounded_reuse(prompts, 16), strict=True):
        if request.turn > 0:
            assert reused == len(prompts[request.request_id]) - 128 - 16
        else:
            assert reused == (64 if request.request_id else 0)


def test_workload_follows_from_its_seed():
    def made(seed):
        return list(MultiTurnWorkload(conversations=2, scale=SCALE, seed=seed).requests())

    assert made(1) == made(1)
    assert made(1) != made(2)


def test_turns_out_of_order_are_refused_and_change_nothing():
    first, second = list(MultiTurnWorkload(conversations=1, scale=SCALE, turns=2).requests())
    conversations = Conversations()
    with pytest.raises(Malformed, match="turn 1 of conversation 0"):
        conversations.next_prompt(second)
    with pytest.raises(Malformed):
        conversations.answer(first, [1])
    assert conversations.under_way == 0
    prompt = conversations.next_prompt(first)
    with pytest.raises(Malformed):
        conversations.next_prompt(first)
    conversations.answer(first, [1, 2])
    assert conversations.next_prompt(second) == (*prompt, 1, 2, *second.new_tokens)
    conversations.answer(second, [3])
    assert conversations.under_way == 0


@pytest.mark.parametrize(
    "values",
    [
        {"conversations": 0},
        {"turns": 0},
        {"first_prompt_tokens": 2048},
        {"output_tokens": 0},
        {"think_s": 0.0},
    ],
)
def test_counts_that_cannot_be_are_named(values):
    with pytest.raises(ConfigError) as caught:
        MultiTurnWorkload(**{"conversations": 1, "scale": SCALE, **values})
    assert caught.value.field in values
