"""Where attention keeps K and V as they are, chunks do not know which engine made them."""

import pytest
from lab import ChildEngine, EngineOptions, Pools, on_pool, prompt, settled, whole

pytestmark = pytest.mark.real_vllm

CHUNK_TOKENS = 64


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("model", ("LBNHC", 16), ("LBHNC", 64)),
        ("model", ("BLHNC", 64), ("LBNHC", 32)),
        ("hybrid", ("LBHNC", 32), ("LBNHC", 16)),
    ],
)
def test_engines_of_other_block_sizes_and_memory_orders_share_chunks(
    kind, first, second, request, pools: Pools
) -> None:
    folder = request.getfixturevalue(kind)
    prompts = [prompt(number, 150 + 50 * number) for number in range(4)]
    pool = pools.start()
    transfer = on_pool(pool.addresses.client, chunk_tokens=CHUNK_TOKENS)
    with ChildEngine(EngineOptions(folder, None, 32, order="LBHNC")) as plain:
        said = plain.wait_ready().generate(prompts)
    for number, (order, block_tokens) in enumerate((first, second)):
        options = EngineOptions(folder, transfer, block_tokens, order=order)
        with ChildEngine(options) as engine:
            assert engine.wait_ready().generate(prompts) == said
            expected = sum(whole(len(each) - 1, CHUNK_TOKENS) for each in prompts)
            assert engine.hits().hit == number * expected
        settled(pool)
    pool.check()
