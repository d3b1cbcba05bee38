"""A laboratory: tiny models, real vLLM engines on the CPU, and pools in processes of their own.

Loaded by `conftest.py`, and by `lab_child.py` for an engine in a process of its own. vLLM is
imported by the first engine, so that this file can be read where vLLM is not installed.

An engine lives in the process that makes it, scheduler and worker in one thread: what a test looks
at is what the engine did. vLLM keeps its groups of ranks and its connector once per process, and an
engine that ends takes them along: of two engines that are alive at once one is a `ChildEngine`.
"""

import gc
import importlib.util
import json
import mmap
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, Self

from kvfabric.fabric.clock import SystemClock
from kvfabric.fabric.config import PoolConfig, parse
from kvfabric.tiers.pool.daemon import PoolProcess

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
"""One thread for each engine: these models are too small for two, and two engines would fight."""
KV_BYTES = 64 << 20
SLOT_BYTES = 128 << 10
"""A chunk of 128 tokens of one cache group of either model, the largest here."""
SLOTS = 512
LOOK_S = 0.01
CHILD_S = 60.0
"""For any answer of an engine in a child: importing vLLM takes 20 s on a busy machine."""
CLOCK = SystemClock()
RUNS = count()

Tokens = list[int]


def beside(name: str) -> Any:
    """Make a helper beside this file importable by its name, and return it."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


models = beside("lab_models")
PLAIN, HYBRID, make_model = models.PLAIN, models.HYBRID, models.make_model


def until(condition: Callable[[], Any], within_s: float = 5.0, what: str = "") -> Any:
    """Look until the condition is true and return what it said; fail when the time is over."""
    deadline_s = CLOCK.now_s() + within_s
    while not (said := condition()):
        assert CLOCK.now_s() < deadline_s, f"not within {within_s:g} s: {what or condition}"
        CLOCK.sleep_s(LOOK_S)
    return said


def prompt(number: int, length: int, shared: int = 0) -> Tokens:
    """Return a prompt of random tokens; prompts agree in their first `shared` tokens."""
    head, tail = random.Random("shared"), random.Random(number)
    last = models.VOCABULARY - 10
    return [(head if at < shared else tail).randrange(10, last) for at in range(length)]


def whole(tokens: int, step: int) -> int:
    """Return how many of the tokens are whole steps: what a prefix of them can give."""
    return tokens - tokens % step


# Engines


def on_pool(endpoint: str, **settings: Any) -> dict[str, Any]:
    """Return vLLM's `kv_transfer_config` for an engine on this pool."""
    return {
        "kv_connector": "KVFabricConnector",
        "kv_connector_module_path": "kvfabric.actors.engines.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"pool": endpoint, **settings},
    }


@dataclass(frozen=True)
class Hits:
    """vLLM's own count of prompt tokens: asked of the connector, and not computed thanks to it."""

    asked: int
    hit: int

    def __sub__(self, before: "Hits") -> "Hits":
        return Hits(self.asked - before.asked, self.hit - before.hit)


