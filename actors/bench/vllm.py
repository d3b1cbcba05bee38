"""`kvfabric bench vllm`: what our connector costs a vLLM engine, beside vLLM's own offloading.

Two engines, alike but for the connector, answer the same prompts in turn: each prompt once cold,
when nothing of it is stored, and once warm, when the engine's own cache was emptied and all of it
is in the host's memory. Counted is the time inside all methods of the connector that the scheduler
calls from the question to the last token, "ask again" included; what vLLM's connector still does
for its files after the last token is left out, in its favour. Both have a tier of files below the
host's memory, so that both must ask it for what the host lacks.
"""

import importlib.util
import os
import socket
import statistics
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...fabric.clock import Clock
from ...fabric.config import PoolConfig, parse
from ...fabric.errors import Refused, Unavailable
from ...tiers.pool.daemon import PoolProcess
from .rows import PAIRS, Row
from .vllm_engines import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    Life,
    VllmEngine,
    cpu_s,
)

REFERENCE = "vLLM OffloadingConnector with its fs tier"
OUTPUT_TOKENS = 32
"""A block's worth: one more block is saved while the request decodes."""
SHORT_TOKENS = 10 * BLOCK_TOKENS + 1
SETTLE_S = 20.0
LOOK_S = 0.01
DROWSE_S = 1.0
"""After its last request an engine is given this long to become idle."""


Four = tuple[Life, Life, Life, Life]
"""Ours cold and warm, theirs cold and warm."""
SPARE_PAIRS = 4
"""For pairs that are disturbed: where others keep the machine busy, a pool may answer too late."""
MEETING, ABSENT, DEAD, DROWSY = 1_000_000, 2_000_000, 3_000_000, 4_000_000
"""First numbers of the prompts of each part."""


class Disturbed(Exception):
    """A pair that does not count."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    blocks: int = 1000
    pairs: int = PAIRS
    glances: int = 50
    """Prompts of which only the lookup is timed, as many cold as warm."""
    dead_tries: int = 2
    """For each kind of dead source and each way to name it."""
    idle_s: float = 10.0
    idle_tries: int = 3

    @property
    def prompt_tokens(self) -> int:
        """So that all blocks can be loaded, and one token is left to compute."""
        return self.blocks * BLOCK_TOKENS + 1

    @property
    def prompts(self) -> int:
        """The warm-up, the pairs, and what may be disturbed."""
        return 1 + self.pairs + SPARE_PAIRS

    @property
    def host_bytes(self) -> int:
        """Room for all that the benchmark stores, so that nothing is evicted."""
        return (self.prompts + 1) * (self.blocks + 2) * BLOCK_BYTES + (1 << 20)


def bench_vllm(clock: Clock, sizes: Sizes | None = None) -> Sequence[Row]:
    """Return the rows of this benchmark. Takes about 5 min."""
    if importlib.util.find_spec("vllm") is None:
        raise Refused(
            "vllm",
            "is not installed here",
            "`make vllm`, then `.venv-vllm/bin/kvfabric bench vllm`.",
        )
    sizes = sizes or Sizes()
    with tempfile.TemporaryDirectory(prefix="kvfabric-bench-") as folder, ExitStack() as stack:
        place = Path(folder)
        pool = stack.enter_context(PoolProcess(_config(place, sizes)))
        rows = _busy(clock, place, pool, sizes)
        rows.append(_idle(clock, place, pool, sizes))
    return rows


def _config(folder: Path, sizes: Sizes) -> PoolConfig:
    slot_bytes = -(-BLOCK_BYTES // 4096) * 4096
    return parse(
        PoolConfig,
        {
            "node": "bench",
            "run": f"bench-{os.getpid()}",
            "host": {
                "slot_bytes": slot_bytes,
                "region_bytes": sizes.host_bytes // slot_bytes * slot_bytes,
            },
            "tiers": [
                {
                    "type": "fs",
                    "root_dir": str(folder / "ours"),
                    "quota_bytes": 4 * sizes.host_bytes,
                }
            ],
        },
    )


def _our_transfer(pool: PoolProcess) -> Mapping[str, Any]:
    return {
        "kv_connector": "KVFabricConnector",
        "kv_connector_module_path": "kvfabric.actors.engines.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"pool": pool.addresses.client},
    }


def _their_transfer(folder: Path, engine_id: str, sizes: Sizes) -> Mapping[str, Any]:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "engine_id": engine_id,
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "kvfabric.actors.bench.vllm_offload",
            "cpu_bytes_to_use": sizes.host_bytes,
            "secondary_tiers": [{"type": "fs", "root_dir": str(folder / "theirs")}],
        },
    }


@contextmanager
def _their_region(engine_id: str) -> Generator[None]:
    """Remove the region that vLLM's engine leaves when it is killed."""
    try:
        yield
    finally:
        for path in Path("/dev/shm").glob(f"vllm_offload_{engine_id}*.mmap"):
            path.unlink(missing_ok=True)


