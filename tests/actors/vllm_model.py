"""What the naive engine of `vllm_engine.py` is made of: requests, blocks, saves, loads, steps."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_yard import HASH_TOKENS, digest

from kvfabric.actors.engines.vllm.asker import Ask, AskState
from kvfabric.actors.engines.vllm.transfers import LoadJob, SaveJob

GARBAGE = "garbage"
STEP_S = 0.02


@dataclass(eq=False)
class Life:
    """A request. `tokens` are all that it will ever have; `num_tokens` of them are known."""

    request_id: str
    tokens: list[int]
    num_tokens: int
    groups: int
    kv_transfer_params: Any = None
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    placeholders: int = 0
    stale: int = 0
    drop_stale: bool = False
    loading: bool = False
    load_over: bool = False
    load_failed: bool = False
    ever_failed: bool = False
    local: int = 0
    over: bool = False
    tables: list[list[int]] = field(default_factory=list)
    values: list[int] = field(default_factory=list)
    """For each token what its KV hangs on: itself and all before it."""
    hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tables = [[] for _ in range(self.groups)]
        value = 0
        for token in self.tokens:
            value = hash((value, token))
            self.values.append(value)
        self.hashes = [digest(each) for each in self.values[HASH_TOKENS - 1 :: HASH_TOKENS]]

    @property
    def block_hashes(self) -> list[bytes]:
        return self.hashes[: self.num_tokens // HASH_TOKENS]

    @property
    def all_sampled(self) -> bool:
        return self.num_tokens + self.placeholders >= len(self.tokens)


class Blocks:
    """vLLM's block pool: references, a prefix cache, and the free ones, longest unused first."""

    def __init__(self, count: int) -> None:
        self.free = deque(range(1, count + 1))
        self.refs = [0] * (count + 1)
        self.named: dict[int, tuple[int, bytes]] = {}
        self.cached: dict[tuple[int, bytes], int] = {}

    def take(self, count: int) -> list[int]:
        found = [self.free.popleft() for _ in range(count)]
        for block in found:
            self.refs[block] = 1
            self.forget(block)
        return found

    def touch(self, block: int) -> None:
        if not self.refs[block]:
            self.free.remove(block)
        self.refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            if block:
                self.refs[block] -= 1
                assert self.refs[block] >= 0
                if not self.refs[block]:
                    self.free.append(block)

    def name(self, block: int, key: tuple[int, bytes]) -> None:
        if block and block not in self.named and key not in self.cached:
            self.named[block], self.cached[key] = key, block

    def forget(self, block: int) -> None:
        if block in self.named:
            del self.cached[self.named.pop(block)]


@dataclass(eq=False)
class Save:
    """A save that some rank still reads, or has not reported."""

    job: SaveJob
    reset: int
    ranks: set[int]
    blocks: set[int]
    cancelled: bool = False


@dataclass(eq=False)
class Load:
    job: LoadJob
    reset: int
    life: Life


@dataclass(eq=False)
class Step:
    """What runs, until its output is looked at."""

    number: int
    scheduled: dict[str, int]
    sampled: set[str] = field(default_factory=set)
    pending: list[tuple[int, int]] = field(default_factory=list)
    tainted: set[str] = field(default_factory=set)
    bad_blocks: set[int] = field(default_factory=set)


class SlowAskers:
    """In the place of `Askers`: the engine's driver decides when and what they answer."""

    driver: Any

    def __init__(self, *_: Any) -> None:
        self.asks: list[Ask] = []
        self.closed = False
        self.driver.askers.append(self)

    def submit(self, ask: Ask) -> Ask:
        assert not self.closed
        self.asks.append(ask)
        if self.driver.rng.random() < 0.05:
            ask.state, ask.origins = AskState.DONE, ("",) * len(ask.keys)
        return ask

    def drop(self, ask: Ask) -> None:
        ask.dropped = True

    def close(self) -> None:
        self.closed = True
