"""The sockets of the router's input: one SUB and one DEALER for each source. No threads.

Ownership: the ingest owns its sockets; the context and the sink stay the caller's. Lifecycle:
sources come and go at run time; `close` (or leaving the `with`) closes all, without lingering.
Failure: a source that does not answer or sends rubbish loses its credit and is asked ever less
often; nothing is raised for it. Threading: `poll` does all the work in the calling thread, and
takes at most `MESSAGES_PER_TURN_MAX` messages from a socket before it looks at the next.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import zmq

from ..fabric.clock import Clock
from ..fabric.errors import Closed, ConfigError
from ..fabric.events import (
    PAYLOAD_BYTES_MAX,
    SNAPSHOT_BYTES_MAX,
    SNAPSHOT_SEQ,
    Snapshot,
    replay_request,
)
from .feed import EventCodec, EventSeq, Feed, Request, Sink
from .stream import AskSnapshot, StreamTimes

B = TypeVar("B")
S = TypeVar("S")

MESSAGES_PER_TURN_MAX = 256
"""Messages taken from one socket in a turn, so that a loud source does not starve the others."""
RECEIVE_MESSAGES_MAX = 10_000
"""Messages queued by ZeroMQ; beyond it they are lost and come back by replay, as many as a pool
buffers."""
SOURCES_MAX = 4096


@dataclass(frozen=True, slots=True)
class SourceEndpoints:
    """Where a source publishes and where it answers replay requests.

    `bind` is for vLLM engines that are told a concrete host: those connect, so the subscriber
    binds.
    """

    publish: str
    replay: str
    bind: bool = False


class FeedSocket(Generic[B, S]):
    """A feed with its two sockets."""

    def __init__(
        self, context: "zmq.Context[Any]", endpoints: SourceEndpoints, feed: Feed[B, S]
    ) -> None:
        """Subscribe. Raises `ConfigError` for an address that ZeroMQ refuses."""
        self.feed = feed
        self._context = context
        self._endpoints = endpoints
        self.subscriber = context.socket(zmq.SUB)
        self.dealer = self._open_dealer()
        self.subscriber.linger = 0
        self.subscriber.rcvhwm = RECEIVE_MESSAGES_MAX
        self.subscriber.setsockopt(zmq.MAXMSGSIZE, PAYLOAD_BYTES_MAX)
        self.subscriber.subscribe(b"")
        try:
            if endpoints.bind:
                self.subscriber.bind(endpoints.publish)
            else:
                self.subscriber.connect(endpoints.publish)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError("publish", f"{endpoints.publish}: {error}", "Fix it.") from error

    def start(self, now_s: float) -> None:
        """Ask for everything."""
        self._send(self.feed.start(now_s))

    def turn(self, now_s: float) -> int:
        """Take in what has come and let time pass. Returns the number of messages."""
        taken = 0
        for frames in _received(self.subscriber):
            self._send(self.feed.on_live(frames, now_s))
            taken += 1
        dealer = self.dealer
        for frames in _received(dealer):
            self._send(self.feed.on_reply(frames, now_s))
            taken += 1
            if self.dealer is not dealer:
                break
        self._send(self.feed.tick(now_s))
        return taken

    def close(self) -> None:
        """Close both sockets. Safe to call twice."""
        self.subscriber.close(linger=0)
        self.dealer.close(linger=0)

    def _send(self, requests: list[Request]) -> None:
        for request in requests:
            if request.fresh:
                self.dealer.close(linger=0)
                self.dealer = self._open_dealer()
            start = SNAPSHOT_SEQ if isinstance(request, AskSnapshot) else request.start_seq
            try:
                self.dealer.send_multipart(replay_request(start), zmq.NOBLOCK)
            except zmq.Again:
                return  # Nobody listens yet; the stream asks again after its patience.

    def _open_dealer(self) -> "zmq.Socket[bytes]":
        dealer = self._context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.sndhwm = 8
        dealer.rcvhwm = RECEIVE_MESSAGES_MAX
        dealer.setsockopt(zmq.MAXMSGSIZE, SNAPSHOT_BYTES_MAX)
        try:
            dealer.connect(self._endpoints.replay)
        except zmq.ZMQError as error:
            dealer.close(linger=0)
            self.subscriber.close(linger=0)
            raise ConfigError("replay", f"{self._endpoints.replay}: {error}", "Fix it.") from error
        return dealer


def _received(socket: "zmq.Socket[bytes]") -> Iterator[list[bytes]]:
    for _ in range(MESSAGES_PER_TURN_MAX):
        try:
            yield socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return


class Ingest:
    """All sources of a router."""

    def __init__(
        self,
        context: "zmq.Context[Any]",
        sink: Sink[EventSeq, Snapshot],
        clock: Clock,
        times: StreamTimes | None = None,
    ) -> None:
        self._context = context
        self._sink = sink
        self._clock = clock
        self._times = times or StreamTimes()
        self._sources: dict[str, FeedSocket[EventSeq, Snapshot]] = {}
        self._closed = False

    def add_source(self, source: str, endpoints: SourceEndpoints) -> None:
        """Begin to follow a source. It gives no credit until it is whole.

        Raises `ConfigError` for a name in use, a bad address or too many sources.
        """
        if self._closed:
            raise Closed("ingest")
        if source in self._sources:
            raise ConfigError("source", f"{source} is followed already", "Remove it first.")
        if len(self._sources) >= SOURCES_MAX:
            raise ConfigError("sources", f"more than {SOURCES_MAX}", "Use an index per part.")
        feed = Feed(source, EventCodec(), self._sink, self._times)
        record = FeedSocket(self._context, endpoints, feed)
        self._sources[source] = record
        record.start(self._clock.now_s())

    def remove_source(self, source: str) -> None:
        """Stop following a source and forget what it holds. Unknown names are no error."""
        record = self._sources.pop(source, None)
        if record is not None:
            record.close()
            self._sink.drop_source(source)

    @property
    def feeds(self) -> dict[str, Feed[EventSeq, Snapshot]]:
        """The feeds by source (a copy), for their counts and whether they are trusted."""
        return {name: record.feed for name, record in self._sources.items()}

    def poll(self, timeout_ms: int) -> int:
        """Wait for messages, at most `timeout_ms`, and take them in. Returns how many."""
        if self._closed:
            raise Closed("ingest")
        poller = zmq.Poller()
        for record in self._sources.values():
            poller.register(record.subscriber, zmq.POLLIN)
            poller.register(record.dealer, zmq.POLLIN)
        poller.poll(timeout_ms)
        now_s = self._clock.now_s()
        return sum(record.turn(now_s) for record in self._sources.values())

    def close(self) -> None:
        """Close all sockets. What was learnt stays in the sink. Safe to call twice."""
        self._closed = True
        for record in self._sources.values():
            record.close()
        self._sources.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
