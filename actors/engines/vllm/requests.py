"""What the scheduler's half knows of one request of the engine."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Protocol

from ....fabric.types import SourceRange
from .asker import Ask
from .prefix import PrefixRules
from .transfers import NULL_BLOCK

NEVER = 1 << 62
"""More tokens than any request has."""


class EngineRequest(Protocol):
    """What is used of vLLM's `Request`."""

    request_id: str
    num_computed_tokens: int
    num_in_flight_tokens: int
    """Scheduled, and not yet seen in an output."""
    block_hashes: Sequence[bytes]
    kv_transfer_params: Mapping[str, Any] | None

    @property
    def num_tokens(self) -> int:
        """Tokens that are known, prompt and output."""
        ...


@dataclass(slots=True, eq=False)
class Tracked:
    """One request between its first lookup and the end of its last load."""

    request: EngineRequest
    saved: list[int]
    """For each group how many of the first chunks need no saving (any more)."""
    sources: tuple[SourceRange, ...] = ()
    """Peers that were named for this request; start and count are ignored: they have all of it."""
    again_s: float = 0.0
    """How long to ask the sources again for what they have not yet."""
    local_tokens: int = 0
    asks: list[Ask] = field(default_factory=list[Ask])
    """Of full groups, then of windows. The last one may not be over; all keep their pins."""
    asked_windows: bool = False
    asked: bool = False
    """Whether the tiers and sources have been asked; once is enough."""
    origins: dict[bytes, str] = field(default_factory=dict[bytes, str])
    """Digest and where it came from, of chunks that an ask brought."""
    matched_tokens: int = 0
    """The prefix that was last promised to the engine."""
    loading: bool = False
    failed: bool = False
    """A load did not bring what was promised: from now on the request computes."""
    finished: bool = False
    held: dict[int, dict[int, int]] = field(default_factory=dict[int, dict[int, int]])
    """For each windowed group, by its place: blocks of chunks that are not saved, by their index.
    The engine takes them out of its table as soon as the window is past them, most of a prompt
    before it can be saved; what they hold stays until they are given to somebody."""
    admitted_tokens: int = 0
    """Computed tokens with which the request came into its first step, or came back. `NEVER`: what
    it has is of before a reset, and is nobody's until it comes back."""

    @property
    def confirmed_tokens(self) -> int:
        """Tokens whose KV the engine has computed, as its outputs have shown.

        Those with which it was admitted may be blocks that another request of the same step is
        computing: they count when an output of this request has been seen.
        """
        request = self.request
        seen = request.num_computed_tokens - request.num_in_flight_tokens
        return min(seen, request.num_tokens) if seen > self.admitted_tokens else 0

    def hold(self, rules: PrefixRules, block_ids: Sequence[Sequence[int]]) -> None:
        """Remember the blocks of windows that a step fills."""
        for at, group in enumerate(rules.groups):
            if group.windowed:
                each = group.layout.blocks_per_chunk(group.block_tokens)
                first = self.saved[at] * each
                held = {i: b for i, b in self.held.get(at, {}).items() if i >= first}
                blocks = enumerate(block_ids[group.engine_group][first:], first)
                held.update((index, block) for index, block in blocks if block != NULL_BLOCK)
                self.held[at] = held

    def lose(self, overwritten: AbstractSet[int]) -> None:
        """Forget blocks that somebody else has now."""
        for at, held in self.held.items():
            if not overwritten.isdisjoint(held.values()):
                self.held[at] = {i: b for i, b in held.items() if b not in overwritten}

    def table(self, at: int, block_ids: Sequence[int]) -> Sequence[int]:
        """Return a group's blocks, with those that are only held."""
        held = self.held.get(at)
        if not held:
            return block_ids
        blocks = list(block_ids)
        for index, block in held.items():
            if index < len(blocks) and blocks[index] == NULL_BLOCK:
                blocks[index] = block
        return blocks

    def unsaved(self, rules: PrefixRules) -> bool:
        """Whether the request has whole chunks that were not saved."""
        tokens = self.confirmed_tokens
        return any(
            group.chunks(tokens) > saved
            for group, saved in zip(rules.groups, self.saved, strict=True)
        )
