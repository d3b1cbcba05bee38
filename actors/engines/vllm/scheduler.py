"""The scheduler's half: what to load for a request, and what to save of it.

Ownership. It owns what is known of each request, the fence, and the questions to the pool with
their pins. The engine's block tables are only looked at.

Lifecycle. `open` when the workers' caches are known, then the engine's hooks in its order, then
`close`. A request is known from its first lookup until it is finished and its last load is over.

Failure. A pool that is away, busy or silent means that nothing is found and nothing is saved. A
load that failed makes its request compute; it is not promised anything again.

Threading. One thread, the scheduler's. No hook waits for a socket: lookups read shared memory, and
what may take long is asked by `Askers`, while the engine is told to ask again next step.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

from ....fabric.clock import Clock
from ....fabric.types import ChunkKey, SourceRange, make_keys
from ....tiers.pool.client import PoolClient
from .asker import Ask, Askers, AskState
from .fence import Fence
from .geometry import CacheGeometry
from .handoff import prefiller_params, read_handoff
from .link import Link
from .lookups import SharedIndex
from .prefix import EngineGroup, PrefixRules
from .requests import NEVER, EngineRequest, Tracked
from .settings import ASK_GRACE_S, SAVES_WAITING_MAX, ConnectorSettings, LoadMode
from .transfers import NULL_BLOCK, ChunkRun, LoadJob, SaveJob, StepPlan, WorkerReport

HOST = "host"

AttachFor = Callable[[int], PoolClient]
"""Attach under the namespace of so many resets."""
BlockTables = Callable[[str], Sequence[Sequence[int]] | None]
"""A request's block ids, group by group."""


