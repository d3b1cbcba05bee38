"""The reference engine: sequences, a paged cache, aligned prefill, greedy decode.

Ownership. The engine owns its cache; a `Sequence` holds its blocks from `start` to `finish`.

Lifecycle. `start`; the caller may write KV of a prefix into the sequence's blocks and call
`mark_cached`; `prefill` computes the rest and the first token; `decode` adds tokens; `finish`.

What may be shared. Every pass runs on one fixed shape (see `model`), so KV bytes are a function of
the tokens alone. A chunk may be stored and loaded whether prefill or decode wrote it, and a loaded
prefix may end anywhere: `sequence.cached_tokens` says how many tokens have their KV in place. The
token generated last has none yet.

Failure. `start` answers `Full` when blocks are short, and nothing is taken. Misuse raises `Closed`
or `Unsupported`.

Threading. One thread at a time; `on_piece` is called in it, between pieces.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items

import torch

from ...fabric.errors import Closed, ConfigError, Conservation, Unsupported
from .cache import Full, PagedCache
from .config import ModelConfig
from .model import Decoder
from .tokenizer import PAD

PREFILL_TOKENS = 32
"""Rows of a pass. The demo model on one core, 1024-token prompts: 16, 32 and 64 rows prefill 4600,
6900 and 8900 tokens/s and decode a token in 4.0, 5.7 and 8.8 ms."""

OnPiece = Callable[[int, int], None]
"""Told that the KV of positions `[start, end)` is now in the cache."""


class Sequence:
    """One request in the engine. Made by `Engine.start`."""

    def __init__(
        self, tokens: list[int], capacity_tokens: int, blocks: tuple[int, ...], table: torch.Tensor
    ) -> None:
        self.tokens = tokens
        """Prompt, then what was generated."""
        self.prompt_tokens = len(tokens)
        self.capacity_tokens = capacity_tokens
        """Prompt and generated tokens that it may reach."""
        self.blocks = blocks
        """Numbers of its blocks in the cache, in token order."""
        self.table = table
        """The same, int64 on the device, repeated at its end to whole pieces (for gathers)."""
        self.logits: torch.Tensor | None = None
        """Float32 `[vocab]` after the last computed token."""
        self.computed_tokens = 0
        """Positions that this engine computed, decode steps among them."""
        self.finished = False
        self._cached_tokens = 0

    @property
    def cached_tokens(self) -> int:
        """Tokens from the start whose KV is in place."""
        return self._cached_tokens

    def mark_cached(self, tokens: int) -> None:
        """Say that the caller has put KV of the first `tokens` tokens into the blocks.

        Raises `Unsupported` when that is fewer than before or more than the sequence has.
        """
        if not self._cached_tokens <= tokens <= len(self.tokens):
            allowed = f"Give {self._cached_tokens} to {len(self.tokens)}."
            raise Unsupported("cached_tokens", str(tokens), allowed)
        self._cached_tokens = tokens


class Engine:
    """A model and its cache on one device. Raises `ConfigError` for sizes that do not fit."""

    def __init__(
        self,
        config: ModelConfig,
        block_tokens: int,
        num_blocks: int,
        prefill_tokens: int = PREFILL_TOKENS,
        device: str = "auto",
    ) -> None:
        if block_tokens < 1 or num_blocks < 1 or prefill_tokens < 1:
            sizes = f"{block_tokens}, {num_blocks}, {prefill_tokens}"
            raise ConfigError(
                "block_tokens, num_blocks, prefill_tokens", f"are {sizes}", "Give numbers above 0"
            )
        if prefill_tokens % block_tokens:
            problem = f"{prefill_tokens} is not a multiple of block_tokens {block_tokens}"
            raise ConfigError("prefill_tokens", problem, "A piece must end at a block's end")
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.config = config
        self.device = torch.device(device)
        self.prefill_tokens = prefill_tokens
        self.cache = PagedCache(config, block_tokens, num_blocks, self.device)
        self._decoder = Decoder(config, prefill_tokens, self.device)
        self._live: set[Sequence] = set()

    @property
    def numerics(self) -> str:
        """What two engines must have in common, beside the config, to agree in every bit.

        Threads of torch are in it, because they divide sums; workers set one (`numerics` is read
        when asked, so set them before).
        """
        if self.device.type == "cpu":
            capability = torch.backends.cpu.get_cpu_capability()
            chip = f"{capability}, threads {torch.get_num_threads()}"
        else:
            chip = torch.cuda.get_device_name(self.device)
        return f"torch {torch.__version__}, {chip}, pieces of {self.prefill_tokens}"

    def start(self, tokens: Items[int], output_tokens: int) -> Sequence | Full:
        """Take blocks for a prompt and all that it may generate, or none.

        Raises `Unsupported` for an empty prompt, a token outside the vocabulary, or more tokens
        than `max_len`.
        """
        total = len(tokens) + output_tokens
        if not tokens or output_tokens < 0:
            sizes = f"{len(tokens)} + {output_tokens}"
            raise Unsupported("prompt + output tokens", sizes, "Send at least one prompt token.")
        if min(tokens) < 0 or max(tokens) >= self.config.vocab:
            span = f"{min(tokens)}..{max(tokens)}"
            raise Unsupported("tokens", span, f"Tokens are 0 to {self.config.vocab - 1}.")
        if total > self.config.max_len:
            remedy = f"The model's max_len is {self.config.max_len}."
            raise Unsupported("prompt + output tokens", str(total), remedy)
        taken = self.cache.allocator.allocate(-(-total // self.cache.block_tokens))
        if isinstance(taken, Full):
            return taken
        per_piece = self.prefill_tokens // self.cache.block_tokens
        fill = -len(taken.blocks) % per_piece
        table = torch.tensor(taken.blocks + taken.blocks[:1] * fill, device=self.device)
        sequence = Sequence(list(tokens), total, taken.blocks, table)
        self._live.add(sequence)
        return sequence

    def prefill(self, sequence: Sequence, on_piece: OnPiece | None = None) -> int:
        """Compute what is not cached of the tokens and return the next one, appended to them.

        The last token is computed in any case, for its logits. A piece ends at a multiple of
        `prefill_tokens` or at the last token.
        """
        self._require_live(sequence)
        end = len(sequence.tokens)
        position = min(sequence.cached_tokens, end - 1)
        while position < end:
            boundary = (position // self.prefill_tokens + 1) * self.prefill_tokens
            stop = min(boundary, end)
            self._compute(sequence, position, stop)
            if on_piece is not None:
                on_piece(position, stop)
            position = stop
        return self._append_next(sequence)

    def decode(self, sequence: Sequence, steps: int) -> list[int]:
        """Generate `steps` more tokens after `prefill`, one at a time, and return them.

        Raises `Unsupported` when blocks were not taken for so many, or before `prefill`.
        """
        self._require_live(sequence)
        if sequence.logits is None:
            raise Unsupported("decode", "before prefill", "Call prefill first.")
        room = sequence.capacity_tokens - len(sequence.tokens)
        if steps > room:
            raise Unsupported("steps", str(steps), f"The sequence has room for {room} more tokens.")
        generated: list[int] = []
        for _ in range(steps):
            last = len(sequence.tokens) - 1
            self._compute(sequence, last, last + 1)
            generated.append(self._append_next(sequence))
        return generated

    def generate(
        self, sequence: Sequence, output_tokens: int, on_piece: OnPiece | None = None
    ) -> list[int]:
        """Prefill and decode: return `output_tokens` (at least 1) tokens."""
        return [self.prefill(sequence, on_piece), *self.decode(sequence, output_tokens - 1)]

    def finish(self, sequence: Sequence) -> None:
        """Give the blocks back. The sequence can only be read afterwards."""
        self._require_live(sequence)
        sequence.finished = True
        self._live.remove(sequence)
        self.cache.allocator.release(sequence.blocks)

    def check(self) -> None:
        """Raise `Conservation` unless the live sequences hold exactly the used blocks."""
        self.cache.allocator.check()
        held = sum(len(sequence.blocks) for sequence in self._live)
        used = self.cache.allocator.used_blocks
        if held != used:
            raise Conservation("the engine", f"sequences hold {held} blocks, {used} are used")

    def _require_live(self, sequence: Sequence) -> None:
        if sequence.finished:
            raise Closed("The sequence")

    def _append_next(self, sequence: Sequence) -> int:
        assert sequence.logits is not None
        token = self._decoder.greedy(sequence.logits)
        sequence.tokens.append(token)
        return token

    @torch.inference_mode()
    def _compute(self, sequence: Sequence, start: int, end: int) -> None:
        """Compute positions `[start, end)` of one piece; all before them is cached."""
        rows = self.prefill_tokens
        base = start // rows * rows
        tokens = torch.full((rows,), PAD)
        tokens[start - base : end - base] = torch.tensor(sequence.tokens[start:end])
        blocks = sequence.table[: (base + rows) // self.cache.block_tokens]

        def exchange(layer: int, keys_values: torch.Tensor) -> torch.Tensor:
            self.cache.write(layer, blocks, start, keys_values[:, start - base : end - base])
            return self.cache.gather(layer, blocks, end)

        computed = self._decoder.piece(tokens.to(self.device), base, exchange)
        sequence.logits = self._decoder.logits(computed[end - 1 - base])
        sequence.computed_tokens += end - start
        sequence.mark_cached(max(end, sequence.cached_tokens))
