"""Reads request traces in Mooncake's format and scales them down.

A trace is a file of JSON lines, one request a line: `timestamp` (ms since the start, never going
back), `input_length` and `output_length` (tokens), `hash_ids` (one number per block of 512 prompt
tokens, the last block possibly partial). Equal numbers mean equal content after equal prefixes; the
content itself is not published, so it is made up here: block i is a pseudo-random function of i.
Other fields of a line are ignored. The format comes with the traces of the Mooncake paper
(arXiv:2407.00079).
"""

import hashlib
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import msgspec

from ...fabric.errors import ConfigError, Malformed

TRACE_BLOCK_TOKENS = 512
"""Prompt tokens per number in `hash_ids`."""

LINE_BYTES_MAX = 1 << 20
"""A million-token prompt has 2000 numbers in some 20 KB; a longer line is another kind of file."""

Tokens = tuple[int, ...]
"""Byte tokens, 0 to 255."""


class TraceRecord(msgspec.Struct, frozen=True):
    """One line."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=0)]
    hash_ids: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]


class Scale:
    """Shrinks token counts by one exact factor. Raises `ConfigError` unless 512 shrinks evenly."""

    def __init__(self, factor: float) -> None:
        self._factor = Fraction(factor) if 0 < factor <= 1 else Fraction(0)
        block = self._factor * TRACE_BLOCK_TOKENS
        if block < 1 or block.denominator != 1:
            problem = (
                f"{factor:g} makes {factor * TRACE_BLOCK_TOKENS:g} tokens of a 512-token block"
            )
            remedy = "Give n/512 with n from 1 to 512, for example 0.03125 (blocks of 16 tokens)"
            raise ConfigError("scale", problem, remedy)
        self.block_tokens = int(block)
        """Tokens of a trace block after scaling."""

    def tokens(self, count: int) -> int:
        """Shrink a count, rounding up and to 1 at least, so that blocks keep their number."""
        return max(1, -(-count * self._factor.numerator // self._factor.denominator))


def read_trace(path: str | Path) -> Iterator[TraceRecord]:
    """Yield the records of a file, one line at a time.

    Raises `ConfigError` if the file cannot be read, `Malformed` with file and line number for a
    line that is cut off, is no record, or contradicts itself or the line before.
    """
    try:
        with Path(path).open("rb") as file:
            yield from _records(str(path), iter(lambda: file.readline(LINE_BYTES_MAX + 1), b""))
    except OSError as error:
        raise ConfigError("trace", f"{path}: {error.strerror}", "Name a readable file") from error


def _records(path: str, lines: Iterator[bytes]) -> Iterator[TraceRecord]:
    decoder = msgspec.json.Decoder(TraceRecord)
    before_ms = 0.0
    for number, line in enumerate(lines, start=1):
        where = f"{path}:{number}"
        if len(line) > LINE_BYTES_MAX:
            raise Malformed(where, f"the line is longer than {LINE_BYTES_MAX} bytes")
        try:
            record = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Malformed(where, str(error)) from error
        blocks = -(-record.input_length // TRACE_BLOCK_TOKENS)
        if len(record.hash_ids) != blocks:
            problem = f"input_length {record.input_length} is {blocks} blocks, hash_ids has"
            raise Malformed(where, f"{problem} {len(record.hash_ids)}")
        if record.timestamp < before_ms:
            problem = f"timestamp {record.timestamp:g} ms is before {before_ms:g} ms"
            raise Malformed(where, f"{problem} of the line above")
        before_ms = record.timestamp
        yield record


def made_up_tokens(label: str, count: int) -> Tokens:
    """Return `count` byte tokens that follow from the label alone (SHAKE-128 of it)."""
    return tuple(hashlib.shake_128(label.encode()).digest(count))


def prompt_tokens(record: TraceRecord, scale: Scale, seed: int) -> Tokens:
    """Return the scaled prompt: made-up blocks one after the other, the last one cut."""
    tokens: list[int] = []
    for block in record.hash_ids:
        tokens += made_up_tokens(f"trace {seed} block {block}", scale.block_tokens)
    return tuple(tokens[: scale.tokens(record.input_length)])
