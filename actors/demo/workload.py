"""What the demo asks of the engines: requests in order of arrival, from a trace or made up.

A request brings the tokens that are new in its turn. Its prompt is what the conversation holds so
far (the prompt before and the answer to it), then these. So a prompt can depend on what engines
generated, and only `Conversations` knows it. Trace requests are conversations of one turn.

Everything here is a pure function of its arguments and seed.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Protocol

from ...fabric.errors import ConfigError, Malformed
from .trace import Scale, Tokens, made_up_tokens, prompt_tokens, read_trace

FIRST_PROMPT_TOKENS = 12 * 1024
TURN_TOKENS = 4 * 1024
TURNS = 8
"""The published multi-turn workload of vLLM's tiering: a 12K-token first prompt, 4K per turn."""

SYSTEM_TOKENS = 2 * 1024
"""Of the first prompt, shared by all conversations."""


@dataclass(frozen=True, slots=True)
class Request:
    """One turn of one conversation."""

    request_id: int
    """Counts from 0 in order of arrival."""
    conversation: int
    turn: int
    """Counts from 0."""
    last: bool
    """Whether the conversation ends with it."""
    arrival_s: float
    """Since the start of the run; not before the turn above it has been answered."""
    new_tokens: Tokens
    output_tokens: int


class Workload(Protocol):
    """A source of requests."""

    def requests(self) -> Iterator[Request]:
        """Yield the requests in order of arrival, the same ones each time."""
        ...


@dataclass(frozen=True, slots=True)
class TraceWorkload:
    """The first requests of a trace file, scaled. Errors are those of `read_trace` and `Scale`."""

    path: str | Path
    scale: float
    requests_max: int
    seed: int = 0

    def requests(self) -> Iterator[Request]:
        """Yield one request per line."""
        scale = Scale(self.scale)
        records = zip(range(self.requests_max), read_trace(self.path), strict=False)
        for number, record in records:
            yield Request(
                request_id=number,
                conversation=number,
                turn=0,
                last=True,
                arrival_s=record.timestamp / 1000,
                new_tokens=prompt_tokens(record, scale, self.seed),
                output_tokens=scale.tokens(record.output_length),
            )


@dataclass(frozen=True, slots=True)
class MultiTurnWorkload:
    """Conversations that grow turn by turn, interleaved, with one system prompt for all.

    Token counts are before scaling. Raises `ConfigError` for counts that cannot be.
    """

    conversations: int
    scale: float
    turns: int = TURNS
    system_tokens: int = SYSTEM_TOKENS
    first_prompt_tokens: int = FIRST_PROMPT_TOKENS
    """System prompt included."""
    turn_tokens: int = TURN_TOKENS
    """New in every later turn, beside the answer to the one before."""
    output_tokens: int = 512
    think_s: float = 1.0
    """Mean time between the turns of a conversation, exponentially distributed."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("conversations", "turns", "system_tokens", "turn_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"is {getattr(self, name)}", "Give a number above 0")
        if self.first_prompt_tokens <= self.system_tokens:
            problem = f"{self.first_prompt_tokens} leaves nothing beside the system prompt"
            raise ConfigError("first_prompt_tokens", problem, "Make it above system_tokens")
        if self.think_s <= 0:
            raise ConfigError("think_s", f"is {self.think_s:g}", "Give a time above 0")

    def requests(self) -> Iterator[Request]:
        """Yield all turns of all conversations."""
        scale = Scale(self.scale)
        for number, (arrival_s, conversation, turn) in enumerate(self._arrivals()):
            yield Request(
                request_id=number,
                conversation=conversation,
                turn=turn,
                last=turn == self.turns - 1,
                arrival_s=arrival_s,
                new_tokens=self._new_tokens(scale, conversation, turn),
                output_tokens=scale.tokens(self.output_tokens),
            )

    def _arrivals(self) -> list[tuple[float, int, int]]:
        rng = random.Random(self.seed)
        arrivals: list[tuple[float, int, int]] = []
        for conversation in range(self.conversations):
            gaps = (rng.expovariate(1 / self.think_s) for _ in range(self.turns))
            arrivals += [(at, conversation, turn) for turn, at in enumerate(accumulate(gaps))]
        return sorted(arrivals, key=lambda arrival: (arrival[0], arrival[2], arrival[1]))

    def _new_tokens(self, scale: Scale, conversation: int, turn: int) -> Tokens:
        label = f"multi-turn {self.seed} conversation {conversation} turn {turn}"
        if turn > 0:
            return made_up_tokens(label, scale.tokens(self.turn_tokens))
        system = made_up_tokens(f"multi-turn {self.seed} system", scale.tokens(self.system_tokens))
        own = scale.tokens(self.first_prompt_tokens) - len(system)
        return system + made_up_tokens(label, max(1, own))


@dataclass(slots=True)
class _Conversation:
    """What was said, and which turn comes next."""

    history: Tokens = ()
    next_turn: int = 0
    asked: bool = False


@dataclass(slots=True)
class Conversations:
    """Follows conversations, so that each turn's prompt continues what engines answered.

    Holds one history per conversation that is under way; the last turn's answer drops it. Raises
    `Malformed` for a turn out of order.
    """

    _open: dict[int, _Conversation] = field(default_factory=dict[int, _Conversation])

    @property
    def under_way(self) -> int:
        """Conversations that began and have not ended."""
        return len(self._open)

    def next_prompt(self, request: Request) -> Tokens:
        """Return the prompt of a request: all said before, then its new tokens."""
        conversation = self._open.get(request.conversation, _Conversation())
        self._require_turn(request, conversation, asked=False)
        conversation.history += request.new_tokens
        conversation.asked = True
        self._open[request.conversation] = conversation
        return conversation.history

    def answer(self, request: Request, outputs: Sequence[int]) -> None:
        """Add what an engine generated for a request."""
        conversation = self._open.get(request.conversation, _Conversation())
        self._require_turn(request, conversation, asked=True)
        conversation.history += tuple(outputs)
        conversation.next_turn += 1
        conversation.asked = False
        if request.last:
            del self._open[request.conversation]

    def _require_turn(self, request: Request, conversation: _Conversation, *, asked: bool) -> None:
        if (request.turn, asked) != (conversation.next_turn, conversation.asked):
            doing = "answered" if asked else "asked"
            waiting = "an answer" if conversation.asked else "a prompt"
            problem = f"{doing} while turn {conversation.next_turn} waits for {waiting}"
            what = f"turn {request.turn} of conversation {request.conversation}"
            raise Malformed(what, problem)


def longest_tokens(requests: Iterable[Request]) -> int:
    """Return the most tokens, prompt and answer, that any request reaches: an engine's `max_len`.

    It assumes that every answer has its full `output_tokens`.
    """
    sizes: dict[int, int] = {}
    for request in requests:
        grown = sizes.get(request.conversation, 0) + len(request.new_tokens) + request.output_tokens
        sizes[request.conversation] = grown
    return max(sizes.values(), default=0)
