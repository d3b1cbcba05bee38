"""The script of GPU checks: in Triton's interpreter, without a GPU, with a kernel that is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvfabric.kernels.gpu_checks import PACK_CASES, check_pack, main
from kvfabric.kernels.pack.naive import NumpyPacker


@pytest.mark.slow
def test_every_kernel_equals_its_twin_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "kvfabric.kernels.gpu_checks"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=55,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) > len(PACK_CASES)
    assert all(line["ok"] for line in lines)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_checks_say_that_they_did_nothing(capsys: pytest.CaptureFixture[str]):
    assert main() == 0
    assert capsys.readouterr().out == "no GPU here, nothing checked\n"


class WritesBehind(NumpyPacker):
    def pack(self, block_ids: Any, chunks: Any, slots: Any) -> None:
        super().pack(block_ids, chunks, slots)
        chunks[slots[0], self.group.chunk_bytes] ^= 1


class ForgetsToUnpack(NumpyPacker):
    def unpack(self, block_ids: Any, chunks: Any, slots: Any) -> None:
        super().unpack(block_ids[:-1], chunks, slots[:-1])


@pytest.mark.parametrize(
    ("packer", "message"), [(WritesBehind, "packed chunks"), (ForgetsToUnpack, "unpacked cache")]
)
def test_a_wrong_kernel_is_caught(packer: type[NumpyPacker], message: str):
    with pytest.raises(AssertionError, match=message):
        check_pack(PACK_CASES[0], packer, "cpu")