class SchedulerSide:
    """All decisions of the connector."""

    def __init__(
        self,
        settings: ConnectorSettings,
        geometry: CacheGeometry,
        hash_tokens: int,
        attach: AttachFor,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._geometry = geometry
        self._attach_for = attach
        self._clock = clock
        self._rules = PrefixRules(
            [
                EngineGroup(group.engine_group, group.layout, group.block_tokens, hash_tokens)
                for group in geometry.groups
            ]
        )
        self._place = {group.engine_group: at for at, group in enumerate(geometry.groups)}
        self._requests: dict[str, Tracked] = {}
        self._fence = Fence(geometry.size)
        self._next_job = 0
        self._runs: list[ChunkRun] = []
        """What requests that ended left to save."""
        self._loads: list[LoadJob] = []
        self._resets = 0
        self._link, self._askers = self._connect()

    def open(self) -> None:
        """Attach to the pool, or begin to try. Raises what the pool refuses."""
        self._link.open()

    @property
    def client(self) -> PoolClient | None:
        """The pool client of the present namespace, unless the pool is away. For any thread."""
        return self._link.client

    def matched(self, request: EngineRequest, local_tokens: int) -> int | None:
        """Return how many tokens beyond the local prefix can be loaded. None: ask again."""
        client = self._link.client
        tracked = self._track(request)
        tracked.local_tokens = local_tokens
        cap_tokens = self._rules.floor(request.num_tokens - 1)
        if client is None or tracked.failed or cap_tokens == 0:
            return self._nothing(tracked)
        if tracked.asks and not self._over(tracked, tracked.asks[-1]):
            return None
        index = SharedIndex(client, self._geometry)
        usable = self._rules.usable(request.block_hashes, local_tokens, cap_tokens, index)
        for at, row in enumerate(usable.rows):
            tracked.saved[at] = row
        if cap_tokens <= local_tokens:
            return self._nothing(tracked)
        if usable.tokens < cap_tokens and self._ask(tracked, client, cap_tokens, index):
            return None
        if usable.tokens <= local_tokens:
            return self._nothing(tracked)
        tracked.matched_tokens = usable.tokens
        return usable.tokens - local_tokens

    @property
    def loads_async(self) -> bool:
        """Whether what is matched is loaded between steps."""
        return self._settings.load is LoadMode.ASYNC

    def allocated(
        self, request: EngineRequest, block_ids: Sequence[Sequence[int]], external_tokens: int
    ) -> None:
        """The engine has blocks for a request, of which so many tokens are to be loaded."""
        tracked = self._track(request)
        if external_tokens == 0:
            if not tracked.loading:
                self._forget_asks(tracked)
            return
        tokens = tracked.local_tokens + external_tokens
        runs = self._rules.load(request.block_hashes, tracked.local_tokens, tokens, block_ids)
        tracked.loading = True
        self._loads.append(LoadJob(request.request_id, runs))

    def origins(self, request: EngineRequest, external_tokens: int) -> dict[str, int]:
        """Split the tokens that are loaded by where their chunks came from."""
        tracked = self._track(request)
        if not tracked.origins:
            return {HOST: external_tokens}
        group = self._rules.groups[0]
        first = tracked.local_tokens // group.layout.chunk_tokens
        end = -(-(tracked.local_tokens + external_tokens) // group.layout.chunk_tokens)
        found: dict[str, int] = {}
        for chunk, digest in enumerate(group.digests(request.block_hashes, first, end), first):
            begin = max(tracked.local_tokens, chunk * group.layout.chunk_tokens)
            tokens = (chunk + 1) * group.layout.chunk_tokens - begin
            origin = tracked.origins.get(digest, HOST)
            found[origin] = found.get(origin, 0) + tokens
        return found

    def plan(
        self,
        scheduled: Iterable[str],
        admitted: Iterable[str],
        written: Iterable[int],
        tables: BlockTables,
        grown: Container[str] | None = None,
    ) -> StepPlan:
        """Say what the workers do around the step in which these requests run.

        `admitted` are those of them that did not run in the step before. `written` are the blocks
        that the step gives to somebody and that will be overwritten, `grown` the requests to which
        it gives any; None: perhaps to all. What a step costs does not depend on how long the
        requests are that did not grow.
        """
        for request_id in admitted:
            if (tracked := self._requests.get(request_id)) is not None:
                tracked.admitted_tokens = tracked.request.num_computed_tokens
                tracked.held.clear()
        loads, self._loads = self._loads, []
        overwritten = set(written)
        overwritten.update(b for load in loads for run in load.runs for b in run.block_ids)
        overwritten.discard(NULL_BLOCK)
        flush = self._fence.readers(overwritten)
        saving = self._link.client is not None and len(self._fence) < SAVES_WAITING_MAX
        runs, self._runs = self._runs if saving else [], []
        runs = [run for run in runs if overwritten.isdisjoint(run.block_ids)]
        if self._rules.has_windows and overwritten:
            for tracked in self._requests.values():
                tracked.lose(overwritten)
        for request_id in scheduled:
            hold = self._rules.has_windows and (grown is None or request_id in grown)
            runs += self._save_or_hold(request_id, tables, saving=saving, hold=hold)
        saves: tuple[SaveJob, ...] = ()
        if runs:
            saves = (SaveJob(self._next_job, tuple(runs)),)
            self._fence.issue(self._next_job, (b for run in runs for b in run.block_ids))
            self._next_job += 1
        return StepPlan(self._resets, flush, saves, tuple(loads))

    def observed(self, report: WorkerReport | None, loaded: Iterable[str]) -> None:
        """Take in what the workers did, and whose loads are over."""
        if report is not None:
            for job in report.saved:
                self._fence.over(job)
            for request_id in report.failed_loads:
                if (tracked := self._requests.get(request_id)) is not None:
                    tracked.failed = True
                    # What was taken for stored may be what was corrupt or gone.
                    tracked.saved = [0] * len(self._rules.groups)
            if report.silent:
                self._link.silence()
        for request_id in loaded:
            self._load_over(request_id)

    def step_over(self) -> None:
        """A step's output was observed: what was loaded at its beginning is loaded."""
        if not self.loads_async:
            for request_id in [i for i, each in self._requests.items() if each.loading]:
                self._load_over(request_id)

    def finished(
        self, request: EngineRequest, block_ids: Sequence[Sequence[int]]
    ) -> dict[str, Any] | None:
        """A request is over and its blocks are about to be freed. Returns params for its answer."""
        client = self._link.client
        tracked = self._requests.get(request.request_id)
        if tracked is not None:
            loading = tracked.loading and self.loads_async
            if client is not None and not loading and tracked.unsaved(self._rules):
                self._runs += self._unsaved(tracked, block_ids)
            tracked.finished = True
            if not loading:
                self._forget_asks(tracked)
                del self._requests[request.request_id]
        if client is not None and read_handoff(request.kv_transfer_params).wants_prefiller:
            return prefiller_params(client.peer_endpoint)
        return None

    def reset(self) -> None:
        """Nothing that is in the fabric now is to be found by this engine again."""
        self._resets += 1
        self._runs.clear()
        for tracked in self._requests.values():
            tracked.saved = [0] * len(self._rules.groups)
            tracked.admitted_tokens = NEVER
            tracked.failed = tracked.failed or tracked.loading
            self._forget_asks(tracked)
        self._askers.close()
        self._link.close()
        self._link, self._askers = self._connect()
        self._link.open()

    def close(self) -> None:
        """Let go of the pool."""
        self._askers.close()
        self._link.close()

    def _connect(self) -> tuple[Link, Askers]:
        resets = self._resets

        def attach() -> PoolClient:
            return self._attach_for(resets)

        return Link(attach, self._clock), Askers(attach, self._clock)

    def _track(self, request: EngineRequest) -> Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            handoff = read_handoff(request.kv_transfer_params)
            tracked = Tracked(
                request,
                [0] * len(self._rules.groups),
                sources=handoff.sources,
                again_s=handoff.again_s,
            )
            self._requests[request.request_id] = tracked
        return tracked

    def _nothing(self, tracked: Tracked) -> int:
        self._forget_asks(tracked)
        tracked.matched_tokens = 0
        return 0

    def _ask(
        self, tracked: Tracked, client: PoolClient, cap_tokens: int, index: SharedIndex
    ) -> bool:
        """Ask tiers and sources for what is missing, in full groups first; say whether to wait."""
        if tracked.asked or not (client.media or tracked.sources):
            return False
        hashes = tracked.request.block_hashes
        windows = tracked.asked_windows or not self._rules.has_full
        tokens = cap_tokens
        if windows and self._rules.has_full:
            tokens = self._rules.full(hashes, tracked.local_tokens, cap_tokens, index).tokens
        wanted = self._rules.wanted(hashes, tracked.local_tokens, tokens, windows=windows)
        keys: list[ChunkKey] = []
        for group, _, digests in wanted:
            for cache in self._geometry.indices(self._place[group.engine_group]):
                keys += make_keys(digests, cache)
        if windows or not self._rules.has_windows:
            tracked.asked = True
        tracked.asked_windows = True
        if not keys:
            return False
        sources = [SourceRange(s.node, s.endpoint, 0, len(keys)) for s in tracked.sources]
        now_s, wait_s = self._clock.now_s(), self._settings.load_wait_s
        ask = self._askers.submit(Ask(keys, sources, now_s, wait_s, tracked.again_s))
        tracked.asks.append(ask)
        return not self._over(tracked, ask)

    def _over(self, tracked: Tracked, ask: Ask) -> bool:
        """Whether an ask is decided, or has had its time."""
        if ask.state is AskState.WAITING:
            allowed_s = ask.wait_s + ASK_GRACE_S
            if self._clock.now_s() - ask.begun_s < allowed_s:
                return False
            tracked.asked = True
            tracked.asks.remove(ask)
            self._askers.drop(ask)
        elif ask.state is AskState.SILENT:
            self._link.silence()
        elif any(ask.origins):
            for key, origin in zip(ask.keys, ask.origins, strict=True):
                if origin and origin != HOST:
                    tracked.origins[key[:-4]] = origin
        return True

    def _forget_asks(self, tracked: Tracked) -> None:
        while tracked.asks:
            self._askers.drop(tracked.asks.pop())

    def _save_or_hold(
        self, request_id: str, tables: BlockTables, *, saving: bool, hold: bool
    ) -> list[ChunkRun]:
        """Return what to save of a request that runs, and remember what may be saved later."""
        tracked = self._requests.get(request_id)
        if tracked is None:
            return []
        unsaved = saving and tracked.unsaved(self._rules)
        if not unsaved and not hold:
            return []
        block_ids = tables(request_id)
        if block_ids is None:
            return []
        runs = self._unsaved(tracked, block_ids) if unsaved else []
        if self._rules.has_windows:
            tracked.hold(self._rules, block_ids)
        return runs

    def _unsaved(self, tracked: Tracked, block_ids: Sequence[Sequence[int]]) -> list[ChunkRun]:
        """Return what to save of a request, and take it as saved."""
        hashes, tokens = tracked.request.block_hashes, tracked.confirmed_tokens
        runs: list[ChunkRun] = []
        for at, group in enumerate(self._rules.groups):
            known = len(hashes) * group.hash_tokens
            first, end = tracked.saved[at], group.chunks(min(tokens, known))
            if end <= first:
                continue
            tracked.saved[at] = end
            ids = tracked.table(at, block_ids[group.engine_group])
            runs += self._rules.save(group, hashes, first, end, ids)
        return runs

    def _load_over(self, request_id: str) -> None:
        tracked = self._requests.get(request_id)
        if tracked is None:
            return
        tracked.loading = False
        self._forget_asks(tracked)
        if tracked.finished:
            del self._requests[request_id]


def written_blocks(
    new: Iterable[tuple[int, Sequence[Sequence[int]]]],
    cached: Iterable[tuple[int, Sequence[Sequence[int]] | None]],
    block_tokens: Mapping[int, int],
) -> list[int]:
    """Return the blocks that a step gives to requests and that will be overwritten.

    `new` and `cached` have each request's computed tokens and blocks: all of them for `new`, those
    that were added for `cached`. `block_tokens` has the groups' block sizes.
    """
    found: list[int] = []
    for computed, tables in new:
        for group, ids in enumerate(tables):
            found += ids[computed // block_tokens.get(group, computed + 1) :]
    for _, tables in cached:
        for ids in tables or ():
            found += ids
    return found
