"""Numbers and stamps of the batches that a stream has taken in."""

from dataclasses import dataclass, field

RECENT_MAX = 1024
"""Numbers and stamps remembered to tell a late message from a restart."""


@dataclass(slots=True)
class History:
    """The last `RECENT_MAX` batches, by number modulo that."""

    ring: list[tuple[int, float]] = field(default_factory=lambda: [(-1, 0.0)] * RECENT_MAX)
    newest_ts: float = 0.0
    """Of all messages of this life of the publisher, taken in or not."""
    applied_ts: float = 0.0
    """Of the batch taken in last."""

    def note(self, seq: int, ts: float) -> None:
        """A batch was taken in."""
        self.applied_ts = ts
        self.ring[seq % RECENT_MAX] = (seq, ts)

    def knows(self, seq: int, ts: float) -> bool:
        """Whether this very batch was taken in lately."""
        return self.ring[seq % RECENT_MAX] == (seq, ts)
