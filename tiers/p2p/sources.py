"""The sources that a pool pulls from: whom it knows, greets and drops. Part of `consumer`."""

from collections.abc import Callable
from math import inf

from ...fabric.config import PeerConfig
from ...fabric.wire import Bye, Hello, Message, Welcome
from .actions import Action, Connect, Disconnect, RemovePeer, SendTo
from .records import AskedKind, AskedRecord, SourceRecord, SourceState

MUTE_SHARE = 0.5
"""Of the deadline. An answer that came just after the question that is overdue, from a source that
then died, is no sign of life: the next pull would pay a second deadline."""


class Outbox:
    """Actions in order, and the numbers of requests: rising, over all sources."""

    def __init__(self) -> None:
        self._actions: list[Action] = []
        self._request = 0

    def emit(self, action: Action) -> None:
        """Append an action."""
        self._actions.append(action)

    def send(self, source: SourceRecord, request: int, body: Message) -> None:
        """Append a message to a source."""
        self.emit(SendTo(source.endpoint, source.epoch, request, body))

    def next_request(self) -> int:
        """Return a number that was not used before."""
        self._request += 1
        return self._request

    def take(self) -> tuple[Action, ...]:
        """Return all actions since the last call."""
        actions = tuple(self._actions)
        self._actions.clear()
        return actions


class Sources:
    """Sources by endpoint, at most `peers_max`."""

    def __init__(
        self,
        hello: Hello,
        config: PeerConfig,
        outbox: Outbox,
        agents_in_use: Callable[[], set[bytes]],
    ) -> None:
        self._hello, self._config, self._outbox = hello, config, outbox
        self._agents_in_use = agents_in_use
        self._sources: dict[str, SourceRecord] = {}

    def get(self, endpoint: str) -> SourceRecord | None:
        """Return what is known of an endpoint."""
        return self._sources.get(endpoint)

    def all(self) -> tuple[SourceRecord, ...]:
        """Return all sources."""
        return tuple(self._sources.values())

    def use(self, endpoint: str, now_s: float) -> SourceRecord | None:
        """Return the source of an endpoint, greeted if need be; None if all places are in use."""
        source = self._sources.get(endpoint)
        if source is None:
            if len(self._sources) >= self._config.peers_max and not self._drop_unused(now_s):
                return None
            source = self._sources[endpoint] = SourceRecord(endpoint, now_s)
        elif source.state != SourceState.SUSPECT or now_s < source.suspect_until_s or source.reads:
            source.used_s = now_s
            return source
        source.used_s = now_s
        self._outbox.emit(Connect(endpoint))
        self.greet(source, now_s)
        return source

    def greet(self, source: SourceRecord, now_s: float) -> None:
        """Say hello."""
        source.state = SourceState.GREETING
        request = self._outbox.next_request()
        source.asked[request] = AskedRecord(AskedKind.HELLO, now_s)
        self._outbox.send(source, request, self._hello)

    def welcomed(self, source: SourceRecord, epoch: int, welcome: Welcome) -> None:
        """Take note of who a source is; what it was before is not read any more."""
        if source.welcome is not None and source.welcome.agent != welcome.agent:
            source.retired.add(source.welcome.agent)
        source.state, source.epoch, source.welcome = SourceState.READY, epoch, welcome
        self.remove_retired(source)

    def part(self, source: SourceRecord, until_s: float) -> None:
        """Break off with a source, and do not ask it until then."""
        source.state, source.suspect_until_s = SourceState.SUSPECT, until_s
        source.asked.clear()
        if source.welcome is not None:
            source.retired.add(source.welcome.agent)
            source.welcome = None
        self._outbox.emit(Disconnect(source.endpoint))
        self.remove_retired(source)

    def leave(self, source: SourceRecord, until_s: float) -> None:
        """Say bye and part."""
        self._outbox.send(source, self._outbox.next_request(), Bye())
        self.part(source, until_s)

    def overdue(self, source: SourceRecord, now_s: float) -> list[tuple[int, AskedRecord]]:
        """Return the requests that a source should have answered by now, with their numbers."""
        wait_s = self._config.source_deadline_s
        return [item for item in source.asked.items() if now_s >= item[1].asked_s + wait_s]

    def is_silent(self, source: SourceRecord, now_s: float) -> bool:
        """Return whether a source missed its deadline.

        It did if a read does not end, or if an answer is overdue and it has not said anything else
        lately. Otherwise a single message was lost.
        """
        wait_s = self._config.source_deadline_s
        if any(now_s >= read.started_s + wait_s for read in source.reads.values()):
            return True
        mute = now_s - source.heard_s >= wait_s * MUTE_SHARE
        return any(
            mute or asked.kind == AskedKind.HELLO for _, asked in self.overdue(source, now_s)
        )

    def next_deadline_s(self) -> float:
        """Return when the next answer or read is overdue; infinity if none is awaited."""
        begun_s = inf
        for source in self._sources.values():
            if source.state != SourceState.SUSPECT:
                for asked in source.asked.values():
                    begun_s = min(begun_s, asked.asked_s)
                for read in source.reads.values():
                    begun_s = min(begun_s, read.started_s)
        return begun_s + self._config.source_deadline_s

    def remove_retired(self, source: SourceRecord) -> None:
        """Have the agents removed that are not of use any more."""
        for agent in sorted(source.retired - self._agents_in_use()):
            source.retired.remove(agent)
            self._outbox.emit(RemovePeer(agent))

    def _drop_unused(self, now_s: float) -> bool:
        unused = [
            source for source in self._sources.values() if not source.pulls and not source.reads
        ]
        if not unused:
            return False
        source = min(unused, key=lambda candidate: candidate.used_s)
        if source.state != SourceState.SUSPECT:
            self.leave(source, now_s)
        del self._sources[source.endpoint]
        return True
