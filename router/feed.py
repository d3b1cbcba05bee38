"""From frames to a sink: a stream's codec, its repair and its reader, in one pure object.

A feed is told the frames that came and returns the requests that should go out. Sockets belong to
`ingest` and `delta_socket`; a simulation hands frames over directly. Failure: an unreadable message
is counted and, where the publisher has snapshots, made up for by one. Threading: one thread.
"""

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from ..fabric.errors import Malformed
from ..fabric.events import (
    SNAPSHOT_SEQ,
    EndOfReplay,
    Event,
    Message,
    Snapshot,
    decode_batch,
    decode_snapshot,
    parse_message,
    parse_reply,
)
from .stream import (
    Action,
    Apply,
    AskReplay,
    AskSnapshot,
    Distrust,
    Drop,
    Load,
    SourceStream,
    StreamTimes,
    Trust,
)

B = TypeVar("B")
S = TypeVar("S")
B_contra = TypeVar("B_contra", contravariant=True)
S_contra = TypeVar("S_contra", contravariant=True)
B_co = TypeVar("B_co", covariant=True)
S_co = TypeVar("S_co", covariant=True)

Request = AskReplay | AskSnapshot
EventSeq = tuple[Event, ...]


class Sink(Protocol[B_contra, S_contra]):
    """Who takes in what streams say. `PrefixIndex`, `Authority` and `Replica` do."""

    def apply(self, source: str, events: B_contra, /) -> None:
        """Take in the next batch."""
        ...

    def load(self, source: str, snapshot: S_contra, /) -> None:
        """Replace all that is known of the source."""
        ...

    def drop_source(self, source: str, /) -> None:
        """Forget the source."""
        ...

    def set_trust(self, source: str, /, *, trusted: bool) -> None:
        """Give the source credit or not."""
        ...


class Codec(Protocol[B_co, S_co]):
    """How payloads are read. All raise `Malformed`."""

    def batch(self, payload: bytes) -> tuple[float, B_co]:
        """Return a batch's stamp and content."""
        ...

    def empty(self) -> B_co:
        """Return a batch that changes nothing, which stands for one that cannot be read."""
        ...

    def snapshot(self, payload: bytes) -> tuple[int, float, S_co]:
        """Return a snapshot's next number, stamp and content."""
        ...


class EventCodec:
    """KV events of pools and engines."""

    def batch(self, payload: bytes) -> tuple[float, EventSeq]:
        """Read an event batch."""
        batch = decode_batch(payload)
        return batch.ts, batch.events

    def empty(self) -> EventSeq:
        """Return no events."""
        return ()

    def snapshot(self, payload: bytes) -> tuple[int, float, Snapshot]:
        """Read a pool's snapshot."""
        snapshot = decode_snapshot(payload)
        return snapshot.next_seq, snapshot.ts, snapshot


class Feed(Generic[B, S]):
    """One source's stream, feeding one sink."""

    def __init__(
        self, source: str, codec: Codec[B, S], sink: Sink[B, S], times: StreamTimes
    ) -> None:
        self.stream: SourceStream[B, S] = SourceStream(source, times)
        self.malformed = 0
        """Messages that could not be read."""
        self._codec = codec
        self._sink = sink

    def start(self, now_s: float) -> list[Request]:
        """Begin. Returns the requests to send."""
        return self._obey(self.stream.start(now_s))

    def on_live(self, frames: Sequence[bytes], now_s: float) -> list[Request]:
        """Take in a message of the live stream."""
        try:
            message = parse_message(frames)
        except Malformed:
            return self._unreadable(now_s)
        return self._batch(message, now_s, live=True)

    def on_reply(self, frames: Sequence[bytes], now_s: float) -> list[Request]:
        """Take in a message of the answer to a request."""
        try:
            message = parse_reply(frames)
        except Malformed:
            return self._unreadable(now_s)
        if isinstance(message, EndOfReplay):
            return self._obey(self.stream.on_end(now_s))
        if message.seq == SNAPSHOT_SEQ:
            return self._snapshot(message, now_s)
        return self._batch(message, now_s, live=False)

    def tick(self, now_s: float) -> list[Request]:
        """Let time pass."""
        return self._obey(self.stream.tick(now_s))

    def _batch(self, message: Message, now_s: float, *, live: bool) -> list[Request]:
        readable = True
        try:
            ts, batch = self._codec.batch(message.payload)
        except Malformed:
            readable, ts, batch = False, 0.0, self._codec.empty()
        how = self.stream.on_live if live else self.stream.on_replayed
        requests = self._obey(how(message.epoch, message.seq, ts, batch, now_s))
        return requests if readable else requests + self._unreadable(now_s)

    def _snapshot(self, message: Message, now_s: float) -> list[Request]:
        try:
            next_seq, ts, snapshot = self._codec.snapshot(message.payload)
        except Malformed:
            return self._unreadable(now_s)
        return self._obey(self.stream.on_snapshot(message.epoch, next_seq, ts, snapshot, now_s))

    def _unreadable(self, now_s: float) -> list[Request]:
        self.malformed += 1
        return self._obey(self.stream.on_malformed(now_s))

    def _obey(self, actions: list[Action[B, S]]) -> list[Request]:
        requests: list[Request] = []
        for action in actions:
            match action:
                case Apply(source, batch):
                    self._sink.apply(source, batch)
                case Load(source, snapshot):
                    self._sink.load(source, snapshot)
                case Drop(source):
                    self._sink.drop_source(source)
                case Trust(source):
                    self._sink.set_trust(source, trusted=True)
                case Distrust(source):
                    self._sink.set_trust(source, trusted=False)
                case AskReplay() | AskSnapshot():
                    requests.append(action)
        return requests
