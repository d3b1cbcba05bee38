"""`kvfabric bench p2p`: a verified pull between two pools against a raw NIXL READ."""

import os
from collections.abc import Sequence

import numpy as np

from ...fabric.clock import Clock
from ...fabric.config import PoolConfig, parse
from ...fabric.errors import Corrupt, FabricError
from ...fabric.types import Lookup, SourceRange
from ...fabric.wire import GroupGeometry
from ...tiers.pool.client import PoolClient
from ...tiers.pool.daemon import PoolProcess
from .pool import CHUNK_BYTES, CHUNKS, GB, bench_keys, bench_namespace, cut
from .raw_nixl import RawReads
from .rows import Row, run_pairs

PULL_S = 20.0
"""A gigabyte takes a quarter of a second here; beyond this something is broken."""


def bench_p2p(clock: Clock) -> Sequence[Row]:
    """Return the rows of this benchmark. Takes about 30 s and 5 GiB of memory."""
    configs = [_config(node) for node in ("source", "reader")]
    with PoolProcess(configs[0]) as source, PoolProcess(configs[1]) as reader:
        geometry = [GroupGeometry(0, 16, CHUNK_BYTES)]
        namespace = bench_namespace("pull")
        with (
            PoolClient.attach(source.addresses.client, namespace, geometry) as there,
            PoolClient.attach(reader.addresses.client, namespace, geometry) as here,
        ):
            return [_pull(clock, there, here, source.addresses.peer)]


def _config(node: str) -> PoolConfig:
    return parse(
        PoolConfig,
        {
            "node": node,
            "run": f"bench-{os.getpid()}",
            "host": {"slot_bytes": CHUNK_BYTES, "region_bytes": (CHUNKS + 8) * CHUNK_BYTES},
        },
    )


def _pull(clock: Clock, there: PoolClient, here: PoolClient, endpoint: str) -> Row:
    rng = np.random.default_rng(3)
    chunks = cut(rng.integers(0, 255, CHUNKS * CHUNK_BYTES, np.uint8))
    sources = [SourceRange("source", endpoint, 0, CHUNKS)]
    first = 0
    try:
        raw = RawReads(CHUNKS, CHUNK_BYTES)
    except FabricError:
        raw = None

    def ours() -> float:
        nonlocal first
        keys = bench_keys(first, CHUNKS)
        first += CHUNKS
        there.store_bytes(keys, range(CHUNKS), chunks)
        begun_s = clock.now_s()
        pinned = here.pin(keys, PULL_S, sources)
        seconds = clock.now_s() - begun_s
        if any((status, origin) != (Lookup.HIT, "peer") for status, _, origin in pinned):
            raise Corrupt("the pull benchmark", "a chunk did not come from the peer")
        here.release([chunk.slot for _, chunk, _ in pinned])
        return seconds

    try:
        pair = run_pairs(ours, raw.read_s if raw else lambda: float("nan"))
    finally:
        if raw:
            raw.close()
    value = CHUNKS * CHUNK_BYTES / pair.ours_s / GB
    return Row(
        "p2p",
        "pull_512x2MiB_nixl_verified",
        value,
        "GB/s",
        "raw NIXL READ, same descriptors and settings",
        pair.ratio if raw else None,
    )
