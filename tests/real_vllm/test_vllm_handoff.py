"""Prefill and decode on two pools, as routers order it, and sources that are not there."""

import socket
from contextlib import closing

import pytest
from lab import CLOCK, ChildEngine, Engine, EngineOptions, Pools, on_pool, prompt, settled, whole

pytestmark = pytest.mark.real_vllm

PEERS = {"transport": "nixl"}
DECODER = {"remote_decoder": {"remote_host": "127.0.0.1", "remote_port": 1}}
DEAD_SOURCE_S = 2.0


@pytest.mark.parametrize("kind", ["model", "hybrid"])
def test_prefill_here_and_decode_there(kind, request, pools: Pools, plainly) -> None:
    folder = request.getfixturevalue(kind)
    prompts = [prompt(number, 300) for number in range(3)]
    said = plainly(folder, prompts)
    here, there = (pools.start(node=node, peers=PEERS) for node in "ab")
    there_options = EngineOptions(folder, on_pool(there.addresses.client))
    with (
        ChildEngine(EngineOptions(folder, on_pool(here.addresses.client))) as prefill,
        Engine(there_options) as decode,
    ):
        prefill.wait_ready()
        for number, (each, answer) in enumerate(zip(prompts, said, strict=True), 1):
            assert prefill.generate([each], 1, DECODER) == [answer[:1]]
            (params,) = prefill.handed
            port = here.addresses.peer.rpartition(":")[2]
            assert params["remote_prefiller"]["remote_host"] == "127.0.0.1"
            assert str(params["remote_prefiller"]["remote_port"]) == port
            assert decode.generate([each], transfer=params) == [answer]
            assert decode.hits().hit == number * whole(299, 32)
    for pool in (here, there):
        settled(pool)
        pool.check()


@pytest.mark.parametrize("name", ["remote_kv_source", "kvfabric"])
def test_a_router_names_the_source(name, model, pools: Pools, plainly) -> None:
    (asked,) = prompts = [prompt(0, 300)]
    said = plainly(model, prompts)
    here, there = (pools.start(node=node, peers=PEERS) for node in "ab")
    with Engine(EngineOptions(model, on_pool(here.addresses.client))) as engine:
        assert engine.generate(prompts) == said
    settled(here)
    port = int(here.addresses.peer.rpartition(":")[2])
    params = {
        "remote_kv_source": {"remote_host": "127.0.0.1", "remote_port": port},
        "kvfabric": {"sources": [here.addresses.peer]},
    }
    with Engine(EngineOptions(model, on_pool(there.addresses.client))) as engine:
        assert engine.generate([asked], transfer={name: params[name]}) == said
        assert engine.hits().hit == whole(299, 32)


def test_a_dead_source_costs_little(model, pools: Pools, plainly) -> None:
    prompts = [prompt(number, 300) for number in range(10)]
    said = plainly(model, prompts)
    pool = pools.start(peers=PEERS)
    with (
        closing(socket.socket()) as deaf,
        Engine(EngineOptions(model, on_pool(pool.addresses.client))) as engine,
    ):
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        asked = iter(zip(prompts, said, strict=True))

        def seconds(params=None) -> float:
            each, answer = next(asked)
            began_s = CLOCK.now_s()
            assert engine.generate([each], transfer=params) == [answer]
            return CLOCK.now_s() - began_s

        seconds()
        plain_s = min(seconds() for _ in range(3))
        with closing(socket.socket()) as gone:
            gone.bind(("127.0.0.1", 0))
            closed_port = gone.getsockname()[1]
        for port in (deaf.getsockname()[1], closed_port):
            for key in ("remote_prefiller", "remote_kv_source"):
                params = {key: {"remote_host": "127.0.0.1", "remote_port": port}}
                assert seconds(params) - plain_s <= DEAD_SOURCE_S
        both = [f"tcp://127.0.0.1:{port}" for port in (closed_port, deaf.getsockname()[1])]
        assert seconds({"kvfabric": {"sources": both}}) - plain_s <= DEAD_SOURCE_S


RUBBISH = [
    {"remote_prefiller": "10.0.0.1"},
    {"remote_prefiller": {"remote_host": 7, "remote_port": "x"}},
    {"remote_kv_source": {"remote_host": "no such host", "remote_port": 70000}},
    {"kvfabric": {"sources": ["tcp://", "file:///etc", "", "tcp://127.0.0.1:99999"]}},
    {"kvfabric": [1]},
    {"do_remote_decode": True, "remote_block_ids": [[1, 2]]},
]


def test_rubbish_from_a_router_costs_a_recomputation_at_most(model, pools: Pools, plainly) -> None:
    prompts = [prompt(number, 100) for number in range(len(RUBBISH))]
    said = plainly(model, prompts)
    pool = pools.start(peers=PEERS)
    with Engine(EngineOptions(model, on_pool(pool.addresses.client))) as engine:
        for params, each, answer in zip(RUBBISH, prompts, said, strict=True):
            assert engine.generate([each], transfer=params) == [answer]
    pool.check()