def _busy(clock: Clock, folder: Path, pool: PoolProcess, sizes: Sizes) -> list[Row]:
    engine_id = f"kvfabric-bench-{os.getpid()}"
    with (
        _their_region(engine_id),
        VllmEngine(folder, "our-engine", sizes.blocks, _our_transfer(pool)) as ours,
        VllmEngine(
            folder, "their-engine", sizes.blocks, _their_transfer(folder, engine_id, sizes)
        ) as theirs,
    ):
        ours.wait_ready()
        theirs.wait_ready()
        _meet(clock, ours, pool)
        lives = _pairs(clock, ours, theirs, pool, sizes)
        rows = scheduler_rows(lives, sizes)
        lookups = [s for four in lives for each in four[:2] for s in each.lookups]
        rows += _lookup_rows(clock, ours, pool, lookups, sizes)
        rows.append(_dead_source(ours, sizes))
    return rows


def _meet(clock: Clock, engine: VllmEngine, pool: PoolProcess) -> None:
    """Ask short prompts until one is stored: on a busy machine an engine may attach late."""
    deadline_s = clock.now_s() + SETTLE_S
    number = MEETING
    while not pool.stats()["ready"]:
        if clock.now_s() > deadline_s:
            raise Unavailable("our engine", SETTLE_S, "It stores nothing in its pool.")
        engine.generate(number, SHORT_TOKENS, 1)
        clock.sleep_s(LOOK_S)
        number += 1


def _pairs(
    clock: Clock, ours: VllmEngine, theirs: VllmEngine, pool: PoolProcess, sizes: Sizes
) -> list[Four]:
    """Run both in turn. The first pair warms up; one that was disturbed is not counted."""
    lives: list[Four] = []
    problem = ""
    for number in range(sizes.prompts):
        try:
            here = _cold_and_warm(clock, ours, number, sizes, pool)
            there = _cold_and_warm(clock, theirs, number, sizes, None)
        except Disturbed as error:
            problem = str(error)
            continue
        if number:
            lives.append((*here, *there))
        if len(lives) == sizes.pairs:
            return lives
    raise Refused(
        "the machine", f"only {len(lives)} pairs were undisturbed; {problem}", "Free it, try again"
    )


def _cold_and_warm(
    clock: Clock, engine: VllmEngine, number: int, sizes: Sizes, pool: PoolProcess | None
) -> tuple[Life, Life]:
    """Answer a prompt twice; the second time everything comes from the host's memory."""
    there = pool.stats()["ready"] if pool is not None else 0
    engine.forget()
    cold = engine.generate(number, sizes.prompt_tokens, OUTPUT_TOKENS)
    engine.settle()
    if pool is not None:
        _settle_pool(clock, pool, there + sizes.blocks)
    engine.forget()
    warm = engine.generate(number, sizes.prompt_tokens, OUTPUT_TOKENS)
    engine.settle()
    if cold.cached != 0 or warm.cached != sizes.blocks * BLOCK_TOKENS:
        raise Disturbed(f"of prompt {number} {cold.cached} tokens hit cold, {warm.cached} warm")
    return cold, warm


def _settle_pool(clock: Clock, pool: PoolProcess, chunks: float) -> None:
    """Wait until so many chunks are stored, in files too."""
    deadline_s = clock.now_s() + SETTLE_S
    while (stats := pool.stats())["ready"] < chunks or stats["writing"] or stats["pinned"]:
        if clock.now_s() > deadline_s:
            raise Disturbed(f"the pool has {stats['ready']:g} of {chunks:g} chunks")
        clock.sleep_s(LOOK_S)


