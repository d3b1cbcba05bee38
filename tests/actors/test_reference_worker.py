"""The reference engine attached to a pool in this process: it answers whatever the pool does."""

import os
from pathlib import Path

import pytest

from kvfabric.actors.engines.reference import EngineSettings, ReferenceWorker
from kvfabric.fabric.config import PoolConfig, parse
from kvfabric.kernels.reference.config import ModelConfig
from kvfabric.tiers.pool.client import PoolClient
from kvfabric.tiers.pool.server import PoolServer

MODEL = ModelConfig(
    layers=1, hidden=16, heads=2, kv_heads=1, head_dim=8, mlp_hidden=16, max_len=200
)
SETTINGS = EngineSettings(MODEL, chunk_tokens=16, block_tokens=8, num_blocks=32)
PROMPT = list(range(1, 71))


@pytest.fixture
def server(clock):
    host = {"slot_bytes": 4096, "region_bytes": 64 * 4096}
    values = {"node": "a", "run": f"w{os.getpid()}", "host": host, "peers": {"transport": "none"}}
    made = PoolServer(parse(PoolConfig, values), clock)
    made.start()
    yield made
    made.stop(unlink=True)


@pytest.fixture
def worker(server, clock):
    made = ReferenceWorker(SETTINGS, server.addresses.client, clock)
    yield made
    made.close()


def test_the_second_time_is_reused_and_gives_the_same_tokens(worker) -> None:
    first = worker.generate(PROMPT, 6)
    second = worker.generate(PROMPT, 6)
    assert (first.reused, second.reused) == ({}, {"host": 64})
    alone = worker.generate(PROMPT, 6, fabric=False)
    assert first.tokens == second.tokens == alone.tokens
    worker.engine.check()


def test_a_prompt_larger_than_the_region_keeps_its_head(clock) -> None:
    host = {"slot_bytes": 4096, "region_bytes": 3 * 4096}
    values = {"node": "s", "run": f"w{os.getpid()}", "host": host, "peers": {"transport": "none"}}
    small = PoolServer(parse(PoolConfig, values), clock)
    small.start()
    worker = ReferenceWorker(SETTINGS, small.addresses.client, clock)
    try:
        first = worker.generate(PROMPT, 1)
        second = worker.generate(PROMPT, 1)
    finally:
        worker.close()
        small.stop(unlink=True)
    assert second.reused == {"host": 32}
    assert first.tokens == second.tokens


def test_blocks_come_back_when_a_save_fails_in_a_way_nobody_knows(worker, monkeypatch) -> None:
    def store(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(PoolClient, "store", store)
    with pytest.raises(RuntimeError):
        worker.generate(PROMPT, 6)
    assert worker.engine.cache.allocator.used_blocks == 0
    worker.engine.check()


def test_a_control_file_that_cannot_be_believed_only_means_more_work(worker, server) -> None:
    control = Path(server.region.control_path)
    with control.open("r+b") as file:
        file.write(b"?")
    got = worker.generate(PROMPT, 6)
    assert got.tokens == worker.generate(PROMPT, 6, fabric=False).tokens
    assert got.faults == {"Corrupt": 1}
