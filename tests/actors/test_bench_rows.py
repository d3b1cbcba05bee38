"""What benchmarks print, and how ours and a reference are compared."""

import io
import json
import os
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from kvfabric.__main__ import main
from kvfabric.actors.bench import BENCHES
from kvfabric.actors.bench.rows import PAIRS, Row, run_pairs, show
from kvfabric.actors.bench.vllm import Sizes, scheduler_rows
from kvfabric.actors.bench.vllm_child import Stopwatch
from kvfabric.actors.bench.vllm_engines import Life, cpu_s

ROWS = [
    Row("pool", "fast", 1.5, "GB/s", "two memcpys", 0.75),
    Row("pool", "alone", 0.2, "ms", "none", None),
    Row("p2p", "absent", 3.0, "GB/s", "a peer", None),
]


def printed(*, as_json: bool) -> str:
    out = io.StringIO()
    show(ROWS, Console(file=out, width=120), as_json=as_json)
    return out.getvalue()


def test_json_is_one_row_a_line_with_all_fields() -> None:
    rows = [json.loads(line) for line in printed(as_json=True).splitlines()]
    assert rows[0] == {
        "bench": "pool",
        "metric": "fast",
        "value": 1.5,
        "unit": "GB/s",
        "reference": "two memcpys",
        "ratio": 0.75,
    }
    assert [row["ratio"] for row in rows] == [0.75, None, None]


def test_the_table_says_that_a_reference_is_absent() -> None:
    lines = printed(as_json=False).splitlines()
    assert "reference not here" in next(line for line in lines if "absent" in line)
    assert "reference not here" not in next(line for line in lines if "alone" in line)


def test_pairs_are_run_in_turn_and_their_ratios_are_of_neighbours() -> None:
    order: list[str] = []

    def ours() -> float:
        order.append("ours")
        return 2.0

    def reference() -> float:
        order.append("reference")
        return float(len(order))

    pair = run_pairs(ours, reference)
    assert order == ["ours", "reference"] * (PAIRS + 1)
    assert pair.ours_s == 2.0
    assert pair.ratio == pair.reference_s / 2.0


def test_the_command_knows_every_bench() -> None:
    assert set(BENCHES) == {"pool", "p2p", "vllm"}


def test_without_vllm_the_command_says_how_to_get_it(monkeypatch, capsys) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    monkeypatch.setattr(sys, "argv", ["kvfabric", "bench", "vllm", "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (1, "")
    (line,) = err.splitlines()
    assert "`make vllm`, then `.venv-vllm/bin/kvfabric bench vllm`" in line


def life(milliseconds: float) -> Life:
    return Life(1.0, 0, {"a": [0.0], "b": [milliseconds / 1e3]}, [])


def test_the_scheduler_rows_are_medians_of_whole_lives() -> None:
    """Ours cold and warm, theirs cold and warm, in milliseconds; the ratio is of each pair."""
    lives = [
        tuple(life(each) for each in four) for four in ((1, 1, 2, 2), (2, 2, 8, 12), (3, 3, 3, 9))
    ]
    rows = scheduler_rows(lives, Sizes())
    assert [(row.metric, round(row.value, 6), round(row.ratio, 6)) for row in rows] == [
        ("scheduler_cost_1000_blocks", 4.0, 2.0),
        ("scheduler_cost_1000_blocks_cold", 2.0, 2.0),
        ("scheduler_cost_1000_blocks_warm", 2.0, 3.0),
    ]
    assert {row.reference for row in rows} == {"vLLM OffloadingConnector with its fs tier"}


class SlowConnector:
    """Each method takes a second, and finishing for all groups is asked through the other."""

    def __init__(self, clock) -> None:
        self._clock = clock
        self.answers = [None, None, 64]

    def get_num_new_matched_tokens(self, request, computed):
        self._clock.advance_s(1.0)
        return self.answers.pop(0), True

    def request_finished(self, request):
        self._clock.advance_s(1.0)
        return self.request_finished_all_groups(request)

    def request_finished_all_groups(self, request):
        self._clock.advance_s(1.0)
        raise KeyError(request.request_id)

    def _inner(self) -> None:
        raise AssertionError


def test_the_stopwatch_counts_each_second_once(clock) -> None:
    connector = SlowConnector(clock)
    watch = Stopwatch(connector, clock)
    request = SimpleNamespace(request_id="a")
    assert [connector.get_num_new_matched_tokens(request, 0)[0] for _ in range(3)] == [
        None,
        None,
        64,
    ]
    with pytest.raises(KeyError):
        connector.request_finished(request)
    taken = watch.take()
    assert taken["hooks"] == {
        "get_num_new_matched_tokens": [1.0, 1.0, 1.0],
        "request_finished": [2.0],
    }
    assert taken["lookups"] == [1.0, 1.0]  # the first, and the answer
    assert watch.take() == {"hooks": {}, "lookups": []}
    assert Life(0.0, 0, **taken).hook_s == 5.0


def test_cpu_time_is_that_of_a_process_and_those_below_it() -> None:
    assert 0 < cpu_s([os.getpid()]) <= cpu_s([os.getppid()])
    assert cpu_s([]) == 0