def scheduler_rows(lives: Sequence[Four], sizes: Sizes) -> list[Row]:
    """Return medians of ours, and of the ratios of neighbouring runs."""
    spent = np.array([[life.hook_s for life in four] for four in lives]) * 1e3
    cold, warm, their_cold, their_warm = spent.T
    name = f"scheduler_cost_{sizes.blocks}_blocks"

    def row(metric: str, ours: Any, theirs: Any) -> Row:
        ratio = statistics.median((theirs / ours).tolist())
        return Row("vllm", metric, statistics.median(ours.tolist()), "ms", REFERENCE, ratio)

    return [
        row(name, cold + warm, their_cold + their_warm),
        row(f"{name}_cold", cold, their_cold),
        row(f"{name}_warm", warm, their_warm),
    ]


def _lookup_rows(
    clock: Clock, ours: VllmEngine, pool: PoolProcess, lookups: list[float], sizes: Sizes
) -> list[Row]:
    """Time more lookups, of prompts that are not there and of one that is."""
    tokens = sizes.prompt_tokens
    for each in range(sizes.glances):
        ours.forget()
        warm = ours.generate(0, tokens, 1)
        if warm.cached == tokens - 1:  # else a load failed, and the last answer is no lookup
            lookups += warm.lookups
        ours.settle()
        ours.forget()
        lookups += ours.glance(ABSENT + each, tokens).lookups
        _settle_pool(clock, pool, 0)
    p50_us, p99_us = (float(np.percentile(lookups, at)) * 1e6 for at in (50, 99))
    return [
        Row("vllm", "lookup_answer_p50_us", p50_us, "us", "none", None),
        Row("vllm", "lookup_answer_p99_us", p99_us, "us", "none", None),
    ]


def _dead_source(ours: VllmEngine, sizes: Sizes) -> Row:
    """The worst of all tries, over the median of the same requests without a source."""
    number = DEAD
    plain: list[float] = []
    dead: list[float] = []
    for _ in range(sizes.dead_tries):
        for way in ("remote_prefiller", "remote_kv_source"):
            for silent in (False, True):
                # A source that was found dead is not asked for a while, so each is a new one.
                with socket.socket() as listener:
                    listener.bind(("127.0.0.1", 0))
                    if silent:
                        listener.listen()
                    host, port = listener.getsockname()
                    source = {way: {"remote_host": host, "remote_port": port}}
                    plain.append(ours.generate(number, SHORT_TOKENS, 1).seconds)
                    dead.append(ours.generate(number + 1, SHORT_TOKENS, 1, source).seconds)
                number += 2
    extra_s = max(dead) - statistics.median(plain)
    return Row("vllm", "dead_source_cost_s", extra_s, "s", "none", None)


def _idle(clock: Clock, folder: Path, pool: PoolProcess, sizes: Sizes) -> Row:
    """CPU of an engine and its pool, over that of a plain engine in the same seconds."""
    blocks = 64
    with (
        VllmEngine(folder, "idle", blocks, _our_transfer(pool), core_apart=True) as ours,
        VllmEngine(folder, "plain", blocks, None, core_apart=True) as plain,
    ):
        for engine in (ours, plain):
            engine.wait_ready()
            engine.generate(DROWSY, SHORT_TOKENS, OUTPUT_TOKENS)
        clock.sleep_s(DROWSE_S)
        percents: list[float] = []
        for _ in range(sizes.idle_tries):
            begun_s, before = clock.now_s(), (cpu_s([ours.pid, pool.pid]), cpu_s([plain.pid]))
            clock.sleep_s(sizes.idle_s)
            after = (cpu_s([ours.pid, pool.pid]), cpu_s([plain.pid]))
            extra_s = (after[0] - before[0]) - (after[1] - before[1])
            percents.append(100 * extra_s / (clock.now_s() - begun_s))
    value = statistics.median(percents)
    return Row("vllm", "idle_cpu_percent", value, "% of a core over a plain engine", "none", None)
