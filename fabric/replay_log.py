"""The publisher's side of a replayable stream: numbers, a bounded buffer, and the answers.

Pools publish events with it and the router's authority its deltas. Pure: it makes frames and owns
no socket. One thread. The oldest messages leave when either bound is reached; a reader that needs
one of those sees a number too high first, and asks for the snapshot.
"""

from collections import deque
from collections.abc import Callable

from .events import END_SEQ, SEQUENCE, SNAPSHOT_SEQ, Frames

BUFFER_BYTES_MAX = 64 << 20
"""A minute of a busy pool (10,000 batches of 600 hashes); beyond it a snapshot is smaller."""


class ReplayLog:
    """Numbers messages and remembers the last ones."""

    def __init__(self, topic: bytes, buffer_batches: int, buffer_bytes_max: int) -> None:
        self._topic = topic
        self._batches_max = buffer_batches
        self._bytes_max = buffer_bytes_max
        self._buffer: deque[tuple[int, bytes]] = deque()
        self._buffer_bytes = 0
        self.next_seq = 0

    @property
    def buffer_bytes(self) -> int:
        """Payload bytes remembered."""
        return self._buffer_bytes

    def append(self, payload: bytes) -> Frames:
        """Number a payload, remember it, and return its frames for a PUB socket."""
        seq = self.next_seq
        self.next_seq += 1
        self._buffer.append((seq, payload))
        self._buffer_bytes += len(payload)
        while len(self._buffer) > self._batches_max or self._buffer_bytes > self._bytes_max:
            self._buffer_bytes -= len(self._buffer.popleft()[1])
        return [self._topic, SEQUENCE.pack(seq), payload]

    def answer(self, start_seq: int, snapshot: Callable[[], bytes]) -> list[Frames]:
        """Return the messages that answer a request, without the identity, end mark last.

        `snapshot` is called only where it was asked for, and returns the payload.
        """
        end: Frames = [b"", b"", SEQUENCE.pack(END_SEQ), b""]
        if start_seq == SNAPSHOT_SEQ:
            return [[b"", self._topic, SEQUENCE.pack(SNAPSHOT_SEQ), snapshot()], end]
        replies: list[Frames] = [
            [b"", self._topic, SEQUENCE.pack(seq), payload]
            for seq, payload in self._buffer
            if seq >= start_seq
        ]
        replies.append(end)
        return replies
