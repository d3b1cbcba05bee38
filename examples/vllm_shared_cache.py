"""vLLM engines that share one KV cache: what the first computes, the others load.

    make vllm && .venv-vllm/bin/python examples/vllm_shared_cache.py --model MODEL

Without `--model` it writes a tiny one with random weights, which needs no download and no GPU. A
pool is started on this machine; then engines run one after the other, each in a process of its own,
as if a node had restarted each time: one without the pool, one that fills it, one that finds it
full. Prints how many prompt tokens each computed, and one JSON object as the last line. Exit codes:
0; 1 if any token differs.
"""

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvfabric.fabric.config import PoolConfig, parse
from kvfabric.tiers.pool.daemon import PoolProcess

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "float32",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}
VOCABULARY = TINY["vocab_size"]
CACHE_BYTES = 64 << 20
"""Of the tiny model's engine; a real model's takes what vLLM gives it."""


@dataclass(frozen=True)
class Run:
    """What one engine did."""

    tokens: list[list[int]]
    prompt_tokens: int
    loaded_tokens: int


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder or a name that vLLM knows; default: a tiny one")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--shared-tokens", type=int, default=768, help="the same in all prompts")
    parser.add_argument("--own-tokens", type=int, default=300, help="of each prompt alone")
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument(
        "--slot-bytes", type=int, default=1 << 18, help="at least a chunk of the model's KV"
    )
    parser.add_argument("--region-bytes", type=int, default=64 << 20)
    return parser.parse_args()


def prompts_for(args: argparse.Namespace) -> list[list[int]]:
    rng = random.Random(0)
    shared = [rng.randrange(10, VOCABULARY) for _ in range(args.shared_tokens)]
    return [
        shared + [rng.randrange(10, VOCABULARY) for _ in range(args.own_tokens)]
        for _ in range(args.prompts)
    ]


def engine_options(model: str | None, folder: str) -> dict[str, Any]:
    if model:
        return {"model": model}
    Path(folder, "config.json").write_text(json.dumps(TINY))
    return {
        "model": folder,
        "load_format": "dummy",
        "enforce_eager": True,
        "kv_cache_memory_bytes": CACHE_BYTES,
    }


def generate(
    options: dict[str, Any], pool: str | None, prompts: list[list[int]], output_tokens: int
) -> Run:
    """Run one engine. The block of configuration below is all that it takes to use a pool."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    transfer = pool and {
        "kv_connector": "KVFabricConnector",
        "kv_connector_module_path": "kvfabric.actors.engines.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"pool": pool},
    }
    llm = LLM(
        **options, kv_transfer_config=transfer, skip_tokenizer_init=True, disable_log_stats=False
    )
    params = SamplingParams(
        temperature=0, max_tokens=output_tokens, ignore_eos=True, detokenize=False
    )
    tokens: list[list[int]] = []
    for prompt in prompts:
        (output,) = llm.generate(TokensPrompt(prompt_token_ids=prompt), params, use_tqdm=False)
        tokens.append(list(output.outputs[0].token_ids))
    counts = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    llm.llm_engine.engine_core.shutdown()
    loaded = int(counts.get("vllm:external_prefix_cache_hits", 0))
    return Run(tokens, sum(map(len, prompts)), loaded)


def apart(*what: Any) -> Run:
    """Run an engine in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as process:
        return process.submit(generate, *what).result()


def main() -> int:
    args = arguments()
    prompts = prompts_for(args)
    host = {"slot_bytes": args.slot_bytes, "region_bytes": args.region_bytes}
    config = parse(PoolConfig, {"node": "here", "run": f"vllm-{os.getpid()}", "host": host})
    with tempfile.TemporaryDirectory() as folder, PoolProcess(config) as pool:
        options = engine_options(args.model, folder)
        endpoint = pool.addresses.client
        runs = {
            "without a pool": apart(options, None, prompts, args.output_tokens),
            "fills the pool": apart(options, endpoint, prompts, args.output_tokens),
            "finds it full": apart(options, endpoint, prompts, args.output_tokens),
        }
    table = Table("engine", "prompt tokens", "loaded from the pool")
    for name, run in runs.items():
        table.add_row(name, f"{run.prompt_tokens:,}", f"{run.loaded_tokens:,}")
    Console().print(table)
    first, *others = runs.values()
    same = all(run.tokens == first.tokens for run in others)
    print("every token is the same" if same else "TOKENS DIFFER")
    loaded = {name: run.loaded_tokens for name, run in runs.items()}
    figures = {"tokens_identical": same, "prompt_tokens": first.prompt_tokens, "loaded": loaded}
    print(json.dumps(figures))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
