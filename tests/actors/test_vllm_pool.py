"""Both halves on a real pool in this process: bytes go there and back, and its books balance."""

import os
from itertools import count

import pytest
import torch
from vllm_yard import HASH_TOKENS, geometry, group, request, soon

from kvfabric.actors.engines.vllm.copier import BlockCopier, OpaqueViews
from kvfabric.actors.engines.vllm.scheduler import SchedulerSide
from kvfabric.actors.engines.vllm.settings import ConnectorSettings
from kvfabric.actors.engines.vllm.transfers import StepPlan
from kvfabric.actors.engines.vllm.worker import WorkerSide
from kvfabric.fabric.clock import SystemClock
from kvfabric.fabric.config import PoolConfig, parse
from kvfabric.fabric.namespace import Namespace
from kvfabric.tiers.pool.client import PoolClient
from kvfabric.tiers.pool.server import PoolServer

pytestmark = pytest.mark.nixl

CLOCK = SystemClock()
RUNS = count()
SLOT_BYTES = 4096
GROUPS = [group(0, 8), group(1, 8, window=12)]
TABLES = [list(range(1, 11)), list(range(11, 21))]
OTHERS = [list(range(21, 31)), list(range(31, 41))]
BLOCKS = 50


@pytest.fixture
def start(tmp_path):
    """Start a pool with so many slots and a tier of files."""
    servers: list[PoolServer] = []

    def make(slots: int = 64) -> PoolServer:
        values = {
            "node": "a",
            "run": f"u{os.getpid()}-{next(RUNS)}",
            "host": {"slot_bytes": SLOT_BYTES, "region_bytes": slots * SLOT_BYTES},
            "peers": {"transport": "none"},
            "tiers": [{"type": "fs", "root_dir": str(tmp_path), "quota_bytes": 1 << 24}],
        }
        server = PoolServer(parse(PoolConfig, values), CLOCK)
        server.start()
        servers.append(server)
        return server

    yield make
    for server in servers:
        server.stop(unlink=True)


class Node:
    """An engine of some ranks: the scheduler's half, and a worker for each rank."""

    def __init__(self, server: PoolServer, size: int = 1) -> None:
        self.endpoint, self.size = server.addresses.client, size
        self.loaded: list[str] = []
        self.failed: set[str] = set()
        ranks = [geometry(*GROUPS, rank=rank, size=size) for rank in range(size)]
        self.cache = ranks[0]
        self.rows = [[torch.zeros(BLOCKS, 8, dtype=torch.uint8) for _ in GROUPS] for _ in ranks]
        self.workers = [
            WorkerSide(rank, BlockCopier([OpaqueViews((row,)) for row in rows]), self.attach, CLOCK)
            for rank, rows in zip(ranks, self.rows, strict=True)
        ]
        settings = ConnectorSettings(pool=self.endpoint)
        self.side = SchedulerSide(settings, self.cache, HASH_TOKENS, self.attach, CLOCK)
        self.side.open()

    def attach(self, resets: int) -> PoolClient:
        namespace = Namespace(
            model="m",
            weights_version=f"1+{resets}",
            kv_dtype=self.cache.kv_dtype,
            kv_scales=self.cache.kv_scales,
            rope="none",
            max_model_len="4096",
            layout=self.cache.layout,
            chunk_tokens=self.cache.chunk_tokens,
            tokens_per_hash=str(HASH_TOKENS),
            hash_algorithm="sha256",
            hash_seed="",
            tenant=f"{resets}",
        )
        return PoolClient.attach(self.endpoint, namespace, self.cache.wire_groups, timeout_s=0.3)

    def run(self, plan: StepPlan) -> None:
        for worker in self.workers:
            worker.take(plan)
            worker.start_loads(plan)

    def look(self, request_id: str = "") -> bool:
        """Take the workers' reports to the scheduler; say whether all ranks loaded a request."""
        for worker in self.workers:
            finished = worker.finished()
            self.loaded += list(finished.requests)
            self.failed |= finished.failed
            self.side.observed(worker.report(), [])
        return self.loaded.count(request_id) == self.size

    def compute(self, name: str, tables: list[list[int]]) -> None:
        """Let a request run from its first token to its end, and save it."""
        one = request(name)
        self.answer(one)
        self.side.allocated(one, tables, 0)
        self.run(self.side.plan([name], [name], [], lambda _: tables))
        for rank, rows in enumerate(self.rows):
            for at, row in enumerate(rows):
                for block in tables[at]:
                    row[block] = torch.tensor(self.written(name, rank, at, block))
        one.ran(40)
        self.side.finished(one, tables)
        self.run(self.side.plan([], [], [], lambda _: tables))
        soon(lambda: self.look() or not len(self.side._fence))

    @staticmethod
    def written(name: str, rank: int, at: int, block: int) -> list[int]:
        return [len(name), rank, at, block % 10, 1, 2, 3, 4]

    def answer(self, one) -> int:
        said: list[int | None] = [None]

        def ask() -> bool:
            said[0] = self.side.matched(one, 0)
            return said[0] is not None

        soon(ask)
        assert said[0] is not None
        return said[0]

    def load(self, name: str, tables: list[list[int]]) -> int:
        """Load what there is of a request, and return how many tokens came."""
        one = request(name)
        tokens = self.answer(one)
        self.loaded, self.failed = [], set()
        self.side.allocated(one, tables, tokens)
        if tokens:
            self.run(self.side.plan([], [], [], lambda _: tables))
            soon(lambda: self.look(name))
            self.side.observed(None, [name])
        self.side.finished(one, tables)
        return tokens

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.side.close()


