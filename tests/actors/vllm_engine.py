"""A naive engine: a model of vLLM's scheduler, its caches and its workers, driven by a seed.

Loaded by `conftest.py`. It does to the connector's scheduler half what vLLM does, one step after
the other: local prefixes, chunked prefill, steps in flight, windows whose blocks are freed,
preemption, loads that fail, aborts, resets. What a block holds is written down token by token, so
that every copy can be compared with what it should be. `vllm_steps.py` has the steps.
"""

from collections import deque
from collections.abc import Sequence
from math import ceil, lcm
from random import Random
from typing import Any

from vllm_model import GARBAGE, Blocks, Life, Load, Save, SlowAskers, Step
from vllm_yard import HASH_TOKENS, DictPool, geometry

from kvfabric.actors.engines.vllm.prefix import EngineGroup
from kvfabric.actors.engines.vllm.scheduler import SchedulerSide
from kvfabric.actors.engines.vllm.settings import ConnectorSettings
from kvfabric.actors.engines.vllm.transfers import StepPlan, WorkerReport


class Engine:
    """The state of an engine, and the hooks in vLLM's order."""

    def __init__(
        self, rng: Random, clock: Any, groups: Sequence[EngineGroup], *, size: int, load: str
    ) -> None:
        self.rng, self.clock, self.groups, self.size = rng, clock, groups, size
        self.is_async = load == "async"
        self.depth = rng.choice([1, 2]) if self.is_async else 1
        self.unit = lcm(*(group.block_tokens for group in groups))
        self.blocks = Blocks(rng.choice([40, 60, 90]) * len(groups))
        self.content: dict[int, list[Any]] = {}
        self.epoch = 0
        self.truth: dict[bytes, list[int]] = {}
        self.waiting: list[Life] = []
        self.running: list[Life] = []
        self.lives: dict[str, Life] = {}
        self.saves: dict[int, Save] = {}
        self.queues: list[deque[Save]] = [deque() for _ in range(size)]
        self.loads: list[Load] = []
        self.reports = WorkerReport()
        self.steps: deque[Step] = deque()
        self.deferred: list[tuple[int, list[int]]] = []
        self.step_number = 0
        self.askers: list[SlowAskers] = []
        SlowAskers.driver = self
        self.pool = DictPool(media=("fs",) if rng.random() < 0.7 else ())
        self.lower: dict[tuple[int, bytes], Any] = {}
        self.counts: dict[str, int] = dict.fromkeys(
            ("saved", "loaded", "failed", "preempted", "finished", "reset", "cancelled"), 0
        )
        self.cache = geometry(*groups, size=size)
        self.side = SchedulerSide(
            ConnectorSettings(pool="ipc:///pool", load=load, load_wait_s=0.3),
            self.cache,
            HASH_TOKENS,
            self.pool.attach,
            clock,
        )
        self.side.open()

    # What is where.

    def expected(self, group: int, values: Sequence[int], at: int) -> Any:
        return group, self.epoch, values[at]

    def write(self, block: int, offset: int, what: Any) -> None:
        assert block, "a token has no place"
        for save in self.saves.values():
            assert save.cancelled or not save.ranks or block not in save.blocks, (
                f"block {block} is overwritten while save {save.job.job} reads it"
            )
        self.content.setdefault(block, [GARBAGE] * 64)[offset] = what

    def read(self, group: EngineGroup, blocks: Sequence[int]) -> list[Any]:
        return [
            self.content.get(block, [GARBAGE] * 64)[offset]
            for block in blocks
            for offset in range(group.block_tokens)
        ]

    # Blocks of requests.

    def local_hit(self, life: Life) -> tuple[int, list[list[int]]]:
        """Return the longest cached prefix, and its blocks."""
        for tokens in range((life.num_tokens - 1) // self.unit * self.unit, 0, -self.unit):
            tables = [self._cached(group, life, tokens) for group in self.groups]
            if all(table is not None for table in tables):
                return tokens, [table for table in tables if table is not None]
        return 0, [[] for _ in self.groups]

    def _cached(self, group: EngineGroup, life: Life, tokens: int) -> list[int] | None:
        table: list[int] = []
        for index in range(tokens // group.block_tokens):
            block = self.blocks.cached.get(self._name(group, life, index))
            if index < self._skipped(group, tokens):
                block = 0
            if block is None:
                return None
            table.append(block)
        return table

    def _name(self, group: EngineGroup, life: Life, index: int) -> tuple[int, bytes]:
        each = group.block_tokens // HASH_TOKENS
        return group.engine_group, life.hashes[(index + 1) * each - 1]

    def _skipped(self, group: EngineGroup, tokens: int) -> int:
        window = group.layout.window_tokens
        return 0 if window is None else max(0, tokens - window + 1) // group.block_tokens

    def skip(self, life: Life) -> None:
        """Free the blocks that left their window, for good."""
        seen = max(0, life.num_computed_tokens - life.num_in_flight_tokens)
        for group, table in zip(self.groups, life.tables, strict=True):
            gone = min(self._skipped(group, seen), len(table))
            self.blocks.release(table[:gone])
            table[:gone] = [0] * gone

    def grow(self, life: Life, tokens: int) -> list[list[int]] | None:
        """Give a request room for so many tokens; return the new blocks, or None for no room."""
        missing = [
            max(0, ceil(tokens / group.block_tokens) - len(table))
            for group, table in zip(self.groups, life.tables, strict=True)
        ]
        if sum(missing) > len(self.blocks.free):
            return None
        added = [self.blocks.take(count) for count in missing]
        for table, new in zip(life.tables, added, strict=True):
            table += new
        return added

    def admit(
        self, life: Life, local: int, tables: Sequence[Sequence[int]], computed: int, tokens: int
    ) -> bool:
        """Give a request its cached blocks and room for the rest; False where there is none."""
        touched = [
            [0 if at < self._skipped(group, computed) else b for at, b in enumerate(table)]
            for group, table in zip(self.groups, tables, strict=True)
        ]
        for table in touched:
            for block in filter(None, table):
                self.blocks.touch(block)
        life.tables = touched
        for group, table in zip(self.groups, touched, strict=True):
            table += [0] * (min(self._skipped(group, computed), ceil(tokens)) - len(table))
        if self.grow(life, tokens) is None:
            for table in touched:
                self.blocks.release(table)
            life.tables = [[] for _ in self.groups]
            return False
        life.local = local
        return True

    def name_blocks(self, life: Life, tokens: int) -> None:
        """Put whole blocks into the prefix cache: as vLLM, before they are computed."""
        tokens = min(tokens, life.num_tokens)
        for group, table in zip(self.groups, life.tables, strict=True):
            for index in range(min(tokens // group.block_tokens, len(table))):
                self.blocks.name(table[index], self._name(group, life, index))

    def drop_blocks(self, life: Life) -> None:
        """Free a request's blocks, when no step that is under way writes them."""
        blocks = [block for table in life.tables for block in table]
        life.tables = [[] for _ in self.groups]
        if life.num_in_flight_tokens:
            self.deferred.append((self.step_number, blocks))
        else:
            self.blocks.release(blocks)

    def reserved(self) -> int:
        """How many blocks the requests that have some still need."""
        holders = [*self.running, *(life for life in self.waiting if any(life.tables))]
        return sum(self._whole(life) - sum(map(len, life.tables)) for life in holders)

    def _whole(self, life: Life) -> int:
        return sum(ceil(len(life.tokens) / group.block_tokens) for group in self.groups)

    # Requests.

    def add(self, life: Life) -> None:
        self.lives[life.request_id] = life
        self.waiting.append(life)
        for at, key in enumerate(life.hashes):
            self.truth[key] = life.values[: (at + 1) * HASH_TOKENS]

    def preempt(self, life: Life, *, drop: bool = False) -> None:
        self.running.remove(life)
        self.drop_blocks(life)
        life.num_computed_tokens = life.placeholders = 0
        life.drop_stale, life.stale = drop, life.num_in_flight_tokens
        self.waiting.insert(0, life)
        self.counts["preempted"] += 1

    def end(self, life: Life) -> None:
        """Finish or abort a request."""
        for queue in (self.running, self.waiting):
            if life in queue:
                queue.remove(life)
        life.over = True
        self.skip(life)
        tables = [
            table[: ceil(life.num_computed_tokens / group.block_tokens)]
            for group, table in zip(self.groups, life.tables, strict=True)
        ]
        self.side.finished(life, tables)
        if life.loading and not life.load_over:
            return
        self.forget(life)

    def forget(self, life: Life) -> None:
        self.drop_blocks(life)
        del self.lives[life.request_id]
        self.counts["finished"] += 1

    def reset(self) -> None:
        """New weights: everything computes anew, and finds nothing of before."""
        for life in reversed(list(self.running)):
            self.preempt(life, drop=True)
        if self.loads or any(any(life.tables) for life in self.waiting):
            return
        for block in list(self.blocks.named):
            self.blocks.forget(block)
        self.epoch += 1
        self.side.reset()
        self.counts["reset"] += 1

    # Workers.

    def copy(self, save: Save, rank: int) -> None:
        """One rank copies a save's chunks into the pool, and says that it is over."""
        if not save.cancelled:
            for run in save.job.runs:
                group = self.groups[run.engine_group]
                for at, key in enumerate(run.keys(self.cache.index(run.engine_group, rank))):
                    found = self.read(group, run.blocks_of(at))
                    self.check_chunk(group, run.digests[at], found, save.reset)
                    self.pool.chunks.setdefault((save.reset, key), found)
                    self.counts["saved"] += 1
        save.ranks.discard(rank)
        self.reports.saved.append(save.job.job)
        if not save.ranks:
            del self.saves[save.job.job]

    def check_chunk(self, group: EngineGroup, key: bytes, found: list[Any], reset: int) -> None:
        values = self.truth[key][-group.layout.chunk_tokens :]
        assert found == [(group.engine_group, reset, value) for value in values], (
            "what is saved is not what its digest says"
        )

    def take(self, plan: StepPlan, step: Step) -> None:
        """Begin the plan's saves, be done with those that it flushes, begin its loads."""
        for job in plan.saves:
            blocks = {block for run in job.runs for block in run.block_ids}
            assert 0 not in blocks
            save = self.saves[job.job] = Save(job, plan.reset, set(range(self.size)), blocks)
            for queue in self.queues:
                queue.append(save)
            for run in job.runs:
                group = self.groups[run.engine_group]
                for at, key in enumerate(run.digests):
                    found = self.read(group, run.blocks_of(at))
                    self.check_chunk(group, key, found, plan.reset)
        for rank, queue in enumerate(self.queues):
            for save in [save for save in queue if save.job.job in plan.flush]:
                if self.rng.random() < 0.5:
                    while save in queue:
                        self.copy(queue.popleft(), rank)
        for job in plan.flush:
            if job in self.saves:
                self.saves[job].cancelled = True
                self.counts["cancelled"] += 1
        for job in plan.loads:
            self.begin_load(Load(job, plan.reset, self.lives[job.request_id]), step)

    def begin_load(self, load: Load, step: Step) -> None:
        life = load.life
        for run in load.job.runs:
            group, table = self.groups[run.engine_group], life.tables[run.engine_group]
            each = group.layout.chunk_tokens // group.block_tokens
            for at, block in enumerate(run.block_ids):
                index = run.first * each + at
                is_local = (index + 1) * group.block_tokens <= life.local
                assert block == (0 if is_local else table[index])
                if block:
                    assert not self.is_async or self.blocks.refs[block] == 1
                    assert not self.is_async or block not in self.blocks.named
                    for offset in range(group.block_tokens):
                        self.write(block, offset, GARBAGE)
        if self.is_async:
            self.loads.append(load)
        else:
            step.bad_blocks |= self.fill(load)

    def fill(self, load: Load) -> set[int]:
        """Load what the pool has, and return the blocks that did not come."""
        bad: set[int] = set()
        failed = self.rng.random() < 0.05
        for run in load.job.runs:
            group = self.groups[run.engine_group]
            for at, digest_ in enumerate(run.digests):
                found = [
                    self.pool.chunks.get((load.reset, key))
                    for rank in range(self.size)
                    for key in run.keys(self.cache.index(run.engine_group, rank))[at : at + 1]
                ]
                blocks = run.blocks_of(at)
                if failed or None in found:
                    bad.update(blocks)
                    continue
                self.check_chunk(group, digest_, found[0], load.reset)
                for place, what in enumerate(found[0]):
                    if block := blocks[place // group.block_tokens]:
                        self.write(block, place % group.block_tokens, what)
        if bad:
            self.reports.failed_loads.append(load.life.request_id)
            load.life.ever_failed = True
        self.counts["failed" if bad else "loaded"] += 1
        return bad - {0}
