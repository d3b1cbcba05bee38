"""Triton's interpreter against the numpy twin. Run by `test_interpreter.py`."""

import pytest

from kvfabric.kernels.gpu_checks import PACK_CASES, PackCase, check_pack
from kvfabric.kernels.pack.triton import TritonPacker


@pytest.mark.parametrize("case", PACK_CASES, ids=lambda case: case.name)
def test_pack_and_unpack_equal_the_twin(case: PackCase):
    check_pack(case, TritonPacker, "cpu")
