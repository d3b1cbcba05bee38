"""What happened in a simulated world: a digest of all of it, and the last of it as text."""

from collections import deque

import xxhash


class Trace:
    """The diary of one world.

    The digest covers every line ever added, so two runs with equal digests did the same things at
    the same times. Only the last `lines_max` lines are kept for people to read.
    """

    def __init__(self, lines_max: int) -> None:
        self.lines_max = lines_max
        self.lines = 0
        self._last: deque[tuple[float, str, str]] = deque(maxlen=lines_max)
        self._digest = xxhash.xxh3_128()

    def add(self, at_s: float, who: str, what: str) -> None:
        """Add a line that people will read."""
        self.lines += 1
        self._digest.update(f"{at_s!r} {who} {what}\n".encode())
        self._last.append((at_s, who, what))

    def stamp(self, at_s: float, label: str) -> None:
        """Add a line to the digest only: what happens too often to be read."""
        self._digest.update(f"{at_s!r} {label}\n".encode())

    def digest(self) -> str:
        """Return 32 hex digits over everything so far."""
        return self._digest.hexdigest()

    def text(self) -> str:
        """Return the last lines, oldest first, one a line."""
        return "\n".join(f"{at_s:12.6f} {who:<12} {what}" for at_s, who, what in self._last)
