"""The face of whoever pulls chunks from peers, as the fetcher sees it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ...fabric.types import ChunkKey, Lookup, NamespaceId, SourceRange


@dataclass(frozen=True, slots=True)
class PullDone:
    """A pull is terminal; what came is committed and readable."""

    pull_id: int
    outcomes: tuple[Lookup, ...]


class Pulls(Protocol):
    """Whoever pulls chunks from peers into slots and commits them."""

    def pull(
        self,
        pull_id: int,
        source: SourceRange,
        namespace: NamespaceId,
        keys: Sequence[ChunkKey],
    ) -> None:
        """Begin. The end comes through `take_done`, by the source's deadline."""
        ...

    def take_done(self) -> Sequence[PullDone]:
        """Return the pulls that became terminal since the last call."""
        ...

    def stats(self) -> dict[str, float]:
        """Return gauges and counts."""
        ...


class NoPulls:
    """A pool without peers: every pull is a miss."""

    def __init__(self) -> None:
        self._done: list[PullDone] = []

    def pull(
        self,
        pull_id: int,
        source: SourceRange,
        namespace: NamespaceId,
        keys: Sequence[ChunkKey],
    ) -> None:
        """Answer MISS for all."""
        del source, namespace
        self._done.append(PullDone(pull_id, (Lookup.MISS,) * len(keys)))

    def take_done(self) -> Sequence[PullDone]:
        """Return the refused pulls."""
        done, self._done = self._done, []
        return done

    def stats(self) -> dict[str, float]:
        """Return nothing."""
        return {}
