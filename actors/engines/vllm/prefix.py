"""Which prefix of a prompt the fabric can give, and which chunks that takes. Pure arithmetic.

A prefix is usable where every cache group has what it needs of it: a full-attention group all its
chunks, a sliding window those that the next token sees. Groups may have chunks of different
lengths; a usable prefix is whole chunks in all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ....fabric.layout import GroupLayout, common_tokens
from .transfers import NULL_BLOCK, ChunkRun

Present = npt.NDArray[np.bool_]


class ChunkIndex(Protocol):
    """What is here, asked without a message. Answers are hints."""

    def leading(self, group: int, digests: Sequence[bytes]) -> int:
        """Return how many of the first chunks are here, in an unbroken row."""
        ...

    def present(self, group: int, digests: Sequence[bytes]) -> Present:
        """Return for each chunk whether it is here."""
        ...


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """One cache group as the scheduler sees it."""

    engine_group: int
    layout: GroupLayout
    block_tokens: int
    hash_tokens: int
    """Tokens of a block hash of the engine; divides the chunk's."""

    @property
    def windowed(self) -> bool:
        """Whether a prefix needs only the last of its chunks."""
        return self.layout.window_tokens is not None

    def digests(self, hashes: Sequence[bytes], first: int, end: int) -> Sequence[bytes]:
        """Return the digests of the chunks [first, end) from a request's block hashes."""
        each = self.layout.chunk_tokens // self.hash_tokens
        if each == 1:
            return hashes[first:end]
        return hashes[first * each + each - 1 : end * each : each]

    def chunks(self, tokens: int) -> int:
        """Return how many whole chunks so many tokens make."""
        return tokens // self.layout.chunk_tokens


@dataclass(frozen=True, slots=True)
class Usable:
    """A prefix that can be had."""

    tokens: int
    rows: tuple[int, ...]
    """For each group the chunks that the index has in a row from the first; 0 for windows."""


class PrefixRules:
    """The rules for one model's groups."""

    def __init__(self, groups: Sequence[EngineGroup]) -> None:
        self.groups = tuple(groups)
        self.step_tokens = common_tokens(group.layout for group in groups)
        self._full = [group for group in groups if not group.windowed]
        self._windows = [group for group in groups if group.windowed]

    def floor(self, tokens: int) -> int:
        """Return the longest prefix of at most so many tokens that is whole chunks everywhere."""
        return tokens - tokens % self.step_tokens

    def usable(
        self, hashes: Sequence[bytes], local_tokens: int, cap_tokens: int, index: ChunkIndex
    ) -> Usable:
        """Return the longest usable prefix of at most `cap_tokens`.

        Of chunks that lie in the first `local_tokens` the engine has all that is needed.
        """
        full = self.full(hashes, local_tokens, cap_tokens, index)
        if not (full.tokens and self._windows):
            return full
        return Usable(self._windowed(hashes, local_tokens, full.tokens, index), full.rows)

    def full(
        self, hashes: Sequence[bytes], local_tokens: int, cap_tokens: int, index: ChunkIndex
    ) -> Usable:
        """As `usable`, whatever windows have."""
        tokens = self.floor(cap_tokens)
        rows = [0] * len(self.groups)
        for at, group in enumerate(self.groups):
            if group.windowed:
                continue
            digests = group.digests(hashes, 0, group.chunks(tokens))
            reach = rows[at] = index.leading(group.engine_group, digests)
            local = min(group.chunks(local_tokens), len(digests))
            if reach < local:
                reach = local + index.leading(group.engine_group, digests[local:])
            tokens = min(tokens, self.floor(reach * group.layout.chunk_tokens))
        return Usable(tokens, tuple(rows))

    def _windowed(
        self, hashes: Sequence[bytes], local_tokens: int, cap_tokens: int, index: ChunkIndex
    ) -> int:
        """Return the longest prefix of at most `cap_tokens` of which all last windows are here."""
        tokens = np.arange(self.step_tokens, cap_tokens + 1, self.step_tokens)
        usable = np.ones(len(tokens), np.bool_)
        for group in self._windows:
            digests = group.digests(hashes, 0, group.chunks(cap_tokens))
            here = index.present(group.engine_group, digests)
            here[: group.chunks(local_tokens)] = True
            layout, window_tokens = group.layout, group.layout.window_tokens or cap_tokens
            # As `GroupLayout.chunks_needed`, for all prefixes at once: there may be thousands.
            ends = tokens // layout.chunk_tokens
            starts = np.maximum(tokens - window_tokens + 1, 0) // layout.chunk_tokens
            before = np.concatenate(([0], np.cumsum(here)))
            usable &= before[ends] - before[starts] == ends - starts
        whole = np.flatnonzero(usable)
        return int(tokens[whole[-1]]) if len(whole) else 0

    def load(
        self,
        hashes: Sequence[bytes],
        local_tokens: int,
        tokens: int,
        block_ids: Sequence[Sequence[int]],
    ) -> tuple[ChunkRun, ...]:
        """Return what to load for a prefix of which the engine has the first `local_tokens`.

        Blocks of the local part are never written: other requests may read them.
        """
        runs: list[ChunkRun] = []
        for group in self.groups:
            needed = group.layout.chunks_needed(tokens)
            first = max(needed.start, local_tokens // group.layout.chunk_tokens)
            if first >= needed.stop:
                continue
            each = group.layout.blocks_per_chunk(group.block_tokens)
            blocks = list(block_ids[group.engine_group][first * each : needed.stop * each])
            local = local_tokens // group.block_tokens - first * each
            if local > 0:
                blocks[:local] = [NULL_BLOCK] * local
            digests = group.digests(hashes, first, needed.stop)
            runs.append(ChunkRun(group.engine_group, first, digests, blocks))
        return tuple(runs)

    def wanted(
        self, hashes: Sequence[bytes], local_tokens: int, tokens: int, *, windows: bool
    ) -> list[tuple[EngineGroup, int, Sequence[bytes]]]:
        """Return group, first chunk and digests of what a prefix needs beyond the local part."""
        found: list[tuple[EngineGroup, int, Sequence[bytes]]] = []
        for group in self._windows if windows else self._full:
            needed = group.layout.chunks_needed(tokens)
            first = max(needed.start, local_tokens // group.layout.chunk_tokens)
            if first < needed.stop:
                found.append((group, first, group.digests(hashes, first, needed.stop)))
        return found

    @property
    def has_full(self) -> bool:
        """Whether any group needs its whole prefix."""
        return bool(self._full)

    @property
    def has_windows(self) -> bool:
        """Whether any group needs only the end of it."""
        return bool(self._windows)

    def save(
        self,
        group: EngineGroup,
        hashes: Sequence[bytes],
        first: int,
        end: int,
        block_ids: Sequence[int],
    ) -> tuple[ChunkRun, ...]:
        """Return the runs that save the chunks [first, end), without those that left the cache."""
        each = group.layout.blocks_per_chunk(group.block_tokens)
        blocks = block_ids[first * each : end * each]
        if NULL_BLOCK not in blocks:
            return (ChunkRun(group.engine_group, first, group.digests(hashes, first, end), blocks),)
        return tuple(
            ChunkRun(
                group.engine_group,
                chunk,
                group.digests(hashes, chunk, chunk + 1),
                block_ids[chunk * each : (chunk + 1) * each],
            )
            for chunk in range(first, end)
            if NULL_BLOCK not in block_ids[chunk * each : (chunk + 1) * each]
        )
