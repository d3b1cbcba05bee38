"""A pool that dies, lies, is full or was never there: the tokens stay, and nobody waits long."""

import pytest
from lab import (
    CLOCK,
    ChildEngine,
    Engine,
    EngineOptions,
    Pools,
    connector_of,
    on_pool,
    prompt,
    settled,
    until,
    whole,
)

pytestmark = pytest.mark.real_vllm

LATE_S = 5.0
"""What a fault may cost a batch of requests here, with a pool that is away and a busy machine."""
MODES = [("model", "async"), ("model", "sync"), ("hybrid", "async")]


@pytest.mark.parametrize(("kind", "load"), MODES)
def test_corrupted_chunks_are_computed_again(kind, load, request, pools: Pools, plainly) -> None:
    folder = request.getfixturevalue(kind)
    prompts = [prompt(number, 300) for number in range(4)]
    said = plainly(folder, prompts)
    pool = pools.start()
    with Engine(EngineOptions(folder, on_pool(pool.addresses.client, load=load))) as engine:
        assert engine.generate(prompts) == said
        settled(pool)
        pools.corrupt()
        assert engine.forget()
        assert engine.generate(prompts) == said
        settled(pool)
        assert engine.forget()
        before = engine.hits()
        assert engine.generate(prompts) == said
        assert (engine.hits() - before).hit == 4 * whole(299, 32)
    pool.check()


@pytest.mark.parametrize(("kind", "load"), MODES)
def test_wrong_bytes_with_a_right_checksum_change_the_answer(
    kind, load, request, monkeypatch, pools: Pools, plainly
) -> None:
    """The control of all other tests: what is loaded is what the engine reads."""
    from kvfabric.actors.engines.vllm.copier import BlockCopier

    folder = request.getfixturevalue(kind)
    prompts = [prompt(0, 300)]
    said = plainly(folder, prompts)
    pool = pools.start()
    pack = BlockCopier.pack

    def pack_wrongly(self, group, block_ids, slot) -> None:
        pack(self, group, block_ids, slot)
        slot[:] = slot[::-1].tobytes()

    monkeypatch.setattr(BlockCopier, "pack", pack_wrongly)
    with Engine(EngineOptions(folder, on_pool(pool.addresses.client, load=load))) as engine:
        assert engine.generate(prompts) == said
        settled(pool)
        assert engine.forget()
        assert engine.generate(prompts) != said
        assert engine.hits().hit == whole(299, 32)


@pytest.mark.parametrize("load", ["async", "sync"])
def test_a_pool_that_restarts_under_load(load, model, pools: Pools, plainly) -> None:
    prompts = [prompt(number, 100 + 20 * number, shared=64) for number in range(16)]
    said = plainly(model, prompts, tokens=40)
    config = pools.config()
    pool = pools.start(config)
    options = EngineOptions(model, on_pool(pool.addresses.client, load=load), blocks=60)
    with ChildEngine(options) as child:
        child.wait_ready()
        for _ in range(3):
            child.begin(prompts, 40)
            until(lambda pool=pool: pool.stats()["ready"] > 2)
            pool.kill()
            pool = pools.start(config)
            assert child.hear()["tokens"] == said
        before = child.hits()
        until(lambda: _hits_again(child, prompts, said, before), 60.0)
        settled(pool)
        pool.check()


def _hits_again(child: ChildEngine, prompts, said, before) -> bool:
    assert child.generate(prompts, 40) == said
    return (child.hits() - before).hit > 0


@pytest.mark.parametrize("load", ["async", "sync"])
def test_a_pool_that_is_gone_or_stopped(load, model, pools: Pools, plainly) -> None:
    prompts = [prompt(number, 150) for number in range(8)]
    said = plainly(model, prompts)
    pool = pools.start()
    with Engine(EngineOptions(model, on_pool(pool.addresses.client, load=load))) as engine:
        assert engine.generate(prompts[:4]) == said[:4]
        settled(pool)
        for end in (lambda: pools.freeze(pool), pool.kill):
            assert engine.forget()
            end()
            began_s = CLOCK.now_s()
            assert engine.generate(prompts) == said
            assert engine.generate(prompts) == said
            assert CLOCK.now_s() - began_s < LATE_S

        def nothing_left() -> bool:
            assert engine.generate(prompts[:1]) == said[:1]
            return not connector_of(engine).unfinished

        until(nothing_left, 20.0)


def test_an_engine_starts_without_a_pool_and_finds_it_later(model, pools: Pools, plainly) -> None:
    prompts = [prompt(0, 200)]
    said = plainly(model, prompts)
    config = pools.config()
    pool = pools.start(config)
    endpoint = pool.addresses.client
    pool.stop()
    with Engine(EngineOptions(model, on_pool(endpoint))) as engine:
        assert engine.generate(prompts) == said
        pool = pools.start(config)

        def saved() -> bool:
            assert engine.generate([*prompts, prompt(1, 100)])[:1] == said
            assert engine.forget()
            return pool.stats()["ready"] > 0

        until(saved, 20.0)
        settled(pool)
        assert engine.generate(prompts) == said
        assert engine.hits().hit > 0


@pytest.mark.parametrize(("kind", "load"), MODES)
def test_a_pool_that_is_too_small(kind, load, request, pools: Pools, plainly) -> None:
    folder = request.getfixturevalue(kind)
    prompts = [prompt(number, 200, shared=64) for number in range(6)]
    said = plainly(folder, prompts)
    pool = pools.start(slots=4)
    with Engine(EngineOptions(folder, on_pool(pool.addresses.client, load=load))) as engine:
        for _ in range(3):
            assert engine.generate(prompts) == said
            assert engine.forget()
        settled(pool, at_least=0)
        assert not connector_of(engine).unfinished
    pool.check()


@pytest.mark.parametrize("load", ["async", "sync"])
def test_an_engine_killed_while_it_copies(load, model, pools: Pools, plainly) -> None:
    prompts = [prompt(number, 400) for number in range(8)]
    said = plainly(model, prompts)
    pool = pools.start(host={"lease_s": 1.0})
    options = EngineOptions(model, on_pool(pool.addresses.client, load=load))
    for kill_at in (1, 20, 60):
        with ChildEngine(options) as child:
            child.wait_ready()
            child.begin(prompts)
            until(lambda at=kill_at: pool.stats()["ready"] + pool.stats()["writing"] >= at, 20.0)
            child.kill()
        settled(pool, at_least=0)
        until(lambda: not pool.stats()["quarantined"])
        until(lambda: not pool.stats()["pinned"])
        pool.check()
    with Engine(options) as engine:
        for _ in range(2):
            assert engine.generate(prompts) == said
            settled(pool)
            assert engine.forget()
        assert engine.hits().hit > 0


def test_settings_that_cannot_work_are_refused_by_name(model, hybrid, pools: Pools) -> None:
    pool = pools.start().addresses.client
    for folder, settings, word in [
        (model, {"load": "maybe"}, "load"),
        (model, {"chunk_tokens": 48}, "chunk_tokens"),
        (model, {"no_such": 1}, "no_such"),
        (hybrid, {"load": "sync"}, "async"),
    ]:
        with pytest.raises(Exception, match=word):
            Engine(EngineOptions(folder, on_pool(pool, **settings)))
        Engine.tidy()
