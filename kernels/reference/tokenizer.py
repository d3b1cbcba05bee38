"""A tokenizer without a vocabulary file: a token is a byte, and three more mark text."""

from collections.abc import Iterable

BYTES = 256
BOS = 256
EOS = 257
PAD = 258
VOCAB = 259


def encode(text: str) -> list[int]:
    """Return the begin mark and the bytes of the text in UTF-8."""
    return [BOS, *text.encode()]


def decode(tokens: Iterable[int]) -> str:
    """Return the text; marks are left out and bytes that are no UTF-8 become U+FFFD."""
    return bytes(token for token in tokens if token < BYTES).decode(errors="replace")
