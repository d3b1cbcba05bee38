"""The sockets between an authority and its replicas. No threads; both sides are polled.

Ownership: each side owns its sockets; contexts, authority and replica stay the caller's.
Failure: a replica that is slow loses messages and gets them again by replay; one that asks rubbish
is ignored and counted. Addresses with port `*` are resolved: read them from `endpoints`.
"""

from typing import Any

import zmq

from ..fabric.clock import Clock
from ..fabric.errors import ConfigError, Malformed
from ..fabric.events import parse_replay_request
from .delta import DeltaCodec, FleetSnapshot, Ops
from .feed import Feed
from .ingest import MESSAGES_PER_TURN_MAX, FeedSocket, SourceEndpoints
from .replica import BUFFER_BATCHES, Authority, Replica
from .stream import StreamTimes

SEND_MESSAGES_MAX = 2 * BUFFER_BATCHES
"""Queued for a slow replica: a whole replay with room to spare. Beyond it ZeroMQ drops messages,
and the replica asks again."""


class AuthoritySocket:
    """Publishes an authority's deltas and answers replicas."""

    def __init__(
        self,
        context: "zmq.Context[Any]",
        authority: Authority,
        publish: str = "tcp://127.0.0.1:*",
        replay: str = "tcp://127.0.0.1:*",
    ) -> None:
        """Bind. Raises `ConfigError` for an address that cannot be bound."""
        self.authority = authority
        self.refused = 0
        """Requests that were not in the protocol's form, or whose asker was gone."""
        self._publisher = context.socket(zmq.PUB)
        self._router = context.socket(zmq.ROUTER)
        for socket, address in ((self._publisher, publish), (self._router, replay)):
            socket.linger = 0
            socket.sndhwm = SEND_MESSAGES_MAX
            try:
                socket.bind(address)
            except zmq.ZMQError as error:
                self.close()
                raise ConfigError("router address", f"{address}: {error}", "Free it.") from error
        self.endpoints = SourceEndpoints(
            self._publisher.getsockopt_string(zmq.LAST_ENDPOINT),
            self._router.getsockopt_string(zmq.LAST_ENDPOINT),
        )

    def poll(self, timeout_ms: int) -> int:
        """Publish what changed, wait for requests and answer them. Returns how many were."""
        self._publish()
        answered = 0
        if self._router.poll(timeout_ms):
            for _ in range(MESSAGES_PER_TURN_MAX):
                try:
                    frames = self._router.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                answered += self._answer(frames[0], frames[1:])
        self._publish()
        return answered

    def close(self) -> None:
        """Close both sockets. Safe to call twice."""
        self._publisher.close(linger=0)
        self._router.close(linger=0)

    def _publish(self) -> None:
        for frames in self.authority.take_frames():
            self._publisher.send_multipart(frames)

    def _answer(self, identity: bytes, request: list[bytes]) -> int:
        try:
            replies = self.authority.replay(parse_replay_request(request))
            for reply in replies:
                self._router.send_multipart([identity, *reply], zmq.NOBLOCK)
        except (Malformed, zmq.Again):
            self.refused += 1
            return 0
        return 1


class ReplicaSocket:
    """Feeds a replica from an authority."""

    def __init__(
        self,
        context: "zmq.Context[Any]",
        replica: Replica,
        endpoints: SourceEndpoints,
        clock: Clock,
        times: StreamTimes | None = None,
    ) -> None:
        """Subscribe and ask for everything. Raises `ConfigError` for a bad address."""
        self.replica = replica
        self._clock = clock
        feed: Feed[Ops, FleetSnapshot] = Feed(
            "authority", DeltaCodec(), replica, times or StreamTimes()
        )
        self._socket = FeedSocket(context, endpoints, feed)
        self._socket.start(clock.now_s())

    @property
    def feed(self) -> Feed[Ops, FleetSnapshot]:
        """The feed, for its counts."""
        return self._socket.feed

    def poll(self, timeout_ms: int) -> int:
        """Wait for messages, at most `timeout_ms`, and take them in. Returns how many."""
        poller = zmq.Poller()
        poller.register(self._socket.subscriber, zmq.POLLIN)
        poller.register(self._socket.dealer, zmq.POLLIN)
        poller.poll(timeout_ms)
        return self._socket.turn(self._clock.now_s())

    def close(self) -> None:
        """Close the sockets; the replica stays and goes on deciding. Safe to call twice."""
        self._socket.close()