def balanced(server: PoolServer) -> None:
    """Nothing is pinned or written when nobody is there."""
    soon(lambda: not server.stats()["pinned"] and not server.stats()["writing"])
    server.check()


@pytest.mark.parametrize("size", [1, 2])
def test_what_one_engine_saves_another_loads(start, size) -> None:
    server = start()
    first, second = Node(server, size), Node(server, size)
    assert first.load("r", TABLES) == 0
    first.compute("r", TABLES)
    assert second.load("r", OTHERS) == 32
    assert not second.failed
    for rank, rows in enumerate(second.rows):
        for at, row in enumerate(rows):
            # The window sees the last 11 of the 32 tokens: two chunks of two blocks.
            for place in range(4 if at else 0, 8):
                expected = first.written("r", rank, at, TABLES[at][place])
                assert row[OTHERS[at][place]].tolist() == expected
    assert second.load("other prompt", OTHERS) == 0
    for node in (first, second):
        assert not node.side._requests
        node.close()
    balanced(server)


def test_what_left_the_host_comes_back_from_files(start) -> None:
    server = start(slots=12)
    node = Node(server)
    for number, name in enumerate(("a", "bb", "ccc", "dddd"), 1):
        node.compute(name, TABLES)
        soon(lambda most=10 * number: server.stats()["fs_chunks"] == most)
        balanced(server)
    assert node.load("a", OTHERS) == 32
    assert not node.failed
    assert node.rows[0][0][OTHERS[0][0]].tolist() == node.written("a", 0, 0, TABLES[0][0])
    assert node.rows[0][1][OTHERS[1][7]].tolist() == node.written("a", 0, 1, TABLES[1][7])
    node.close()
    balanced(server)


def test_after_a_reset_the_engine_finds_what_it_saves_from_now_on(start) -> None:
    server = start()
    node = Node(server)
    node.compute("r", TABLES)
    node.side.reset()
    assert node.load("r", OTHERS) == 0
    node.compute("r", TABLES)
    assert node.load("r", OTHERS) == 32
    assert not node.failed
    node.close()
    balanced(server)


def test_a_pool_that_stops_costs_a_recomputation(start) -> None:
    server = start()
    node = Node(server)
    node.compute("r", TABLES)
    one = request("r")
    tokens = node.answer(one)
    assert tokens == 32
    server.stop(unlink=True)
    node.side.allocated(one, OTHERS, tokens)
    node.run(node.side.plan([], [], [], lambda _: OTHERS))
    node.loaded, node.failed = [], set()
    soon(lambda: node.look("r"))
    assert node.failed == {"r"}
    node.side.observed(None, ["r"])
    assert node.side.matched(one, 0) == 0
    node.close()
