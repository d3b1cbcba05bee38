"""The laboratory itself: engines repeat themselves, look at all of a prompt, and leave nothing."""

import pytest
from lab import ChildEngine, Engine, EngineOptions, prompt

pytestmark = pytest.mark.real_vllm


@pytest.mark.parametrize("kind", ["model", "hybrid"])
def test_an_engine_repeats_what_another_said(kind, request, plainly) -> None:
    folder = request.getfixturevalue(kind)
    prompts = [prompt(number, 200) for number in range(3)]
    said = plainly(folder, prompts)
    with Engine(EngineOptions(folder)) as engine:
        assert engine.generate(prompts) == said
        assert engine.local_hits() == 0
        assert engine.generate(prompts) == said
        assert engine.local_hits() >= 3 * 160
        assert engine.hits().asked == 0


def test_what_a_model_says_hangs_on_the_whole_prompt(model, plainly) -> None:
    whole = prompt(0, 200)
    swapped = whole[:32] + whole[64:96] + whole[32:64] + whole[96:]
    other = [whole[0] + 1, *whole[1:]]
    said = plainly(model, [whole, swapped, other])
    assert said[0] != said[1]
    assert said[0] != said[2]


def test_an_engine_in_a_child_says_the_same(model, plainly) -> None:
    prompts = [prompt(number, 100) for number in range(2)]
    said = plainly(model, prompts)
    with ChildEngine(EngineOptions(model)) as child:
        assert child.wait_ready().generate(prompts) == said
        assert child.hits().asked == 0


def test_a_killed_child_leaves_nothing(model) -> None:
    with ChildEngine(EngineOptions(model)) as child:
        child.wait_ready()
        child.kill()
