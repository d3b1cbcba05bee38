"""Random engines against the connector's scheduler half; what they assert is in `vllm_engine`.

No block is overwritten while a save reads it; what is saved under a digest is what that digest
says; a load writes blocks of its own request alone; a request runs only on what was computed for
it; nobody waits for ever; nothing is left.
"""

from random import Random

import pytest
from vllm_model import Life, SlowAskers
from vllm_steps import Stepper, prompts
from vllm_yard import group

from kvfabric.actors.engines.vllm import scheduler as scheduler_module

STEPS_MAX = 1500
"""For a few dozen requests; each needs some tens of steps, alone in the engine."""
KINDS = {
    "full": [group(0, 8)],
    "long chunks": [group(0, 16)],
    "hybrid": [group(0, 8), group(1, 8, window=12)],
    "three groups": [group(0, 16), group(1, 8, 8, window=20), group(2, 8, window=9)],
    "windows": [group(0, 8, window=24)],
}
MODES = [(kind, "async", size) for kind in KINDS for size in (1, 2)]
MODES += [(kind, "sync", 1) for kind in ("full", "long chunks")]


def play(rng: Random, clock, kind: str, load: str, size: int, requests: int) -> Stepper:
    """Play an engine's life to its end."""
    engine = Stepper(rng, clock, KINDS[kind], size=size, load=load)
    todo = [
        Life(f"r{number}", tokens, prompt, len(engine.groups))
        for number, (tokens, prompt) in enumerate(prompts(rng, requests))
    ]
    arrivals = rng.choice([0.1, 0.3, 0.8])
    for _ in range(STEPS_MAX):
        if todo and rng.random() < arrivals:
            engine.add(todo.pop())
        if todo and rng.random() < 0.02 and engine.lives:
            life = rng.choice(sorted(engine.lives.values(), key=lambda each: each.request_id))
            if not life.over:
                engine.end(life)
        if rng.random() < 0.002:
            engine.reset()
        if rng.random() < 0.02:
            engine.evict(rng.choice([0.1, 0.5, 1.0]))
        if rng.random() < 0.5:
            engine.lose_local(rng.choice([0.5, 1.0]))
        engine.step()
        if not (todo or engine.lives or engine.saves or engine.steps):
            break
    assert not todo
    assert not engine.lives, "a request waits for ever"
    check_end(engine)
    return engine


def check_end(engine: Stepper) -> None:
    """Nothing is left of requests, questions and saves."""
    for _ in range(50):
        engine.step()
    while engine.steps:
        engine.observe(engine.steps.popleft())
    assert not engine.side._requests
    assert not len(engine.side._fence)
    assert not engine.saves
    assert not engine.pinned()
    assert all(a.closed or ask.dropped for a in engine.askers for ask in a.asks if ask.origins)
    assert sum(engine.blocks.refs) == 0
    engine.side.close()
    assert engine.pool.open_clients == 0


@pytest.fixture(autouse=True)
def slow_askers(monkeypatch) -> None:
    monkeypatch.setattr(scheduler_module, "Askers", SlowAskers)


@pytest.mark.parametrize(("kind", "load", "size"), MODES)
def test_random_engines(kind, load, size, rng, clock) -> None:
    total: dict[str, int] = {}
    for _ in range(3):
        engine = play(Random(rng.random()), clock, kind, load, size, 30)
        total = {name: total.get(name, 0) + count for name, count in engine.counts.items()}
    assert total["finished"] == 90
    assert total["saved"]
    assert total["loaded"]


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "load", "size"), MODES)
def test_many_random_engines(kind, load, size, rng, clock) -> None:
    for _ in range(60):
        play(Random(rng.random()), clock, kind, load, size, 40)
