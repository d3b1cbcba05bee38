"""What a run of the demo is asked to do."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...fabric.config import PoolConfig, parse
from ...fabric.errors import ConfigError
from ...fabric.layout import GroupLayout
from ...kernels.reference.config import DTYPE_BYTES, ModelConfig
from ...kernels.reference.engine import PREFILL_TOKENS
from ...tiers.pool.opening import geometry
from ..engines.reference import EngineSettings
from . import defaults
from .workload import MultiTurnWorkload, TraceWorkload, Workload, longest_tokens

PREFILL_NODE, DECODE_NODE = "node-a", "node-b"
REGION_SHARE = 0.6
"""Of the conversations' KV: too little on purpose, so that the file tier has its part."""
REGION_SHARE_WITHOUT_FILES = 1.5
"""Of the same: all of it, and what decoding adds."""
FILES_SHARE = 4.0
"""Of the same, for files."""
OUTPUT_TOKENS = 768
"""Before scaling. With the defaults an answer is then longer than a chunk, so that a whole chunk of
it is stored where it was decoded, and the next turn's prefill pulls it from there."""
REGION_CHUNKS_MIN = 64
"""So that a short run still has room for a request or two."""

COUNTS = (
    "requests",
    "conversations",
    "turns",
    "output_tokens_max",
    "prefill_workers",
    "decode_workers",
    "chunk_tokens",
    "block_tokens",
)


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The command's options, checked."""

    trace: Path | None = None
    scale: float = defaults.SCALE
    requests: int = defaults.TRACE_REQUESTS
    """Of a trace; the generator makes `conversations` times `turns`."""
    conversations: int = defaults.CONVERSATIONS
    turns: int = defaults.TURNS
    output_tokens_max: int = defaults.OUTPUT_TOKENS_MAX
    prefill_workers: int = defaults.WORKERS
    """On each prefill node."""
    decode_workers: int = defaults.WORKERS
    """On each decode node."""
    prefill_nodes: tuple[str, ...] = (PREFILL_NODE,)
    decode_nodes: tuple[str, ...] = (DECODE_NODE,)
    """May be the same as the prefill nodes."""
    chunk_tokens: int = defaults.CHUNK_TOKENS
    block_tokens: int = defaults.BLOCK_TOKENS
    seed: int = 0
    kill: bool = False
    region_bytes: int | None = None
    """Of each pool; by default a share of what the conversations need."""

    def __post_init__(self) -> None:
        for name in COUNTS:
            if getattr(self, name) < 1:
                raise ConfigError(name, f"is {getattr(self, name)}", "Give a number above 0")
        if self.region_bytes == 0:
            raise ConfigError("region_bytes", "is 0", "Give a number above 0, or leave it out")
        if self.chunk_tokens % self.block_tokens:
            raise ConfigError(
                "chunk_tokens",
                f"{self.chunk_tokens} is not a multiple of block_tokens {self.block_tokens}",
                "Give a multiple",
            )
        if PREFILL_TOKENS % self.block_tokens:
            raise ConfigError(
                "block_tokens",
                f"{self.block_tokens} does not divide {PREFILL_TOKENS}, the engine's prefill piece",
                f"Give one that divides {PREFILL_TOKENS}",
            )

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that get a pool."""
        return tuple(dict.fromkeys((*self.prefill_nodes, *self.decode_nodes)))

    def roles(self) -> dict[str, str]:
        """Return, by node, what runs there, for people."""
        kinds = (
            (self.prefill_nodes, f"{self.prefill_workers} prefill"),
            (self.decode_nodes, f"{self.decode_workers} decode"),
        )
        return {
            node: ", ".join(text for nodes, text in kinds if node in nodes) for node in self.nodes
        }

    def workload(self) -> Workload:
        """Return the source of requests. Raises `ConfigError`."""
        if self.trace is not None:
            return TraceWorkload(self.trace, self.scale, self.requests, self.seed)
        return MultiTurnWorkload(
            self.conversations,
            self.scale,
            self.turns,
            output_tokens=OUTPUT_TOKENS,
            seed=self.seed,
        )

    def settings(self, longest: int) -> EngineSettings:
        """Return what every worker needs to hold the longest request."""
        if longest == 0:
            raise ConfigError("trace", f"{self.trace} has no requests", "Name another file")
        rounded = -(-longest // self.chunk_tokens) * self.chunk_tokens
        model = ModelConfig(max_len=rounded, seed=self.seed)
        blocks = 2 * rounded // self.block_tokens
        return EngineSettings(model, self.chunk_tokens, self.block_tokens, blocks)

    def pools(
        self,
        run: str,
        settings: EngineSettings,
        files: Path | None,
        listen: Mapping[str, str] | None = None,
    ) -> list[PoolConfig]:
        """Return the pools' configurations. Raises `ConfigError`.

        Without a folder for files there is no file tier, and a region holds everything. `listen`
        says on which address a node's pool is reached; by default on loopback.
        """
        slot_bytes = -(-chunk_bytes(settings) // 4096) * 4096
        sizes = working_set_tokens(self.workload()) // self.chunk_tokens * slot_bytes
        smallest = REGION_CHUNKS_MIN * slot_bytes
        share = REGION_SHARE if files else REGION_SHARE_WITHOUT_FILES
        region = self.region_bytes or max(int(sizes * share), smallest)
        quota = max(int(sizes * FILES_SHARE), 2 * smallest)
        configs: list[PoolConfig] = []
        for node in self.nodes:
            host = f"tcp://{(listen or {}).get(node, '127.0.0.1')}:*"
            values: dict[str, Any] = {
                "node": node,
                "run": run,
                "host": {"slot_bytes": slot_bytes, "region_bytes": region},
                "peers": {"listen": host},
                "events": {"publish": host, "replay": host},
            }
            if files:
                tier = {"type": "fs", "root_dir": str(files / node), "quota_bytes": quota}
                values["tiers"] = [tier]
            configs.append(parse(PoolConfig, values))
        # Said here, before a cluster is started for it.
        geometry(configs[0].host)
        return configs


def chunk_bytes(settings: EngineSettings) -> int:
    """Return how long a chunk of this model is."""
    model = settings.model
    element_bytes = DTYPE_BYTES[model.dtype]
    return GroupLayout.dense(
        model.layers, model.kv_heads, model.head_dim, element_bytes, settings.chunk_tokens
    ).chunk_bytes


def working_set_tokens(workload: Workload) -> int:
    """Return the tokens of all conversations at their longest, shared parts counted each time."""
    return sum(len(r.new_tokens) + r.output_tokens for r in workload.requests())


def longest_request(workload: Workload) -> int:
    """Return the most tokens that a request reaches. Raises what reading the workload raises."""
    return longest_tokens(workload.requests())
