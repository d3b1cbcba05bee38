"""One stream for host, files and GPU: the router's index built from it equals the true state."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest
import zmq
from lab import (
    CLOCK,
    ChildEngine,
    Engine,
    EngineOptions,
    Pools,
    on_pool,
    prompt,
    settled,
    until,
    whole,
)

from kvfabric.fabric.keys import BlockHasher, HashAlgorithm
from kvfabric.fabric.types import ChunkKey, Medium, SlotState, key_group, key_low64, make_key
from kvfabric.router.index import PrefixIndex
from kvfabric.router.ingest import Ingest, SourceEndpoints
from kvfabric.tiers.pool.daemon import PoolProcess
from kvfabric.tiers.pool.table import SlotTable

pytestmark = pytest.mark.real_vllm

NODE = "a"
BLOCK_TOKENS = 32
EQUAL_S = 20.0
"""Two heartbeats, a silence and a snapshot, on a busy machine."""
POLL_MS = 10

State = dict[tuple[int, str], Counter[int]]
"""By cache group and medium the chunks, as often as they are held."""


class Router:
    """An index that follows one pool's stream over its sockets."""

    def __init__(self, pool: PoolProcess) -> None:
        self.index = PrefixIndex()
        self._context: zmq.Context = zmq.Context()
        self._ingest = Ingest(self._context, self.index, CLOCK)
        self._ingest.add_source(NODE, SourceEndpoints(pool.addresses.events, pool.addresses.replay))

    def state(self) -> State:
        """Take in what has come and return what the index holds; nothing while it repairs."""
        self._ingest.poll(POLL_MS)
        self.index.check()
        if not self.index.trusted(NODE):
            return {}
        return {
            (part.group, part.medium): Counter(part.array().tolist())
            for part in self.index.dump(NODE)
        }

    def close(self) -> None:
        self._ingest.close()
        self._context.destroy(linger=0)


@pytest.fixture
def routers() -> Iterator[list[Router]]:
    made: list[Router] = []
    yield made
    for each in made:
        each.close()


def state_of(keys: Iterable[ChunkKey], medium: Medium) -> State:
    found: State = {}
    for key in keys:
        found.setdefault((key_group(key), medium.name), Counter())[key_low64(key)] += 1
    return found


def on_gpu(engine: Engine | ChildEngine) -> list[ChunkKey]:
    """Look into an engine's block pool: the hashes of all blocks that can be found in it."""
    if isinstance(engine, ChildEngine):
        engine._tell({"do": "cached"})
        return [ChunkKey(bytes.fromhex(key)) for key in engine.hear()]
    return list(engine.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache)


def in_host(pools: Pools) -> list[ChunkKey]:
    """Read the pool's own table, which nobody writes at the moment."""
    control = Path(f"/dev/shm/kvfabric-{pools.run}-{NODE}.control").read_bytes()
    table = SlotTable(memoryview(bytearray(control)))
    records = map(table.read, table.used_slots())
    return [record.key for record in records if record.state is SlotState.READY]


def in_files(root: Path) -> list[ChunkKey]:
    return [ChunkKey(bytes.fromhex(path.stem)) for path in root.rglob("*.kv")]


def truth(pools: Pools, *engines: Engine | ChildEngine, files: Path | None = None) -> State:
    found = state_of(in_host(pools), Medium.CPU)
    found |= state_of([key for each in engines for key in on_gpu(each)], Medium.GPU)
    return found | (state_of(in_files(files), Medium.STORAGE) if files else {})


def agreed(router: Router, expected: Callable[[], State]) -> State:
    """Wait until the index is what it should be, and stays so; return it."""

    def equal() -> bool:
        return router.state() == expected()

    try:
        until(equal, EQUAL_S)
    except AssertionError:
        found, wanted = router.state(), expected()
        names = sorted(set(found) | set(wanted))
        none: Counter[int] = Counter()
        raise AssertionError(
            {name: (len(found.get(name, none)), len(wanted.get(name, none))) for name in names}
        ) from None
    for _ in range(10):
        router.state()
    assert equal()
    return router.state()


@pytest.mark.parametrize(
    ("kind", "kv_events"), [("model", False), ("model", True), ("hybrid", False)]
)
def test_the_index_equals_the_truth_while_an_engine_evicts(
    kind, kv_events, request, tmp_path, pools: Pools, routers
) -> None:
    folder = request.getfixturevalue(kind)
    prompts = [prompt(number, 120 + 30 * number, shared=64) for number in range(8)]
    files = tmp_path / "files"
    tiers = ({"type": "fs", "root_dir": str(files), "quota_bytes": 256 << 20},)
    pool = pools.start(slots=24, tiers=tiers)
    routers.append(Router(pool))
    options = EngineOptions(
        folder,
        on_pool(pool.addresses.client),
        blocks=40 if kind == "model" else 60,
        model_tokens_max=512,
        kv_events=kv_events,
    )
    with Engine(options) as engine:
        for turn in range(3):
            engine.generate(prompts, tokens=40)
            settled(pool)
            found = agreed(routers[0], lambda: truth(pools, engine, files=files))
            assert {medium for _, medium in found} == {"GPU", "CPU", "STORAGE"}
            if turn == 0:
                routers.append(Router(pool))  # comes late, and asks the snapshot
        agreed(routers[1], lambda: truth(pools, engine, files=files))
    agreed(routers[0], lambda: truth(pools, files=files))
    pool.check()


