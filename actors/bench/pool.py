"""`kvfabric bench pool`: bulk lookup, and verified store and load against plain memcpy."""

import os
import statistics
from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from ...fabric.clock import Clock
from ...fabric.config import PoolConfig, parse
from ...fabric.errors import Corrupt
from ...fabric.namespace import Namespace
from ...fabric.types import ChunkKey, Lookup, make_key
from ...fabric.wire import GroupGeometry
from ...tiers.pool.client import PoolClient
from ...tiers.pool.daemon import PoolProcess
from .rows import Row, run_pairs, timed_s

CHUNK_BYTES = 2 << 20
CHUNKS = 512
LOOKUP_KEYS = 1000
LOOKUPS = 200
GB = 1e9


def bench_namespace(model: str) -> Namespace:
    """Return a namespace for bytes that no model made."""
    return Namespace(
        model=model,
        weights_version="0",
        kv_dtype="uint8",
        kv_scales="none",
        rope="none",
        max_model_len="none",
        layout="bytes",
        chunk_tokens="16",
        tokens_per_hash="16",
        hash_algorithm="sha256_cbor",
        hash_seed="",
    )


def bench_keys(first: int, count: int) -> list[ChunkKey]:
    """Return distinct keys of 36 bytes."""
    wide = [xxhash.xxh3_128_digest(n.to_bytes(8, "little")) for n in range(first, first + count)]
    return [make_key(digest + digest[::-1], 0) for digest in wide]


def bench_pool(clock: Clock) -> Sequence[Row]:
    """Return the rows of this benchmark. Takes about 30 s and 3.5 GiB of memory."""
    config = parse(
        PoolConfig,
        {
            "node": "bench",
            "run": f"bench-{os.getpid()}",
            "host": {"slot_bytes": CHUNK_BYTES, "region_bytes": (CHUNKS + 8) * CHUNK_BYTES},
            "peers": {"transport": "none"},
        },
    )
    with PoolProcess(config) as pool:
        rows = [_store_load(clock, pool)]
    small = config.model_copy(
        update={
            "host": config.host.model_copy(
                update={"slot_bytes": 4096, "region_bytes": 4096 * 4 * LOOKUP_KEYS}
            )
        }
    )
    with PoolProcess(small) as pool:
        rows.append(_lookup(clock, pool))
    return rows


def cut(data: NDArray[np.uint8]) -> list[memoryview]:
    """Return views of all whole chunks."""
    return [data[i : i + CHUNK_BYTES].data for i in range(0, data.nbytes, CHUNK_BYTES)]


def _lookup(clock: Clock, pool: PoolProcess) -> Row:
    keys = bench_keys(0, LOOKUP_KEYS)
    namespace = bench_namespace("lookup")
    with PoolClient.attach(
        pool.addresses.client, namespace, [GroupGeometry(0, 16, 4096)]
    ) as client:
        chunk = memoryview(bytes(4096))
        client.store_bytes(keys, range(len(keys)), [chunk] * len(keys))
        seconds = [timed_s(clock, lambda: client.lookup(keys)) for _ in range(LOOKUPS)]
        found = client.lookup(keys)
        if not (found.states == Lookup.HIT).all():
            raise Corrupt("the lookup benchmark", "not every stored key was a hit")
    value = statistics.median(seconds) * 1e3
    return Row("pool", "lookup_1000_hits_p50_ms", value, "ms", "none", None)


def _store_load(clock: Clock, pool: PoolProcess) -> Row:
    rng = np.random.default_rng(2)
    data = rng.integers(0, 255, CHUNKS * CHUNK_BYTES, np.uint8)
    back = np.zeros_like(data)
    chunks, into = cut(data), cut(back)
    other = np.zeros_like(data)
    first = 0
    geometry = [GroupGeometry(0, 16, CHUNK_BYTES)]
    with PoolClient.attach(pool.addresses.client, bench_namespace("copy"), geometry) as client:

        def ours() -> float:
            nonlocal first
            keys = bench_keys(first, CHUNKS)
            first += CHUNKS
            begun_s = clock.now_s()
            stored = client.store_bytes(keys, range(CHUNKS), chunks)
            loaded = client.load_bytes(keys, into)
            seconds = clock.now_s() - begun_s
            if stored.committed != CHUNKS or set(loaded.statuses) != {Lookup.HIT}:
                raise Corrupt("the copy benchmark", "a chunk was not stored or not loaded")
            return seconds

        def two_memcpys() -> float:
            begun_s = clock.now_s()
            np.copyto(other, data)
            np.copyto(back, other)
            return clock.now_s() - begun_s

        pair = run_pairs(ours, two_memcpys)
        if not np.array_equal(back, data):
            raise Corrupt("the copy benchmark", "loaded bytes differ from stored ones")
    value = 2 * CHUNKS * CHUNK_BYTES / pair.ours_s / GB
    return Row(
        "pool",
        "store_load_512x2MiB_verified",
        value,
        "GB/s",
        "two memcpys of the same bytes",
        pair.ratio,
    )
