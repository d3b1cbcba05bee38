"""What benchmarks print, and how ours and a reference are compared."""

import io
import json

from rich.console import Console

from kvfabric.actors.bench import BENCHES
from kvfabric.actors.bench.rows import PAIRS, Row, run_pairs, show

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
    assert set(BENCHES) == {"pool", "p2p"}
