"""The naive engine's steps: what vLLM's `schedule`, `execute_model` and `update_from_output` do."""

from collections.abc import Sequence
from typing import Any

from vllm_engine import Engine
from vllm_model import GARBAGE, STEP_S, Life, Step

from kvfabric.actors.engines.vllm.asker import AskState
from kvfabric.actors.engines.vllm.scheduler import written_blocks
from kvfabric.actors.engines.vllm.transfers import WorkerReport


class Stepper(Engine):
    """An engine that runs."""

    budget_tokens = 48
    running_max = 6

    def step(self) -> None:
        """Schedule a step and begin it; look at the outputs that are due; let workers go on."""
        self.clock.advance_s(STEP_S)
        step = self.schedule()
        self.steps.append(step)
        self.work()
        while len(self.steps) >= self.depth:
            self.observe(self.steps.popleft())

    def schedule(self) -> Step:
        self.step_number += 1
        step = Step(self.step_number, {})
        self.budget = self.rng.choice([8, 20, self.budget_tokens]) if self.is_async else 1000
        before = len(self.running)
        cached = self._schedule_running(step)
        new: list[tuple[int, list[list[int]]]] = []
        admitted: list[str] = []
        if len(self.running) == before:
            for life in list(self.waiting):
                if self.budget > 0 and len(self.running) < self.running_max:
                    self._schedule_waiting(life, step, new, admitted)
        plan = self.side.plan(
            list(step.scheduled),
            admitted,
            written_blocks(new, cached, {g.engine_group: g.block_tokens for g in self.groups}),
            lambda name: [list(table) for table in self.lives[name].tables],
        )
        self.take(plan, step)
        self._compute(step)
        return step

    def _schedule_running(self, step: Step) -> list[tuple[int, Any]]:
        cached: list[tuple[int, Any]] = []
        for life in list(self.running):
            tokens = min(
                self.budget, life.num_tokens + life.placeholders - life.num_computed_tokens
            )
            done = life.all_sampled and life.num_computed_tokens >= life.num_tokens
            if life not in self.running or tokens <= 0 or done:
                continue
            self.skip(life)
            while (added := self.grow(life, life.num_computed_tokens + tokens)) is None:
                victim = self.running[-1]
                self.preempt(victim)
                if victim is life:
                    break
            if added is None:
                break
            cached.append((life.num_computed_tokens, added))
            self._scheduled(life, step, tokens)
        return cached

    def _scheduled(self, life: Life, step: Step, tokens: int) -> None:
        step.scheduled[life.request_id] = tokens
        self.budget -= tokens
        self.name_blocks(life, life.num_computed_tokens + tokens)

    def _promote(self, life: Life) -> bool:
        """Whether a request that was loading may go on."""
        if not life.loading:
            return not (life.stale and not life.drop_stale)
        if not life.load_over:
            return False
        life.loading = life.load_over = False
        if life.load_failed and not life.num_computed_tokens:
            self.drop_blocks(life)
        else:
            self.name_blocks(life, life.num_computed_tokens)
        life.load_failed = False
        return True

    def _schedule_waiting(
        self, life: Life, step: Step, new: list[tuple[int, Any]], admitted: list[str]
    ) -> None:
        if not self._promote(life):
            return
        external = 0
        if not life.num_computed_tokens:
            local, tables = self.local_hit(life)
            found = self.side.matched(life, local)
            if found is None:
                return
            self._check_promise(life, local, found)
            external, computed = found, local + found
            loads = bool(external) and self.is_async
            tokens = 0 if loads else min(self.budget, life.num_tokens - computed)
            if loads and len(self.blocks.free) < self._whole(life) + self.reserved():
                return
            if not self.admit(life, local, tables, computed, computed + tokens):
                return
        else:
            computed, loads = life.num_computed_tokens, False
            tokens = min(self.budget, life.num_tokens - computed)
            self.skip(life)
            if self.grow(life, computed + tokens) is None:
                return
        self.side.allocated(life, [list(table) for table in life.tables], external)
        if external:
            assert sum(self.side.origins(life, external).values()) == external
        life.num_computed_tokens = computed
        if loads:
            life.loading = True
            return
        self.waiting.remove(life)
        self.running.append(life)
        admitted.append(life.request_id)
        new.append((computed, [list(table) for table in life.tables]))
        self._scheduled(life, step, tokens)

    def _check_promise(self, life: Life, local: int, external: int) -> None:
        assert external >= 0
        assert local + external < life.num_tokens
        if external:
            assert not life.ever_failed, "promised again what did not come"
            assert all((local + external) % g.layout.chunk_tokens == 0 for g in self.groups)

    def _compute(self, step: Step) -> None:
        """Write the KV of the step's tokens; it is there when the step's output is."""
        for name, tokens in step.scheduled.items():
            life = self.lives[name]
            first = life.num_computed_tokens
            self._check_context(life, first, step)
            for group, table in zip(self.groups, life.tables, strict=True):
                for at in range(first, first + tokens):
                    block, offset = table[at // group.block_tokens], at % group.block_tokens
                    what = self.expected(group.engine_group, life.values, at)
                    self.write(block, offset, ("pending", step.number, what))
                    step.pending.append((block, offset))
            life.num_computed_tokens += tokens
            life.num_in_flight_tokens += tokens
            if life.num_computed_tokens >= life.num_tokens + life.placeholders:
                life.placeholders += 1
                step.sampled.add(name)

    def _check_context(self, life: Life, first: int, step: Step) -> None:
        """What the step's tokens look at is what it should be."""
        for group, table in zip(self.groups, life.tables, strict=True):
            window = group.layout.window_tokens or first + 1
            for at in range(max(0, first - window + 1), first):
                what = self.content.get(table[at // group.block_tokens], [GARBAGE] * 64)
                what = what[at % group.block_tokens]
                what = what[2] if what[0] == "pending" else what
                if what != self.expected(group.engine_group, life.values, at):
                    assert not self.is_async, "a request runs on what was not computed for it"
                    step.tainted.add(life.request_id)

    # Outputs.

    def observe(self, step: Step) -> None:
        for block, offset in step.pending:
            what = self.content[block][offset]
            if what[0] == "pending" and what[1] == step.number:
                self.content[block][offset] = what[2]
        due = [blocks for number, blocks in self.deferred if number <= step.number]
        self.deferred = [each for each in self.deferred if each[0] > step.number]
        for blocks in due:
            self.blocks.release(blocks)
        loaded, failed = self._loads_over()
        failed |= self._recompute(step)
        for name, tokens in step.scheduled.items():
            self._output(name, tokens, step, failed)
        report, self.reports = self.reports, WorkerReport()
        report.silent = self.rng.random() < 0.005
        self.side.observed(None if report.empty else report, loaded)
        for name in loaded:
            life = self.lives[name]
            life.load_over = True
            if life.over:
                self.forget(life)
        self.side.step_over()

    def _output(self, name: str, tokens: int, step: Step, failed: set[str]) -> None:
        life = self.lives.get(name)
        if life is None:
            return
        life.num_in_flight_tokens -= tokens
        is_stale = life.stale > 0
        if is_stale:
            life.stale -= tokens
        if name in failed or life.over:
            return
        assert name not in step.tainted, "an output of what was not computed is taken for true"
        if name not in step.sampled or (is_stale and life.drop_stale):
            return
        life.num_tokens += 1
        if not is_stale:
            life.placeholders -= 1
        if life.num_tokens >= len(life.tokens):
            self.end(life)

    def _loads_over(self) -> tuple[list[str], set[str]]:
        """End some loads; return whose are over."""
        over: list[str] = []
        for load in list(self.loads):
            if self.rng.random() < 0.6:
                continue
            self.loads.remove(load)
            life, bad = load.life, self.fill(load)
            over.append(life.request_id)
            if bad and not life.over:
                life.load_failed = True
                first = 0
                if self.cache.keeps_blocks:
                    table, size = life.tables[0], self.groups[0].block_tokens
                    first = next(at for at, block in enumerate(table) if block in bad) * size
                life.num_computed_tokens = first
        return over, set()

    def _recompute(self, step: Step) -> set[str]:
        """As vLLM does it for loads inside a step: truncate who has a block that did not come."""
        affected: set[str] = set()
        marked: set[int] = set()
        for life in self.running if step.bad_blocks else ():
            before = life.num_computed_tokens - step.scheduled.get(life.request_id, 0)
            size = self.groups[0].block_tokens
            bad = [
                at
                for at, block in enumerate(life.tables[0][: -(-before // size)])
                if block in step.bad_blocks
            ]
            if not bad:
                continue
            affected.add(life.request_id)
            mine = [at for at in bad if life.tables[0][at] not in marked]
            life.num_computed_tokens = mine[0] * size if mine else before
            marked.update(life.tables[0][at] for at in mine)
            if life.request_id in step.sampled:
                life.placeholders -= 1
        return affected

    # What happens beside the steps.

    def work(self) -> None:
        """Let ranks copy, the pool forget, and questions be answered."""
        for rank, queue in enumerate(self.queues):
            while queue and self.rng.random() < 0.4:
                self.copy(queue.popleft(), rank)
        for asker in self.askers:
            for ask in asker.asks:
                if ask.state is AskState.WAITING and not ask.dropped and self.rng.random() < 0.15:
                    self._answer(ask)

    def _answer(self, ask: Any) -> None:
        ask.state = AskState.SILENT if self.rng.random() < 0.05 else AskState.DONE
        origins: list[str] = []
        for key in ask.keys:
            place = self.side._resets, key
            if place not in self.pool.chunks and place in self.lower and self.rng.random() < 0.9:
                self.pool.chunks[place] = self.lower[place]
                origins.append("fs")
            else:
                origins.append("host" if place in self.pool.chunks else "")
        ask.origins = tuple(origins)

    def pinned(self) -> set[bytes]:
        """The keys that no pool may forget."""
        return {
            key
            for asker in self.askers
            if not asker.closed
            for ask in asker.asks
            if ask.state is AskState.DONE and not ask.dropped
            for key, origin in zip(ask.keys, ask.origins, strict=True)
            if origin
        }

    def lose_local(self, share: float) -> None:
        """Let the engine's own cache forget some blocks that nobody uses, as if others had run."""
        for block in sorted(self.blocks.named):
            if not self.blocks.refs[block] and self.rng.random() < share:
                self.blocks.forget(block)

    def evict(self, share: float) -> None:
        """Let the pool forget some chunks; tiers keep them."""
        pinned = self.pinned()
        for place in sorted(self.pool.chunks):
            if place[1] not in pinned and self.rng.random() < share:
                self.lower[place] = self.pool.chunks.pop(place)


def prompts(rng: Any, count: int) -> list[tuple[list[int], int]]:
    """Return requests' tokens and how many are the prompt; many begin alike."""
    heads: Sequence[list[int]] = [
        [rng.randrange(1000) for _ in range(rng.choice([16, 40, 64]))] for _ in range(3)
    ]
    found: list[tuple[list[int], int]] = []
    for _ in range(count):
        head = rng.choice(heads)
        tail = [rng.randrange(1000) for _ in range(rng.choice([1, 5, 12, 30]))]
        made = [rng.randrange(1000) for _ in range(rng.choice([1, 2, 9, 20]))]
        found.append((head + tail + made, len(head) + len(tail)))
    return found
