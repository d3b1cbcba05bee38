"""The example as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real_vllm

EXAMPLE = Path(__file__).parents[2] / "examples" / "vllm_shared_cache.py"
EXAMPLE_S = 170
BLOCK_TOKENS = 128
"""vLLM's default on a CPU."""


def test_the_second_engine_loads_what_the_first_computed() -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--prompts", "3", "--shared-tokens", "256"],
        capture_output=True,
        text=True,
        check=False,
        timeout=EXAMPLE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["tokens_identical"] is True
    assert figures["loaded"]["without a pool"] == figures["loaded"]["fills the pool"] == 0
    # What the prompts share is loaded once, by the first; then the engine has it itself.
    assert figures["loaded"]["finds it full"] == 256 + 3 * 2 * BLOCK_TOKENS
