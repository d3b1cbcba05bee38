"""The canonical layout: how the KV of a run of tokens lies in a chunk, whatever engine computed it.

A chunk holds `chunk_tokens` tokens of one cache group: the pages of its layers, in layer order,
without anything between them. A page is one layer of it:

- DENSE: `[K, V][all heads][chunk_tokens][head_dim]`, so that the heads of a tensor-parallel rank
  are one run in K and one in V.
- MLA: `[chunk_tokens][row]`, each row padded with zeros to a multiple of 16 bytes, so that a row
  can be addressed and copied in whole words where it lies.
- STATE: the model's recurrent state after the last token of the chunk: its sections one after the
  other (say convolution, then state space), each with the parts of the ranks in rank order.

A group whose engine keeps its bytes in a way that cannot be described is OPAQUE: a chunk is then
the engine's own blocks one after the other, each with all layers, and only engines whose `tag` is
the same can share it.

Everything here is arithmetic on bytes. But for OPAQUE groups nothing depends on the engine's block
size, on its own layout or on the number of ranks: those only say which runs of the chunk a copy
touches.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import lcm
from typing import NamedTuple

from .errors import ConfigError, Malformed, Unsupported

LAYOUT_VERSION = "kvf1"
"""Prefix of every layout id. Any change of where a byte lies takes another one."""

ROW_ALIGN_BYTES = 16
"""The widest word that a GPU thread loads at once."""
SIZES = frozenset(
    {"kv_heads", "head_dim", "element_bytes", "row_bytes", "block_bytes", "block_tokens"}
)
"""Fields that count something and belong to some kinds only."""


class GroupKind(IntEnum):
    """What the layers of a cache group keep."""

    DENSE = 0
    MLA = 1
    STATE = 2
    OPAQUE = 3


class Half(IntEnum):
    """The two halves of a dense page."""

    K = 0
    V = 1


class Run(NamedTuple):
    """Contiguous bytes of a chunk."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        """The offset of the first byte behind it."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class Share:
    """What one tensor-parallel rank holds of a group.

    Ranks with the same bytes (all of them for MLA; some where there are fewer heads than ranks) are
    replicas. Each of them can read, and exactly one should write.
    """

    rank: int
    size: int
    head_first: int
    head_count: int
    """Of the heads of a DENSE group; 0 and 1 for MLA; 0 and 0 for STATE, which has no heads."""
    replica: int
    replicas: int

    def writes(self, ordinal: int) -> bool:
        """Say whether this rank writes the chunk with this ordinal in its request.

        Replicas take turns, so that the copies of a long prefix use all their links.
        """
        return ordinal % self.replicas == self.replica


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLayout:
    """The shape of one cache group. Make it with `dense`, `mla`, `state` or `opaque`.

    Raises `ConfigError` that names the field for a shape that cannot be.
    """

    kind: GroupKind
    layers: int
    chunk_tokens: int
    kv_heads: int = 0
    """All heads of the model, over all ranks."""
    head_dim: int = 0
    element_bytes: int = 0
    row_bytes: int = 0
    """What the engine keeps per token and layer, without padding."""
    state_sections: tuple[int, ...] = ()
    """Bytes of each section of the state, over all ranks. A rank holds an equal part of each."""
    window_tokens: int | None = None
    """Attention sees this many tokens, the current one among them. None: all of them."""
    block_bytes: int = 0
    """All layers of one block of an OPAQUE group."""
    block_tokens: int = 0
    """Tokens of one block of an OPAQUE group."""
    tag: str = ""
    """Everything that decides where a byte of an OPAQUE block lies: engine, backend, and so on."""

    @classmethod
    def dense(
        cls,
        layers: int,
        kv_heads: int,
        head_dim: int,
        element_bytes: int,
        chunk_tokens: int,
        *,
        window_tokens: int | None = None,
    ) -> "GroupLayout":
        """Describe a group with K and V per head."""
        return cls(
            kind=GroupKind.DENSE,
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            element_bytes=element_bytes,
            chunk_tokens=chunk_tokens,
            window_tokens=window_tokens,
        )

    @classmethod
    def mla(
        cls, layers: int, row_bytes: int, chunk_tokens: int, *, window_tokens: int | None = None
    ) -> "GroupLayout":
        """Describe a group with one compressed row per token, the same on every rank."""
        return cls(
            kind=GroupKind.MLA,
            layers=layers,
            row_bytes=row_bytes,
            chunk_tokens=chunk_tokens,
            window_tokens=window_tokens,
        )

    @classmethod
    def state(cls, layers: int, state_sections: Sequence[int], chunk_tokens: int) -> "GroupLayout":
        """Describe a group that keeps a state instead of tokens."""
        return cls(
            kind=GroupKind.STATE,
            layers=layers,
            state_sections=tuple(state_sections),
            chunk_tokens=chunk_tokens,
        )

    @classmethod
    def opaque(
        cls,
        layers: int,
        block_bytes: int,
        block_tokens: int,
        chunk_tokens: int,
        tag: str,
        *,
        window_tokens: int | None = None,
    ) -> "GroupLayout":
        """Describe a group whose blocks only engines with the same `tag` can read."""
        return cls(
            kind=GroupKind.OPAQUE,
            layers=layers,
            block_bytes=block_bytes,
            block_tokens=block_tokens,
            chunk_tokens=chunk_tokens,
            tag=tag,
            window_tokens=window_tokens,
        )

    def __post_init__(self) -> None:
        needed = {
            GroupKind.DENSE: ("kv_heads", "head_dim", "element_bytes"),
            GroupKind.MLA: ("row_bytes",),
            GroupKind.STATE: (),
            GroupKind.OPAQUE: ("block_bytes", "block_tokens"),
        }[self.kind]
        for field in ("layers", "chunk_tokens", *needed):
            if getattr(self, field) < 1:
                raise ConfigError(field, f"is {getattr(self, field)}", "It must be at least 1")
        for field in SIZES.difference(needed):
            if getattr(self, field):
                raise ConfigError(field, f"has no meaning for {self.kind.name}", "Leave it out")
        is_opaque = self.kind is GroupKind.OPAQUE
        if is_opaque != bool(self.tag) or not set(self.tag).isdisjoint("/,:"):
            raise ConfigError(
                "tag",
                f"is {self.tag!r} for {self.kind.name}",
                "Give OPAQUE a tag without '/', ',' and ':', and other kinds none",
            )
        if is_opaque and self.chunk_tokens % self.block_tokens:
            raise ConfigError(
                "chunk_tokens",
                f"{self.chunk_tokens} is not a multiple of blocks of {self.block_tokens}",
                "Give whole blocks: an OPAQUE block cannot be split",
            )
        is_state = self.kind is GroupKind.STATE
        if is_state != bool(self.state_sections) or min(self.state_sections, default=1) < 1:
            raise ConfigError(
                "state_sections",
                f"is {self.state_sections} for {self.kind.name}",
                "Give the bytes of each section for STATE, and nothing for other kinds",
            )
        if self.window_tokens is not None and (is_state or self.window_tokens < 1):
            raise ConfigError(
                "window_tokens",
                f"is {self.window_tokens} for {self.kind.name}",
                "Give at least 1 token, or None for full attention and for STATE",
            )

    @property
    def row_stride_bytes(self) -> int:
        """From one MLA row of a page to the next: `row_bytes` rounded up to 16."""
        return -(-self.row_bytes // ROW_ALIGN_BYTES) * ROW_ALIGN_BYTES

    @property
    def head_bytes(self) -> int:
        """One head's K or V of a dense page."""
        return self.chunk_tokens * self.head_dim * self.element_bytes

    @property
    def page_bytes(self) -> int:
        """One layer of a chunk."""
        if self.kind is GroupKind.DENSE:
            return len(Half) * self.kv_heads * self.head_bytes
        if self.kind is GroupKind.MLA:
            return self.chunk_tokens * self.row_stride_bytes
        if self.kind is GroupKind.OPAQUE:
            raise Malformed(f"page of {self.id}", "an opaque block has no pages")
        return sum(self.state_sections)

    @property
    def chunk_bytes(self) -> int:
        """All layers."""
        if self.kind is GroupKind.OPAQUE:
            return self.chunk_tokens // self.block_tokens * self.block_bytes
        return self.layers * self.page_bytes

    @property
    def id(self) -> str:
        """The shape as text: kind, then each field that the kind has, in this order."""
        fields: list[tuple[str, object]] = [("l", self.layers)]
        if self.kind is GroupKind.DENSE:
            fields += [("h", self.kv_heads), ("d", self.head_dim), ("e", self.element_bytes)]
        elif self.kind is GroupKind.MLA:
            fields += [("r", self.row_bytes)]
        elif self.kind is GroupKind.OPAQUE:
            fields += [("b", self.block_bytes), ("k", self.block_tokens), ("x", self.tag)]
        else:
            fields += [("s", "+".join(str(section) for section in self.state_sections))]
        fields += [("t", self.chunk_tokens)]
        if self.window_tokens is not None:
            fields += [("w", self.window_tokens)]
        return "/".join([self.kind.name.lower(), *(f"{name}{value}" for name, value in fields)])

    def page_offset(self, layer: int) -> int:
        """Where the page of this layer (of the group, from 0) begins in the chunk."""
        self._require("layer", layer, self.layers)
        return layer * self.page_bytes

    def head_run(self, layer: int, half: Half, head_first: int, head_count: int) -> Run:
        """Return the run of some neighbouring heads in one half of one dense page."""
        if self.kind is not GroupKind.DENSE:
            raise Malformed(f"head run in {self.id}", "only a dense group has heads")
        self._require("layer", layer, self.layers)
        self._require("head", head_first, self.kv_heads)
        self._require("last head", head_first + head_count - 1, self.kv_heads)
        head = half * self.kv_heads + head_first
        offset = self.page_offset(layer) + head * self.head_bytes
        return Run(offset, head_count * self.head_bytes)

    def share(self, rank: int, size: int) -> Share:
        """Say which heads a rank holds, and with whom it shares them.

        With fewer heads than ranks, neighbouring ranks hold the same head, as engines do it. Raises
        `Unsupported` where heads or sections cannot be dealt out evenly.
        """
        self._require("tensor-parallel rank", rank, size)
        if self.kind is GroupKind.OPAQUE:
            raise Malformed(f"share of {self.id}", "each rank has opaque chunks of its own")
        if self.kind is GroupKind.MLA:
            return Share(rank, size, 0, 1, rank, size)
        if self.kind is GroupKind.STATE:
            for section in self.state_sections:
                if section % size:
                    raise self._uneven(size, f"a state section of {section} bytes")
            return Share(rank, size, 0, 0, 0, 1)
        if self.kv_heads % size == 0:
            count = self.kv_heads // size
            return Share(rank, size, rank * count, count, 0, 1)
        if size % self.kv_heads == 0:
            replicas = size // self.kv_heads
            return Share(rank, size, rank // replicas, 1, rank % replicas, replicas)
        raise self._uneven(size, f"{self.kv_heads} KV heads")

    def section_runs(self, layer: int, share: Share) -> tuple[Run, ...]:
        """Return a rank's part of each section of a state page."""
        start, runs = self.page_offset(layer), list[Run]()
        for section in self.state_sections:
            part = section // share.size
            runs.append(Run(start + share.rank * part, part))
            start += section
        return tuple(runs)

    def tp_runs(self, rank: int, size: int) -> tuple[Run, ...]:
        """Return the runs of a chunk that a rank holds, in order; runs that touch are one.

        Errors as `share`.
        """
        share = self.share(rank, size)
        runs = list[Run]()
        for layer in range(self.layers):
            if self.kind is GroupKind.MLA:
                runs.append(Run(self.page_offset(layer), self.page_bytes))
            elif self.kind is GroupKind.STATE:
                runs.extend(self.section_runs(layer, share))
            else:
                runs.extend(
                    self.head_run(layer, half, share.head_first, share.head_count) for half in Half
                )
        return _joined(runs)

    def blocks_per_chunk(self, block_tokens: int) -> int:
        """Return how many engine blocks a chunk is read from; always 1 for STATE: the last one.

        Raises `ConfigError` if the engine's blocks do not fill chunks exactly.
        """
        if block_tokens < 1 or self.chunk_tokens % block_tokens:
            raise ConfigError(
                "block_tokens",
                f"{block_tokens} does not divide chunk_tokens={self.chunk_tokens} of {self.id}",
                "Give the group a chunk_tokens that is a multiple of the engine's block size",
            )
        if self.kind is GroupKind.OPAQUE and block_tokens != self.block_tokens:
            raise ConfigError(
                "block_tokens",
                f"{block_tokens} is not that of {self.id}",
                "An OPAQUE group is for engines with its block size alone",
            )
        return 1 if self.kind is GroupKind.STATE else self.chunk_tokens // block_tokens

    def chunks_needed(self, prefix_tokens: int) -> range:
        """Return which chunks of a prefix must be there before the next token can be computed.

        All of them; those that the window of the next token reaches (`window_tokens - 1` tokens
        back); for STATE the last. Raises `Malformed` for a prefix that is not whole chunks
        (`common_tokens` gives the lengths that are whole in all groups).
        """
        if prefix_tokens < 0 or prefix_tokens % self.chunk_tokens:
            raise Malformed(
                f"prefix of {prefix_tokens} tokens", f"not whole chunks of {self.chunk_tokens}"
            )
        end = prefix_tokens // self.chunk_tokens
        if self.kind is GroupKind.STATE:
            return range(max(0, end - 1), end)
        if self.window_tokens is None:
            return range(end)
        return range(max(0, prefix_tokens - self.window_tokens + 1) // self.chunk_tokens, end)

    def _require(self, what: str, value: int, bound: int) -> None:
        if not 0 <= value < bound:
            raise Malformed(f"{what} {value} in {self.id}", f"not in 0..{bound - 1}")

    def _uneven(self, size: int, what: str) -> Unsupported:
        return Unsupported(
            "tensor_parallel",
            str(size),
            f"{what} of {self.id} cannot be dealt out to {size} ranks; use a size that divides it"
            + (" or a multiple of it." if self.kind is GroupKind.DENSE else "."),
        )


def layout_id(groups: Iterable[GroupLayout]) -> str:
    """Return the text for the field `layout` of a namespace: version, then each group in order."""
    return LAYOUT_VERSION + ":" + ",".join(group.id for group in groups)


def chunk_tokens_text(groups: Iterable[GroupLayout]) -> str:
    """Return the text for the field `chunk_tokens` of a namespace."""
    return ",".join(str(group.chunk_tokens) for group in groups)


def common_tokens(groups: Iterable[GroupLayout]) -> int:
    """Return the step of the prefix lengths that are whole chunks in every group."""
    return lcm(*(group.chunk_tokens for group in groups))


def _joined(runs: Iterable[Run]) -> tuple[Run, ...]:
    joined = list[Run]()
    for run in runs:
        if joined and joined[-1].end == run.offset:
            joined[-1] = Run(joined[-1].offset, joined[-1].length + run.length)
        else:
            joined.append(run)
    return tuple(joined)
