"""The demo's live view, and its table at the end."""

import json
import sys
from collections import deque
from collections.abc import Mapping

from rich.console import Console, Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from ..engines.reference import ORIGINS
from .tally import Tally

NEWS_MAX = 6
"""Lines of news shown at once."""


class View:
    """Everything that the live view shows. Other threads set it; rich draws it."""

    def __init__(self, requests: int, roles: Mapping[str, str], tally: Tally) -> None:
        self.requests = requests
        self.roles = dict(roles)
        self.tally = tally
        self.pools: dict[str, dict[str, float]] = {}
        self.news: deque[str] = deque(maxlen=NEWS_MAX)

    def tell(self, line: str) -> None:
        """Add a line of news."""
        self.news.append(line)

    def __rich__(self) -> Group:
        done = len(self.tally.served)
        head = Table.grid(padding=(0, 2))
        head.add_row("requests", f"{done}/{self.requests}", ProgressBar(self.requests, done, 40))
        parts: list[object] = [head, nodes_table(self.pools, self.roles), reuse_table(self.tally)]
        if self.news:
            parts.append(Panel("\n".join(self.news), title="news", title_align="left"))
        return Group(*parts)  # pyright: ignore[reportArgumentType] (all are renderables)


def nodes_table(pools: Mapping[str, Mapping[str, float]], roles: Mapping[str, str]) -> Table:
    """One row a node: its workers, how full its pool is, what came and went."""
    table = Table("node", "workers", "pool", "", "chunks", "evicted", "files", "pulled", box=None)
    for node in sorted(roles):
        stats = pools.get(node)
        if stats is None:
            table.add_row(node, roles[node], "down", "", "", "", "", "")
            continue
        slots = int(sum(stats.get(s, 0) for s in ("free", "writing", "ready", "quarantined")))
        ready = int(stats.get("ready", 0))
        table.add_row(
            node,
            roles[node],
            ProgressBar(max(slots, 1), ready, 16),
            f"{ready / max(slots, 1):4.0%}",
            str(ready),
            f"{stats.get('evictions', 0):.0f}",
            f"{stats.get('fs_chunks', 0):.0f}",
            f"{stats.get('pull_chunks', 0):.0f}",
        )
    return table


def reuse_table(tally: Tally) -> Table:
    """Where prompt tokens came from so far."""
    table = Table("prompt tokens", "computed", *(f"from {o}" for o in ORIGINS), "reused", box=None)
    prompt = tally.prompt_tokens
    reused = [tally.reused(origin) for origin in ORIGINS]
    table.add_row(
        f"{prompt:,}",
        f"{tally.computed_tokens:,}",
        *(f"{tokens:,}" for tokens in reused),
        f"{sum(reused) / max(prompt, 1):.1%}",
    )
    return table


def print_end(tally: Tally, console: Console) -> None:
    """Print the table at the end of the run."""
    summary = tally.summary()
    table = Table(title="What the fabric saved", title_justify="left")
    for column in ("", "without", "with the fabric"):
        table.add_column(column, justify="left" if not column else "right")
    prompt = tally.prompt_tokens
    table.add_row("prefill tokens computed", f"{prompt:,}", f"{tally.computed_tokens:,}")
    for origin in ORIGINS:
        table.add_row(f"  reused from {origin}", "0", f"{tally.reused(origin):,}")
    table.add_row("prompt tokens handed to decode workers", "0", f"{tally.handoff_tokens:,}")
    table.add_row("  computed again by decode workers", "0", f"{tally.handoff_computed_tokens:,}")
    for name, key in (("mean", "ttft_ms"), ("median", "ttft_p50_ms")):
        times = summary[key]
        table.add_row(
            f"time to first token, {name}", f"{times['without']:.1f} ms", f"{times['with']:.1f} ms"
        )
    for origin in ORIGINS:
        table.add_row(f"KV loaded from {origin}", "0 MB", f"{tally.bytes(origin) / 1e6:,.1f} MB")
    table.add_row("faults survived", "", str(summary["faults"]))
    console.print(table)
    verdict = (
        "[green]every generated token equals the one computed without the fabric[/green]"
        if tally.tokens_identical
        else "[red]generated tokens differ from those computed without the fabric[/red]"
    )
    console.print(verdict)


def finish(tally: Tally, console: Console, *, as_json: bool) -> int:
    """Print the table and, if asked, one JSON object as the last line of standard output.

    Returns the exit code: 1 if any token differs from the one computed without the fabric.
    """
    print_end(tally, console)
    if not tally.tokens_identical:
        differing = [one.request_id for one in tally.served if not one.identical]
        console.print(f"requests that differ: {differing}")
    if as_json:
        sys.stdout.write(json.dumps(tally.summary()) + "\n")
        sys.stdout.flush()
    return 0 if tally.tokens_identical else 1