@pytest.mark.parametrize("kind", ["model", "hybrid"])
def test_chunks_of_several_blocks_count_while_all_are_there(
    kind, request, pools: Pools, routers
) -> None:
    folder = request.getfixturevalue(kind)
    prompts = [prompt(number, 150 + 30 * number, shared=96) for number in range(6)]
    pool = pools.start()
    routers.append(Router(pool))
    options = EngineOptions(
        folder,
        on_pool(pool.addresses.client, chunk_tokens=64),
        blocks=40 if kind == "model" else 60,
        model_tokens_max=512,
    )
    seen: set[tuple[int, ...]] = set()
    broken = 0
    with Engine(options) as engine:
        for asked in (prompts[:2], prompts, prompts[3:], prompts):
            said = engine.generate(asked, tokens=40)
            seen |= {(*each, *answer) for each, answer in zip(asked, said, strict=True)}
            settled(pool)
            chunks, ends = chunks_of(seen, on_gpu(engine), chunk_blocks=2)
            assert chunks
            broken += len(ends - chunks)
            expected = state_of(in_host(pools), Medium.CPU) | state_of(chunks, Medium.GPU)
            agreed(routers[0], lambda said=expected: said)
    # Windows keep the ends of prompts only: there the last block alone is not enough.
    assert broken or kind == "model"


def chunks_of(
    seen: Iterable[Sequence[int]], cached: Sequence[bytes], chunk_blocks: int
) -> tuple[set[ChunkKey], set[ChunkKey]]:
    """Hash every text that the engine has seen.

    Return the chunks of which it has all blocks, and those of which it has the last one.
    """
    hasher = BlockHasher(HashAlgorithm.SHA256, None, BLOCK_TOKENS)
    here, groups = set(cached), {key_group(ChunkKey(key)) for key in cached}
    chunks: set[ChunkKey] = set()
    ends: set[ChunkKey] = set()
    for text in seen:
        digests = hasher.hash_blocks(text)
        for end in range(chunk_blocks, len(digests) + 1, chunk_blocks):
            for group in groups:
                blocks = [make_key(one, group) for one in digests[end - chunk_blocks : end]]
                if here.issuperset(blocks):
                    chunks.add(blocks[-1])
                if blocks[-1] in here:
                    ends.add(blocks[-1])
    return chunks, ends


@pytest.mark.parametrize("connector", [False, True])
def test_a_reset_withdraws_the_gpu(connector, model, pools: Pools, routers) -> None:
    prompts = [prompt(number, 200) for number in range(3)]
    pool = pools.start()
    routers.append(Router(pool))
    with Engine(EngineOptions(model, on_pool(pool.addresses.client))) as engine:
        for _ in range(2):
            engine.generate(prompts)
            settled(pool)
            assert (0, "GPU") in agreed(routers[0], lambda: truth(pools, engine))
            assert engine.forget(connector=connector)
            assert not on_gpu(engine)
            found = agreed(routers[0], lambda: truth(pools, engine))
            assert [medium for _, medium in found] == ["CPU"]
        engine.generate(prompts)
        settled(pool)
        assert (0, "GPU") in agreed(routers[0], lambda: truth(pools, engine))


def test_two_engines_of_a_node_are_counted_and_a_killed_one_is_withdrawn(
    model, pools: Pools, routers
) -> None:
    both, ours, theirs = (prompt(number, 300) for number in range(3))
    pool = pools.start()
    routers.append(Router(pool))
    options = EngineOptions(model, on_pool(pool.addresses.client))
    with ChildEngine(options) as child, Engine(options) as engine:
        child.wait_ready()
        child.generate([both, theirs])
        engine.generate([both, ours])
        settled(pool)
        found = agreed(routers[0], lambda: truth(pools, engine, child))
        assert set(found[0, "GPU"].values()) == {1, 2}
        chunks = whole(300, BLOCK_TOKENS) // BLOCK_TOKENS
        assert _prefix(routers[0], both) == chunks
        child._tell({"do": "forget"})
        assert child.hear()
        agreed(routers[0], lambda: truth(pools, engine, child))
        assert _prefix(routers[0], both) == chunks
        child.generate([theirs])
        agreed(routers[0], lambda: truth(pools, engine, child))
        child.kill()
        settled(pool)
        found = agreed(routers[0], lambda: truth(pools, engine))
        assert set(found[0, "GPU"].values()) == {1}
        assert pool.stats()["kvfabric_gpu_chunks"] == len(on_gpu(engine))
    assert [medium for _, medium in agreed(routers[0], lambda: truth(pools))] == ["CPU"]
    pool.check()


def _prefix(router: Router, text: list[int]) -> int:
    """Return how many chunks of a prompt the pool's GPUs have, from its head."""
    digests = BlockHasher(HashAlgorithm.SHA256, None, BLOCK_TOKENS).hash_blocks(text)
    low = [key_low64(make_key(digest, 0)) for digest in digests]
    (holding,) = router.index.longest_prefix(low)
    return holding.by_medium[Medium.GPU]


@pytest.mark.parametrize("busy", [False, True])
def test_a_pool_that_restarts_learns_what_the_engine_has(
    busy, model, pools: Pools, routers
) -> None:
    prompts = [prompt(number, 200) for number in range(6)]
    config = pools.config(host={"lease_s": 1.0})
    pool = pools.start(config)
    routers.append(Router(pool))
    options = EngineOptions(model, on_pool(pool.addresses.client), blocks=40)
    with Engine(options) as engine:
        engine.generate(prompts[:2])
        settled(pool)
        assert (0, "GPU") in agreed(routers[0], lambda: truth(pools, engine))
        pool.kill()
        if busy:
            engine.generate(prompts[1:])
        pool = pools.start(config)
        found = agreed(routers[0], lambda: truth(pools, engine))
        assert (0, "GPU") in found
        engine.generate(prompts)
        settled(pool)
        agreed(routers[0], lambda: truth(pools, engine))
    pool.check()
