"""The demo's picture: what was computed, how long the first token took, which way bytes went."""

import statistics
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes

from ..engines.reference import ORIGINS
from .tally import Tally

mpl.use("Agg")

COLOURS = {"computed": "#8c8c8c", "host": "#2a78b5", "fs": "#e8a33d", "peer": "#3c9d5b"}
WHERE = {"host": "this node's memory", "fs": "files", "peer": "another node"}
DPI = 130


def draw(tally: Tally, path: Path) -> None:
    """Write a PNG."""
    from matplotlib import pyplot

    figure, (tokens, first, moved) = pyplot.subplots(1, 3, figsize=(13, 4.2))
    figure.suptitle(_title(tally), fontsize=11)
    _draw_tokens(tally, tokens)
    _draw_first_token(tally, first)
    _draw_bytes(tally, moved)
    figure.tight_layout()
    figure.savefig(path, dpi=DPI)
    pyplot.close(figure)


def _title(tally: Tally) -> str:
    summary = tally.summary()
    same = "all equal to" if tally.tokens_identical else "NOT all equal to"
    return (
        f"{summary['requests']} requests, {summary['hit_ratio']:.0%} of prompt tokens reused, "
        f"{summary['generated_tokens']} generated tokens {same} those computed without the fabric"
    )


def _draw_tokens(tally: Tally, axes: Axes) -> None:
    axes.bar(["without"], [tally.prompt_tokens], color=COLOURS["computed"], label="computed")
    axes.bar(["with"], [tally.computed_tokens], color=COLOURS["computed"])
    bottom = tally.computed_tokens
    for origin in ORIGINS:
        height = tally.reused(origin)
        label = f"reused, from {WHERE[origin]}"
        axes.bar(["with"], [height], bottom=bottom, color=COLOURS[origin], label=label)
        bottom += height
    axes.set_title("prefill tokens")
    axes.set_xlabel("the fabric")
    axes.set_ylim(0, 1.6 * max(tally.prompt_tokens, 1))
    axes.legend(fontsize=8, loc="upper left")


def _draw_first_token(tally: Tally, axes: Axes) -> None:
    turns = sorted({one.turn for one in tally.served})
    for kind, colour in (("without", COLOURS["computed"]), ("with", COLOURS["host"])):
        times = list(zip(tally.served, tally.ttft_ms(kind), strict=True))
        medians = [statistics.median(t for one, t in times if one.turn == turn) for turn in turns]
        if len(turns) > 1:
            axes.plot([t + 1 for t in turns], medians, "o-", color=colour, label=kind)
        else:
            axes.hist([t for _, t in times], bins=24, color=colour, alpha=0.6, label=kind)
    axes.set_title("time to first token" + (", median per turn" if len(turns) > 1 else ""))
    axes.set_xlabel("turn of the conversation" if len(turns) > 1 else "ms")
    axes.set_ylabel("ms" if len(turns) > 1 else "requests")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, title="the fabric")


def _draw_bytes(tally: Tally, axes: Axes) -> None:
    values = [tally.bytes(origin) / 1e6 for origin in ORIGINS]
    bars = axes.barh(
        [WHERE[o] for o in ORIGINS], values, color=[COLOURS[origin] for origin in ORIGINS]
    )
    axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
    axes.set_title("KV loaded by workers, by path")
    axes.set_xlabel("MB")
    axes.set_xlim(0, 1.2 * max(*values, 0.1))
    axes.invert_yaxis()
