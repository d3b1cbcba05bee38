"""What of an engine's KV cache goes into chunks, and under which cache group of the fabric.

A rank describes its cache when the engine hands it over; the scheduler hears of it before the first
request. Values only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ....fabric.errors import ConfigError
from ....fabric.layout import GroupKind, GroupLayout, chunk_tokens_text, layout_id
from ....fabric.wire import GroupGeometry


@dataclass(frozen=True, slots=True)
class RankGroup:
    """One cache group of the engine."""

    engine_group: int
    layout: GroupLayout
    block_tokens: int

    @property
    def opaque(self) -> bool:
        """Whether only the engine understands the bytes."""
        return self.layout.kind is GroupKind.OPAQUE


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """The cache of one tensor-parallel rank."""

    rank: int
    size: int
    groups: tuple[RankGroup, ...]
    kv_dtype: str
    kv_scales: str

    @property
    def layout(self) -> str:
        """The namespace's field of this name."""
        return layout_id(group.layout for group in self.groups)

    @property
    def chunk_tokens(self) -> str:
        """The namespace's field of this name."""
        return chunk_tokens_text(group.layout for group in self.groups)

    @property
    def keeps_blocks(self) -> bool:
        """Whether the first blocks of a load that failed are of use without the others.

        Not where a window is: the engine has no blocks for what lies before it. And of several
        groups' blocks vLLM cannot be told which failed.
        """
        return len(self.groups) == 1 and self.groups[0].layout.window_tokens is None

    def index(self, group: int, rank: int | None = None) -> int:
        """Return the fabric's cache group for the group at this place, as this rank writes it.

        Opaque bytes of several ranks cannot lie in one chunk, so that each rank has its own.
        """
        each = self.groups[group]
        if not each.opaque:
            return each.engine_group
        stride = 1 + max(other.engine_group for other in self.groups)
        return each.engine_group + stride * (self.rank if rank is None else rank)

    def indices(self, group: int) -> Sequence[int]:
        """Return the fabric's cache groups of all ranks for the group at this place."""
        if not self.groups[group].opaque:
            return (self.groups[group].engine_group,)
        return tuple(self.index(group, rank) for rank in range(self.size))

    @property
    def wire_groups(self) -> list[GroupGeometry]:
        """What a pool is told."""
        return [
            GroupGeometry(index, each.layout.chunk_tokens, each.layout.chunk_bytes)
            for at, each in enumerate(self.groups)
            for index in self.indices(at)
        ]

    def require_same(self, other: "CacheGeometry") -> None:
        """Raise `ConfigError` if another rank's cache differs in anything but its rank."""
        if replace(other, rank=self.rank) != self:
            raise ConfigError(
                "kv_cache",
                f"of rank {other.rank} differs from that of rank {self.rank}",
                "Start all ranks of an engine with one configuration and one build of vLLM",
            )