@dataclass(frozen=True)
class EngineOptions:
    """What an engine is made of. `transfer` is vLLM's `kv_transfer_config`; None: a plain engine.

    `blocks` makes the engine's own cache small, so that it evicts. `order` is a cache layout of
    vLLM: then attention is that of `plain_attention`, for good in this process.
    """

    model: str
    transfer: Mapping[str, Any] | None = None
    block_tokens: int = 32
    blocks: int | None = None
    model_tokens_max: int = 1024
    requests_max: int = 8
    order: str | None = None
    hash_tokens: int | None = None
    """Length of a block hash: vLLM lets a model of several cache groups choose it."""
    kv_events: bool = False

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of `vllm.LLM`."""
        return {
            "model": self.model,
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "seed": 0,
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            "kv_cache_memory_bytes": KV_BYTES,
            "block_size": self.block_tokens,
            "num_gpu_blocks_override": self.blocks,
            "max_model_len": self.model_tokens_max,
            "max_num_seqs": self.requests_max,
            "prefix_match_unit": self.hash_tokens,
            "kv_transfer_config": self.transfer and dict(self.transfer),
            "kv_events_config": {"enable_kv_cache_events": self.kv_events, "publisher": "null"},
        }


class Engine:
    """A vLLM engine in this process. Use as a context manager: nothing of it is left behind."""

    alive = False
    """Whether this process has one."""

    def __init__(self, options: EngineOptions) -> None:
        assert not Engine.alive, "vLLM has one engine in a process; the second is a ChildEngine"
        os.environ.update(ENVIRONMENT)
        if options.order is not None:
            os.environ["VLLM_KV_CACHE_LAYOUT"] = options.order
            beside("plain_attention").install()
        from vllm import LLM

        self.options = options
        self.llm: Any = LLM(**options.arguments())
        Engine.alive = True

    def generate(
        self,
        prompts: Sequence[Tokens],
        tokens: int = 16,
        transfer: Mapping[str, Any] | None = None,
    ) -> list[Tokens]:
        """Generate greedily for all prompts at once. `transfer` is their `kv_transfer_params`."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        outputs = self.llm.generate(
            [TokensPrompt(prompt_token_ids=list(each)) for each in prompts],
            SamplingParams(
                temperature=0,
                max_tokens=tokens,
                ignore_eos=True,
                detokenize=False,
                extra_args={"kv_transfer_params": dict(transfer)} if transfer else None,
            ),
            use_tqdm=False,
        )
        self.handed = [output.kv_transfer_params for output in outputs]
        self.settle()
        return [list(output.outputs[0].token_ids) for output in outputs]

    def settle(self) -> None:
        """Take the step after the last request, as a server's loop does; `vllm.LLM` leaves it out.

        Until then the engine has not told its workers that a request is over.
        """
        core = self.llm.llm_engine.engine_core.engine_core
        if core.scheduler.has_requests():
            core.step()

    def hits(self) -> Hits:
        """Return vLLM's counts of the connector's prefix hits, since this engine began."""
        found = {metric.name: getattr(metric, "value", 0) for metric in self.llm.get_metrics()}
        return Hits(
            int(found.get("vllm:external_prefix_cache_queries", 0)),
            int(found.get("vllm:external_prefix_cache_hits", 0)),
        )

    def local_hits(self) -> int:
        """Return vLLM's count of prompt tokens that its own cache had, since this engine began."""
        found = {metric.name: getattr(metric, "value", 0) for metric in self.llm.get_metrics()}
        return int(found.get("vllm:prefix_cache_hits", 0))

    def count(self, name: str) -> int:
        """Return one of vLLM's counters, since this engine began."""
        return sum(int(m.value) for m in self.llm.get_metrics() if m.name == f"vllm:{name}")

    def abort_after(self, prompts: Sequence[Tokens], steps: int) -> None:
        """Begin to generate, abort everything after so many steps, and let the engine run dry."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        engine = self.llm.llm_engine
        names = [f"aborted-{next(RUNS)}" for _ in prompts]
        for name, each in zip(names, prompts, strict=True):
            params = SamplingParams(temperature=0, max_tokens=16, detokenize=False)
            engine.add_request(name, TokensPrompt(prompt_token_ids=list(each)), params)
        for _ in range(steps):
            engine.step()
        engine.abort_request(names)
        until(lambda: engine.step() == [] and not engine.has_unfinished_requests())

    def forget(self, *, connector: bool = False) -> bool:
        """Empty the engine's cache, and with `connector` what the fabric has for it."""
        return bool(self.llm.reset_prefix_cache(reset_connector=connector))

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @classmethod
    def tidy(cls) -> None:
        """Remove what vLLM keeps in this process of an engine that did not come up."""
        from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()

    def close(self) -> None:
        """End the engine and give its memory back. Safe to call twice."""
        if self.llm is None:
            return
        llm, self.llm = self.llm, None
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        Engine.alive = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ChildEngine:
    """An engine in a process of its own, which may be killed. Answers in order of the questions."""

    def __init__(self, options: EngineOptions) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("lab_child.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._tell(asdict(options))

    def wait_ready(self) -> Self:
        """Wait until the engine runs."""
        assert self.hear() == "ready"
        return self

    def generate(
        self, prompts: Sequence[Tokens], tokens: int = 16, transfer: Mapping[str, Any] | None = None
    ) -> list[Tokens]:
        """As `Engine.generate`."""
        self.begin(prompts, tokens, transfer)
        answer = self.hear()
        self.handed = answer["handed"]
        return answer["tokens"]

    def begin(
        self, prompts: Sequence[Tokens], tokens: int = 16, transfer: Mapping[str, Any] | None = None
    ) -> None:
        """Begin to generate; `hear` returns the answer."""
        self._tell({"do": "generate", "prompts": prompts, "tokens": tokens, "transfer": transfer})

    def hits(self) -> Hits:
        """As `Engine.hits`."""
        self._tell({"do": "hits"})
        return Hits(**self.hear())

    def hear(self) -> Any:
        """Return the next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the engine in a child ended with {self.process.wait()}"
        return json.loads(line)

    def kill(self) -> None:
        """End it with SIGKILL."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Let it end in order; past a deadline it is killed. Safe to call twice."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(CHILD_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self.process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tell(self, what: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()


@dataclass(frozen=True)
class ConnectorBooks:
    """What an engine's connector still knows when nothing is asked of it."""

    requests: int
    saves: int

    @property
    def unfinished(self) -> bool:
        """Whether anything is left."""
        return bool(self.requests or self.saves)


def connector_of(engine: Engine) -> ConnectorBooks:
    """Look into the connector of an engine of this process."""
    side = engine.scheduler.connector._scheduler
    return ConnectorBooks(len(side._requests), len(side._fence))


# Pools


class Pools:
    """Pools in processes, and their files. Everything ends with `close`."""

    def __init__(self) -> None:
        self.run = f"v{os.getpid()}-{next(RUNS)}"
        self._pools: list[PoolProcess] = []

    def config(self, node: str = "a", slots: int = SLOTS, **parts: Any) -> PoolConfig:
        """Return a configuration; `parts` are those of `PoolConfig`."""
        host = {"slot_bytes": SLOT_BYTES, "region_bytes": slots * SLOT_BYTES}
        values = {"node": node, "run": self.run, "peers": {"transport": "none"}} | parts
        return parse(PoolConfig, values | {"host": host | parts.get("host", {})})

    def start(self, config: PoolConfig | None = None, **parts: Any) -> PoolProcess:
        """Start a pool. One of the same node finds what a killed one left."""
        pool = PoolProcess(config or self.config(**parts))
        self._pools.append(pool)
        return pool

    def segment(self, node: str = "a") -> Path:
        """Return the file that holds a pool's chunks."""
        return Path(f"/dev/shm/kvfabric-{self.run}-{node}.seg0")

    def corrupt(self, node: str = "a") -> None:
        """Change every chunk of a pool behind its back."""
        with mmap.mmap(os.open(self.segment(node), os.O_RDWR), 0) as region:
            for at in range(0, len(region), SLOT_BYTES):
                region[at + 100] ^= 0x40

    def freeze(self, pool: PoolProcess) -> None:
        """Stop a pool's process where it is."""
        os.kill(pool.pid, signal.SIGSTOP)

    def close(self) -> None:
        """End all pools and remove their files."""
        while self._pools:
            self._pools.pop().stop()
        for path in Path("/dev/shm").glob(f"kvfabric-{self.run}-*"):
            path.unlink(missing_ok=True)


def settled(pool: PoolProcess, at_least: int = 1) -> dict[str, float]:
    """Wait until so many chunks are in the pool and nobody writes any; return its figures."""

    def look() -> dict[str, float] | None:
        stats = pool.stats()
        return stats if stats["ready"] >= at_least and not stats["writing"] else None

    return until(look, what=f"{at_least} chunks in the pool")
