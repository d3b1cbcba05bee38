"""Benchmarks: each figure beside a peer's or a physical limit's, measured in the same run."""

from collections.abc import Callable, Mapping, Sequence

from ...fabric.clock import Clock
from .p2p import bench_p2p
from .pool import bench_pool
from .rows import Row
from .vllm import bench_vllm

BENCHES: Mapping[str, Callable[[Clock], Sequence[Row]]] = {
    "pool": bench_pool,
    "p2p": bench_p2p,
    "vllm": bench_vllm,
}
"""By the name that `kvfabric bench` takes."""
