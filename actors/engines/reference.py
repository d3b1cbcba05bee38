"""The reference engine attached to its node's pool: load what the fabric has, compute the rest.

Ownership. One engine, one cache and one pool client per process. Blocks of a sequence belong to it
until its chunks have been saved, so a block is never reused under a copy.

Failure. Whatever the pool or a peer does, the answer is computed: a pool that is silent, full or
corrupt only means that more tokens are computed. Faults are counted.

Threading. `generate` runs in one thread; chunks are saved in one more, while the model computes on.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np
import torch

from ...fabric.checksum import checksum
from ...fabric.clock import Clock
from ...fabric.errors import Corrupt, FabricError, Malformed, Unavailable
from ...fabric.keys import BlockHasher, HashAlgorithm
from ...fabric.layout import GroupLayout, layout_id
from ...fabric.namespace import Namespace
from ...fabric.types import ChunkKey, Lookup, Reserved, SourceRange
from ...fabric.wire import GroupGeometry
from ...kernels.pack import CacheOrder, EngineCacheView, make_packer
from ...kernels.reference.cache import Full
from ...kernels.reference.config import DTYPE_BYTES, ModelConfig
from ...kernels.reference.engine import Engine
from ...kernels.reference.engine import Sequence as EngineSequence
from ...tiers.pool.client import PoolClient
from .slots import SlotCopier

ORIGINS = ("host", "fs", "peer")
"""Where a reused chunk can have come from."""
LOAD_WAIT_S = 2.0
"""What a request waits for tiers and peers before it computes: a source's deadline and more."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What the workers of one deployment have in common."""

    model: ModelConfig
    chunk_tokens: int
    block_tokens: int
    num_blocks: int
    threads: int = 1
    """Of torch. Sums are divided among threads, so it is part of the namespace."""


@dataclass(slots=True)
class Generated:
    """What one request produced, and where its prompt's KV came from."""

    tokens: list[int]
    prompt_tokens: int
    computed_tokens: int
    """Prompt tokens that the model ran over."""
    reused: dict[str, int]
    """Prompt tokens loaded, by origin."""
    loaded_bytes: dict[str, int]
    ttft_s: float
    """From the call to the first token, loading included."""
    total_s: float
    faults: dict[str, int] = field(default_factory=dict[str, int])


