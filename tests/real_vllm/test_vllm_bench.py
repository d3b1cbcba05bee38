"""`kvfabric bench vllm` with small numbers: every row is there, and what it compares ran."""

import pytest
from lab import CLOCK

from kvfabric.actors.bench.vllm import REFERENCE, Sizes, bench_vllm

pytestmark = pytest.mark.real_vllm

BUSY_FACTOR = 10
"""The machine may be busy: this test is no measurement, but nothing may be far off."""


@pytest.mark.timeout(600)  # four engines start
def test_the_benchmark_prints_all_its_rows() -> None:
    sizes = Sizes(blocks=32, pairs=1, glances=2, dead_tries=1, idle_s=1.0, idle_tries=1)
    rows = {row.metric: row for row in bench_vllm(CLOCK, sizes)}
    assert set(rows) == {
        "scheduler_cost_32_blocks",
        "scheduler_cost_32_blocks_cold",
        "scheduler_cost_32_blocks_warm",
        "lookup_answer_p50_us",
        "lookup_answer_p99_us",
        "dead_source_cost_s",
        "idle_cpu_percent",
    }
    for name in ("scheduler_cost_32_blocks", "scheduler_cost_32_blocks_warm"):
        assert rows[name].reference == REFERENCE
        assert rows[name].value > 0
        assert rows[name].ratio > 1 / BUSY_FACTOR
    assert 0 < rows["dead_source_cost_s"].value < 2 * BUSY_FACTOR
    assert rows["lookup_answer_p50_us"].value <= rows["lookup_answer_p99_us"].value
