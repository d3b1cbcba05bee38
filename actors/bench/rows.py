"""What a benchmark prints: rows of one form, as JSON lines or as a table."""

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Column, Table

from ...fabric.clock import Clock

PAIRS = 7
"""Ours and the reference are run in turn this often; machines are noisy, medians less so."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `ratio` is above 1 where we are better; None if the reference is absent."""

    bench: str
    metric: str
    value: float
    unit: str
    reference: str
    ratio: float | None


@dataclass(frozen=True, slots=True)
class Pair:
    """Medians of the seconds that ours and the reference took, run in turn."""

    ours_s: float
    reference_s: float
    ratio: float
    """Median of the ratios of neighbouring runs, reference over ours."""


def timed_s(clock: Clock, work: Callable[[], object]) -> float:
    """Return the seconds that one call took."""
    begun_s = clock.now_s()
    work()
    return clock.now_s() - begun_s


def run_pairs(
    ours: Callable[[], float], reference: Callable[[], float], pairs: int = PAIRS
) -> Pair:
    """Run both in turn, once to warm up and then `pairs` times; each returns its own seconds."""
    ours()
    reference()
    runs = [(ours(), reference()) for _ in range(pairs)]
    return Pair(
        statistics.median(run[0] for run in runs),
        statistics.median(run[1] for run in runs),
        statistics.median(run[1] / run[0] for run in runs),
    )


def show(rows: Sequence[Row], console: Console, *, as_json: bool) -> None:
    """Print rows as JSON lines, or as a table for a person."""
    if as_json:
        for row in rows:
            console.out(json.dumps(asdict(row)), highlight=False)
        return
    table = Table("bench", Column("metric", no_wrap=True), "value", "unit", "ratio", "reference")
    for row in rows:
        ratio = "reference not here" if row.ratio is None else f"{row.ratio:.2f}"
        if row.reference == "none":
            ratio = ""
        table.add_row(row.bench, row.metric, f"{row.value:.4g}", row.unit, ratio, row.reference)
    console.print(table)
