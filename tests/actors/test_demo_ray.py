"""The command `kvfabric demo` as a user runs it on a new machine: what it prints and proves.

The trace is the one that KVFABRIC_TRACE names, else the published one if it lies beside the
checkout, else the excerpt. Of a large one the first 400 requests are played.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib import image

from kvfabric.actors.demo.trace import Scale, prompt_tokens, read_trace

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
EXCERPT = ROOT / "tests" / "golden" / "trace_excerpt.jsonl"
PUBLISHED = ROOT.parent / "shared" / "traces" / "conversation_trace.jsonl"
TRACE = Path(os.environ.get("KVFABRIC_TRACE") or (PUBLISHED if PUBLISHED.exists() else EXCERPT))
REQUESTS = 400
TRACE_SCALE = 1 / 128
"""A block of the trace becomes 4 tokens: 400 requests have 44,000 prompt tokens."""
CHUNK_TOKENS = 4
DEMO_S = 230
SMALL = ["--conversations", "2", "--turns", "3", "--scale", "0.03125", "--output-tokens", "24"]


def played(machine, *options):
    """Run a demo that must leave nothing behind; return its JSON object and its picture."""
    options = ["--json", "--plot", machine.home("demo.png"), *options]
    with subprocess.Popen(
        machine.command([sys.executable, "-m", "kvfabric", "demo", *options]),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"COLUMNS": "100"},
    ) as demo:
        out, err = demo.communicate(timeout=DEMO_S)
    assert demo.returncode == 0, err
    assert "Traceback" not in err
    assert not list(Path("/dev/shm").glob(f"kvfabric-demo-{demo.pid}-*"))
    summary = json.loads(out.splitlines()[-1])
    assert summary["tokens_identical"] is True
    assert (
        summary["computed_tokens"] + sum(summary["reused_tokens"].values())
        == (summary["prompt_tokens"])
    )
    assert machine.left() == []
    return summary, image.imread(machine.folder / "home" / "demo.png")


SMALL_REGION_BYTES = 24 * 65_536
"""Room for two of the small demo's prompts, so that files get their part."""


def test_a_small_demo_reuses_and_reports(machine):
    summary, picture = played(machine, *SMALL, "--region-bytes", SMALL_REGION_BYTES)
    assert set(summary) >= {
        "requests",
        "tokens_identical",
        "prompt_tokens",
        "computed_tokens",
        "reused_tokens",
        "hit_ratio",
        "ttft_ms",
        "bytes",
        "faults",
    }
    assert summary["requests"] == 6
    assert set(summary["reused_tokens"]) == set(summary["bytes"]) == {"host", "fs", "peer"}
    assert set(summary["ttft_ms"]) == {"with", "without"}
    assert summary["faults"] == 0
    reused = sum(summary["reused_tokens"].values())
    assert reused > 0
    assert summary["hit_ratio"] == pytest.approx(reused / summary["prompt_tokens"])
    assert all(moved > 0 for moved in summary["bytes"].values())
    assert summary["reused_tokens"]["fs"] > 0
    handed = summary["handoff_tokens"] + summary["handoff_computed_tokens"]
    assert handed == summary["prompt_tokens"]
    height, width, _ = picture.shape
    assert height > 300
    assert width > 900
    assert picture[..., :3].var() > 0.005


def test_the_same_tokens_come_out_when_a_pool_and_a_node_are_killed(machine):
    summary, _ = played(machine, *SMALL, "--turns", "4", "--kill")
    assert summary["requests"] == 8
    assert summary["faults_by_kind"]["pool killed"] == 1
    assert summary["faults_by_kind"]["node killed"] == 1
    assert sum(summary["reused_tokens"].values()) > 0


def unbounded_reuse(path, scale, chunk_tokens):
    """What a prefix cache without bounds would reuse, request by request. Keeps whole prefixes."""
    seen: set[tuple[int, ...]] = set()
    reused: list[int] = []
    prompts: list[int] = []
    for _, record in zip(range(REQUESTS), read_trace(path), strict=False):
        prompt = prompt_tokens(record, Scale(scale), 0)
        ends = range(chunk_tokens, len(prompt) + 1, chunk_tokens)
        hits = 0
        for end in ends:
            if prompt[:end] not in seen or end >= len(prompt):
                break
            hits = end
        seen.update(prompt[:end] for end in ends)
        reused.append(hits)
        prompts.append(len(prompt))
    return reused, prompts


def test_a_trace_reuses_what_an_unbounded_cache_would(machine):
    options = ["--trace", TRACE, "--requests", REQUESTS, "--scale", TRACE_SCALE, "--workers", 1]
    options += ["--output-tokens", 2, "--chunk-tokens", CHUNK_TOKENS, "--block-tokens", 4]
    summary, _ = played(machine, *options)
    oracle, prompts = unbounded_reuse(TRACE, TRACE_SCALE, CHUNK_TOKENS)
    assert summary["requests"] == len(prompts)
    assert summary["prompt_tokens"] == sum(prompts)
    reused = sum(summary["reused_tokens"].values())
    assert abs(reused - sum(oracle)) <= CHUNK_TOKENS * len(prompts)
    # What the above allows is much where little is reused; in fact hardly a chunk is lost.
    assert 0.98 * sum(oracle) <= reused <= sum(oracle)
