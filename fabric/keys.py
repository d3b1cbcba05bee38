"""Block hashes and chunk keys, exactly as vLLM makes them, so that a router needs no engine.

A block hash is `H((parent, tokens, extra))`: H is SHA-256 over the canonical CBOR (`sha256_cbor`,
recommended: any language can do it) or over the pickle, protocol 5 (`sha256`, vLLM's default), of
that triple; the first block's parent is `H(seed)`. `extra` is None or a tuple of tagged tuples, in
this order: the adapter, the multimodal items that overlap the block, the cache salt (first block
only). Only full blocks have a hash. The hash of a block therefore names its whole prefix.

The key of a chunk is the hash of its last block with the index of its cache group behind it.

Two things are hashed that vLLM does not publish in its events: the tags, and the adapter's path.
Hashers are immutable and may be shared between threads. A block of 16 tokens costs about 2.5 us
with CBOR and 1.2 us with pickle on an idle core.
"""

import hashlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import cbor2
import numpy as np
import numpy.typing as npt

from .errors import ConfigError
from .types import ChunkKey, make_key

DEFAULT_SEED = "vllm-none-hash"
"""What vLLM hashes for the root when PYTHONHASHSEED is not set."""
DIGEST_BYTES = 32
PICKLE_PROTOCOL = 5
"""The highest protocol of every Python that runs vLLM; part of the hash."""


class HashAlgorithm(StrEnum):
    """The names are vLLM's `--prefix-caching-hash-algo`.

    vLLM's xxhash variants stay out: their root is random per process, so nothing can be shared.
    """

    SHA256_CBOR = "sha256_cbor"
    SHA256 = "sha256"


@dataclass(frozen=True, slots=True)
class MultimodalItem:
    """One image, clip or sound of a prompt: its content id and the tokens it takes up."""

    identifier: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class ExtraKeys:
    """What else than tokens decides the KV of a prompt. Items are in order of offset."""

    lora_name: str = ""
    lora_path: str = ""
    """Part of the hash wherever the engine knows one (seen in vLLM 0.32); empty means without."""
    multimodal: tuple[MultimodalItem, ...] = ()
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class ChainEnd:
    """Where a chain of hashes stands: the last block's digest, and how many tokens lie before."""

    digest: bytes
    tokens: int


NO_EXTRA = ExtraKeys()


def _sha256_cbor(value: Any) -> bytes:
    return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()


def _sha256_pickle(value: Any) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=PICKLE_PROTOCOL)).digest()


_HASHES: dict[HashAlgorithm, Callable[[Any], bytes]] = {
    HashAlgorithm.SHA256_CBOR: _sha256_cbor,
    HashAlgorithm.SHA256: _sha256_pickle,
}


def block_extra(extra: ExtraKeys, start: int, end: int) -> tuple[Any, ...] | None:
    """Return the third element of the hashed triple for the block of tokens [start, end).

    A multimodal item carries its offset relative to the block's start, which may be negative.
    """
    found: list[Any] = []
    if extra.lora_name:
        named = ("lora", extra.lora_name)
        found.append((*named, extra.lora_path) if extra.lora_path else named)
    found.extend(
        ("mm", item.identifier, item.offset - start)
        for item in extra.multimodal
        if item.offset < end and start < item.offset + item.length
    )
    if start == 0 and extra.cache_salt:
        found.append(("cache_salt", extra.cache_salt))
    return tuple(found) or None


