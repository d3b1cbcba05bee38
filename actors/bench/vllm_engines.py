"""Engines of vLLM for a benchmark, each in processes of its own, and the tiny model they run.

The model is as small as vLLM allows, so that a prompt of 1,000 blocks takes seconds on one core;
the scheduler and what it does for each block are the same for any model.
"""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ...fabric.errors import Refused, Unavailable

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
BLOCK_TOKENS = 32
"""The smallest that vLLM has on a CPU."""
BLOCK_BYTES = 2 * 4 * 32 * BLOCK_TOKENS
"""K and V, four bytes each of 32 numbers."""
BATCH_TOKENS = 8192
"""Tokens of a step at most: vLLM's default for a server on large GPUs."""
OUTPUT_TOKENS_MAX = 64
START_S = 180.0
"""Importing vLLM took up to 20 s on a busy machine, and several processes of an engine do it."""
ANSWER_S = 120.0
END_S = 20.0
TAIL_CHARACTERS = 600


@dataclass(frozen=True, slots=True)
class Life:
    """What one request took. Seconds."""

    seconds: float
    """From the question to the answer."""
    cached: int
    """Prompt tokens that were not computed."""
    hooks: Mapping[str, list[float]]
    """Each call of the scheduler to its connector, by the method's name."""
    lookups: list[float]
    """Each lookup that was the request's first or an answer, without "ask again" repeated."""

    @property
    def hook_s(self) -> float:
        """All that the scheduler waited for its connector."""
        return sum(sum(calls) for calls in self.hooks.values())


def write_model(folder: Path, tokens_max: int) -> Path:
    """Write a model's folder; its weights are vLLM's to invent."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": 512,
        "max_position_embeddings": tokens_max,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class VllmEngine:
    """One engine. A context manager: nothing of it is left behind.

    Raises `Refused` if it does not start, `Unavailable` if it does not answer.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        blocks: int,
        transfer: Mapping[str, Any] | None,
        *,
        core_apart: bool = False,
    ) -> None:
        self._name = name
        self._log = folder / f"{name}.log"
        tokens_max = blocks * BLOCK_TOKENS + 2 * BLOCK_TOKENS + OUTPUT_TOKENS_MAX
        model = write_model(folder / name, tokens_max)
        package_parent = str(Path(__file__).parents[3])
        path = os.pathsep.join(filter(None, (package_parent, os.environ.get("PYTHONPATH"))))
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvfabric.actors.bench.vllm_child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path},
                start_new_session=True,  # to end all its processes, should it not end by itself
            )
        options = {
            "core_apart": core_apart,
            "engine": {
                "model": str(model),
                "load_format": "dummy",
                "skip_tokenizer_init": True,
                "dtype": "float32",
                "seed": 0,
                "enforce_eager": True,
                "enable_prefix_caching": True,
                "kv_cache_memory_bytes": 2 * blocks * BLOCK_BYTES + (1 << 20),
                "block_size": BLOCK_TOKENS,
                "max_model_len": tokens_max,
                "max_num_seqs": 4,
                "max_num_batched_tokens": BATCH_TOKENS,
                "kv_transfer_config": transfer and dict(transfer),
            },
        }
        self._tell(options)

    def wait_ready(self) -> Self:
        """Wait until the engine runs; several may be started before one is waited for."""
        self._hear(START_S)
        return self

    @property
    def pid(self) -> int:
        """The process that started all others of this engine."""
        return self._process.pid

    def generate(
        self, number: int, length: int, tokens: int, transfer: Mapping[str, Any] | None = None
    ) -> Life:
        """Answer the prompt of this number, so many tokens long, with so many tokens."""
        return Life(
            **self._ask("generate", number=number, length=length, tokens=tokens, transfer=transfer)
        )

    def glance(self, number: int, length: int) -> Life:
        """Let the scheduler look at a prompt once, and abort it."""
        return Life(**self._ask("glance", number=number, length=length))

    def settle(self) -> None:
        """Wait until the engine has nothing left to do."""
        self._ask("settle")

    def forget(self) -> None:
        """Empty the engine's own cache, so that the next lookup is the connector's."""
        if not self._ask("forget")["done"]:
            raise Unavailable(self._name, 0.0, "It did not empty its cache: blocks are in use.")

    def close(self) -> None:
        """End it. Safe to call twice."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, what: str, **values: Any) -> dict[str, Any]:
        self._tell({"do": what, **values})
        return self._hear(ANSWER_S)

    def _tell(self, what: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # then there is no answer either
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()

    def _hear(self, wait_s: float) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], wait_s)[0]:
            raise Unavailable(self._name, wait_s, self._said())
        line = stdout.readline()
        if not line:
            raise Refused(self._name, f"it ended: {self._said()}", "Is .venv-vllm whole?")
        return json.loads(line)

    def _said(self) -> str:
        tail = self._log.read_text(errors="replace")[-TAIL_CHARACTERS:]
        return f"It said last: {tail.strip()}" if tail.strip() else "It said nothing."


def cpu_s(roots: list[int]) -> float:
    """Return the CPU seconds that these processes and all below them have used."""
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile
            fields = stat.read_text().rpartition(")")[2].split()
            pid = int(stat.parent.name)
            parents[pid] = int(fields[1])
            used[pid] = (int(fields[11]) + int(fields[12])) * tick_s
    inside = set(roots)
    while more := {pid for pid, parent in parents.items() if parent in inside} - inside:
        inside |= more
    return sum(used.get(pid, 0.0) for pid in inside)