class ReferenceWorker:
    """A reference engine with its pool. Without a pool endpoint it computes everything."""

    def __init__(self, settings: EngineSettings, pool_endpoint: str | None, clock: Clock) -> None:
        torch.set_num_threads(settings.threads)
        self.settings = settings
        self.clock = clock
        self.engine = Engine(settings.model, settings.block_tokens, settings.num_blocks)
        model = settings.model
        self.layout = GroupLayout.dense(
            model.layers,
            model.kv_heads,
            model.head_dim,
            DTYPE_BYTES[model.dtype],
            settings.chunk_tokens,
        )
        self._hasher = BlockHasher(HashAlgorithm.SHA256_CBOR, None, settings.block_tokens)
        views = [EngineCacheView.dense(c, CacheOrder.NHD) for c in self.engine.cache.layers]
        self._copier = SlotCopier(make_packer(self.layout, views), self.engine.device)
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="kvfabric-save")
        self._endpoint = pool_endpoint
        self._client: PoolClient | None = None

    def namespace(self) -> Namespace:
        """Return what must agree before KV may be shared with another engine."""
        return reference_namespace(self.settings, self.layout, self.engine.numerics)

    def generate(
        self,
        tokens: Sequence[int],
        output_tokens: int,
        sources: Iterable[SourceRange] = (),
        *,
        fabric: bool = True,
    ) -> Generated:
        """Return `output_tokens` greedy tokens after the prompt. `fabric=False` reuses nothing."""
        begun_s = self.clock.now_s()
        sequence = self.engine.start(tokens, output_tokens)
        if isinstance(sequence, Full):
            raise Unavailable(
                "the engine", 0.0, f"{sequence.wanted_blocks} blocks wanted: send fewer requests."
            )
        result = Generated([], len(tokens), 0, {}, {}, 0.0, 0.0)
        client = self._attached(result) if fabric else None
        keys = self._keys(tokens) if client else []
        saves: list[Future[None]] = []
        try:
            present = self._load(client, keys, sequence, sources, result) if client else 0
            result.tokens = [self.engine.prefill(sequence)]
            result.ttft_s = self.clock.now_s() - begun_s
            result.computed_tokens = sequence.computed_tokens
            if client:
                self._save(client, keys, present, sequence, saves, result)
            result.tokens += self.engine.decode(sequence, output_tokens - 1)
            if client:
                every = self._keys(sequence.tokens[: sequence.cached_tokens])
                self._save(client, every, len(keys), sequence, saves, result)
        finally:
            wait(saves)  # the saver reads the sequence's blocks
            self.engine.finish(sequence)
        for save in saves:
            save.result()
        result.total_s = self.clock.now_s() - begun_s
        return result

    def close(self) -> None:
        """Let go of the pool and the threads."""
        self._saver.shutdown(wait=True)
        if self._client is not None:
            self._client.close()
            self._client = None

    def _keys(self, tokens: Sequence[int]) -> list[ChunkKey]:
        return self._hasher.chunk_keys(tokens, self.settings.chunk_tokens, 0)

    def _attached(self, result: Generated) -> PoolClient | None:
        """Attach on first use, and again after the pool could not be reached or believed.

        Raises `NamespaceMismatch` or `Unsupported`: this engine is not of the pool's deployment.
        """
        if self._client is None and self._endpoint is not None:
            group = GroupGeometry(0, self.settings.chunk_tokens, self.layout.chunk_bytes)
            try:
                self._client = PoolClient.attach(
                    self._endpoint, self.namespace(), [group], self.clock
                )
            except (Unavailable, Corrupt, Malformed) as error:
                _count(result, error)
        return self._client

    def _load(
        self,
        client: PoolClient,
        keys: Sequence[ChunkKey],
        sequence: EngineSequence,
        sources: Iterable[SourceRange],
        result: Generated,
    ) -> int:
        """Load the longest prefix that the fabric has; return how many chunks of it it has."""
        chunk_tokens = self.settings.chunk_tokens
        usable = keys[: (len(sequence.tokens) - 1) // chunk_tokens]
        blocks = np.asarray(sequence.blocks).reshape(-1)
        per_chunk = chunk_tokens // self.settings.block_tokens

        def unpack(index: int, slot: memoryview, expected: int) -> int:
            summed = checksum(slot)
            if summed == expected:
                row = blocks[index * per_chunk : (index + 1) * per_chunk]
                self._copier.unpack(row, slot)
            return summed

        try:
            loaded = client.load(usable, unpack, LOAD_WAIT_S, sources)
        except FabricError as error:
            _count(result, error)
            return 0
        hits = 0
        for status, origin in zip(loaded.statuses, loaded.origins, strict=True):
            if status is not Lookup.HIT:
                break
            hits += 1
            result.reused[origin] = result.reused.get(origin, 0) + chunk_tokens
        for status, origin in zip(loaded.statuses, loaded.origins, strict=True):
            if status is Lookup.HIT:
                moved = result.loaded_bytes.get(origin, 0) + self.layout.chunk_bytes
                result.loaded_bytes[origin] = moved
        sequence.mark_cached(hits * chunk_tokens)
        return hits

    def _save(
        self,
        client: PoolClient,
        keys: Sequence[ChunkKey],
        first: int,
        sequence: EngineSequence,
        saves: list[Future[None]],
        result: Generated,
    ) -> None:
        """Hand the chunks from `first` on to the saver's thread."""
        if first >= len(keys):
            return
        per_chunk = self.settings.chunk_tokens // self.settings.block_tokens
        blocks = np.asarray(sequence.blocks)

        def save() -> None:
            def pack(index: int, slot: memoryview) -> int:
                number = first + index
                row = blocks[number * per_chunk : (number + 1) * per_chunk]
                self._copier.pack(row, slot)
                return checksum(slot)

            try:
                count = len(keys) - first
                while (
                    count
                    and Reserved.BUSY
                    in client.store(
                        keys[first : first + count], range(first, first + count), pack
                    ).reserved
                ):
                    count //= 2  # more than the pool has room for: the head serves most prompts
            except FabricError as error:
                _count(result, error)

        saves.append(self._saver.submit(save))


def reference_namespace(settings: EngineSettings, layout: GroupLayout, numerics: str) -> Namespace:
    """Return the namespace of a reference engine's KV."""
    model = settings.model
    return Namespace(
        model=model.name,
        weights_version=model.digest[:16],
        kv_dtype=f"{model.dtype} by {numerics}",
        kv_scales="none",
        rope=model.rope,
        max_model_len=str(model.max_len),
        layout=layout_id([layout]),
        chunk_tokens=str(settings.chunk_tokens),
        tokens_per_hash=str(settings.block_tokens),
        hash_algorithm=HashAlgorithm.SHA256_CBOR.value,
        hash_seed="",
    )


def _count(result: Generated, error: FabricError) -> None:
    name = type(error).__name__
    result.faults[name] = result.faults.get(name, 0) + 1