def low64(digests: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    """Return the low 64 bits of 32-byte digests, as vLLM publishes them: uint64[len(digests)]."""
    words = np.frombuffer(b"".join(digests), dtype=">u8").reshape(-1, DIGEST_BYTES // 8)
    return words[:, -1].astype(np.uint64)


class BlockHasher:
    """Makes the chain of block hashes of a prompt."""

    def __init__(self, algorithm: HashAlgorithm, seed: str | None, tokens_per_hash: int) -> None:
        """Take the engine's settings; `seed` is its PYTHONHASHSEED, None where it has none.

        Raises `ConfigError` for a block of no tokens.
        """
        if tokens_per_hash < 1:
            raise ConfigError(
                "tokens_per_hash", f"{tokens_per_hash} is below 1", "Use the engine's hash block."
            )
        self.algorithm = algorithm
        self.tokens_per_hash = tokens_per_hash
        self._hash = _HASHES[algorithm]
        self.none_hash = self._hash(DEFAULT_SEED if seed is None else seed)
        self.root = ChainEnd(self.none_hash, 0)

    def hash_block(
        self, parent: bytes, tokens: Sequence[int], extra: tuple[Any, ...] | None = None
    ) -> bytes:
        """Return the digest of one full block. Tokens must be Python ints: numpy's pickle else."""
        return self._hash((parent, tuple(tokens), extra))

    def hash_blocks(
        self,
        tokens: Sequence[int] | npt.NDArray[np.integer[Any]],
        extra: ExtraKeys = NO_EXTRA,
        after: ChainEnd | None = None,
    ) -> list[bytes]:
        """Return the digests of the full blocks of `tokens`, 32 bytes each.

        `after` continues a chain: `tokens` are then those behind it. It must stand at a block
        boundary (ConfigError otherwise).
        """
        chain = self.root if after is None else after
        step = self.tokens_per_hash
        if chain.tokens % step:
            raise ConfigError(
                "after", f"{chain.tokens} tokens are no multiple of {step}", "Continue full blocks."
            )
        plain = [int(token) for token in tokens]
        digests: list[bytes] = []
        parent = chain.digest
        for start in range(0, len(plain) - step + 1, step):
            at = chain.tokens + start
            keys = None if extra is NO_EXTRA else block_extra(extra, at, at + step)
            parent = self._hash((parent, tuple(plain[start : start + step]), keys))
            digests.append(parent)
        return digests

    def chunk_digests(
        self,
        tokens: Sequence[int] | npt.NDArray[np.integer[Any]],
        chunk_tokens: int,
        extra: ExtraKeys = NO_EXTRA,
        after: ChainEnd | None = None,
    ) -> list[bytes]:
        """Return the digest of the last block of every full chunk.

        Raises `ConfigError` unless `chunk_tokens` is a multiple of `tokens_per_hash`, and `after`
        stands at a chunk boundary.
        """
        self.require_chunk(chunk_tokens)
        if after is not None and after.tokens % chunk_tokens:
            raise ConfigError(
                "after",
                f"{after.tokens} tokens are no multiple of {chunk_tokens}",
                "Continue at a chunk boundary.",
            )
        whole = len(tokens) - len(tokens) % chunk_tokens
        per_chunk = chunk_tokens // self.tokens_per_hash
        return self.hash_blocks(tokens[:whole], extra, after)[per_chunk - 1 :: per_chunk]

    def chunk_keys(
        self,
        tokens: Sequence[int] | npt.NDArray[np.integer[Any]],
        chunk_tokens: int,
        group: int,
        extra: ExtraKeys = NO_EXTRA,
        after: ChainEnd | None = None,
    ) -> list[ChunkKey]:
        """Return the keys of the full chunks of `tokens` in a cache group. See `chunk_digests`."""
        digests = self.chunk_digests(tokens, chunk_tokens, extra, after)
        return [make_key(digest, group) for digest in digests]

    def require_chunk(self, chunk_tokens: int) -> None:
        """Raise `ConfigError` unless a chunk holds a whole number of hash blocks."""
        if chunk_tokens < 1 or chunk_tokens % self.tokens_per_hash:
            raise ConfigError(
                "chunk_tokens",
                f"{chunk_tokens} is not a multiple of tokens_per_hash={self.tokens_per_hash}",
                "Use a multiple, or an engine with smaller blocks.",
            )
