"""Where attention keeps K and V as they are, chunks do not know which engine made them."""

import pytest
from lab import ChildEngine, EngineOptions, Pools, on_pool, prompt, settled, whole

pytestmark = pytest.mark.real_vllm

CHUNK_TOKENS = 64


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("model", ("LBNHC", 32), ("LBHNC", 32)),
        ("model", ("BLHNC", 16), ("LBNHC", 16)),
        ("hybrid", ("LBHNC", 32), ("LBNHC", 16)),
    ],
)
def test_engines_of_other_memory_orders_and_block_sizes_share_chunks(
    kind, first, second, request, pools: Pools
) -> None:
    """Other block sizes only where vLLM hashes blocks of one length in both."""
    folder = request.getfixturevalue(kind)
    prompts = [prompt(number, 150 + 50 * number) for number in range(4)]
    pool = pools.start()
    transfer = on_pool(pool.addresses.client, chunk_tokens=CHUNK_TOKENS)
    with ChildEngine(EngineOptions(folder, None, 32, order="LBHNC")) as plain:
        said = plain.wait_ready().generate(prompts)
    for number, (order, block_tokens) in enumerate((first, second)):
        options = EngineOptions(
            folder,
            transfer,
            block_tokens,
            order=order,
            hash_tokens=second[1] if kind == "hybrid" else None,
        )
        with ChildEngine(options) as engine:
            assert engine.wait_ready().generate(prompts) == said
            expected = sum(whole(len(each) - 1, CHUNK_TOKENS) for each in prompts)
            assert engine.hits().hit == number * expected
        settled(pool)
    pool.check()
