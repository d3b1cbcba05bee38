"""The authority, which follows all sources, and the replicas, which follow the authority. Pure.

The authority is a sink of the ingest: it keeps the index, numbers every change and answers replays
and snapshots. A replica is a sink of the authority's stream, keeps an index of its own, and decides
without a message. Both hold a `Decider`; promises are made and kept where the decision is.

Failure. The authority keeps nothing on disk: one that restarts takes a larger epoch, learns
everything again from the pools' snapshots, and is followed when it speaks. Until then, and while
its stream has a gap, a replica goes on deciding with what it knew (`synced` is False): being
outdated costs a miss, having no answer costs a request. Threading: one thread each.

What the authority has to publish piles up in an outbox until `take_frames`; the shell empties it
after every turn.
"""

from ..fabric.clock import Clock
from ..fabric.errors import Malformed
from ..fabric.events import Event, Frames, Snapshot, format_topic
from ..fabric.replay_log import BUFFER_BYTES_MAX, ReplayLog
from .book import BookLimits
from .decider import Decider
from .delta import (
    OPS_MAX,
    AnyOp,
    Cleared,
    DeltaBatch,
    Dropped,
    FleetSnapshot,
    Ops,
    PoolAt,
    Removed,
    SourceState,
    Stored,
    Trusted,
    encode,
    event_of,
    op_of,
    ops_of_load,
)
from .index import PrefixIndex
from .policy import Calibration, Rates

BUFFER_BATCHES = 10_000
"""As many batches as a pool buffers."""
HEARTBEAT_S = 1.0
"""As often as a pool's."""


class Authority:
    """The one that knows, and says what changed."""

    def __init__(
        self,
        name: str,
        epoch: int,
        clock: Clock,
        rates: Rates | None = None,
        limits: BookLimits | None = None,
    ) -> None:
        """`epoch` must be larger than that of every former life under this name, and above 0."""
        if epoch < 1:
            raise Malformed("epoch", f"{epoch} is below 1")
        self.index = PrefixIndex()
        self.decider = Decider(self.index, Calibration(rates or Rates()), limits)
        self.epoch = epoch
        self._clock = clock
        self._log = ReplayLog(format_topic(name, epoch), BUFFER_BATCHES, BUFFER_BYTES_MAX)
        self._outbox: list[Frames] = []
        self._spoke_s = clock.now_s()

    def apply(self, source: str, events: tuple[Event, ...]) -> None:
        """Take in a source's events."""
        if events:
            self.index.apply(source, events)
            self._say(tuple(op_of(source, event) for event in events))

    def load(self, source: str, snapshot: Snapshot) -> None:
        """Replace what a source holds."""
        self.index.load(source, snapshot)
        for op in ops_of_load(source, snapshot):
            self._say((op,))
        self._say((Trusted(source, self.index.trusted(source)),))

    def drop_source(self, source: str) -> None:
        """Forget a source."""
        if source in self.index.sources:
            self.index.drop_source(source)
            self._say((Dropped(source),))

    def set_trust(self, source: str, *, trusted: bool) -> None:
        """Give a source credit or not."""
        self.index.set_trust(source, trusted=trusted)
        self._say((Trusted(source, trusted),))

    def set_pool(self, node: str, endpoint: str) -> None:
        """Make known where a node's pool serves peers; empty withdraws it."""
        self.decider.set_pool(node, endpoint)
        self._say((PoolAt(node, endpoint),))

    def take_frames(self) -> list[Frames]:
        """Return and forget what is to be published: a heartbeat if there was nothing for long."""
        if not self._outbox and self._clock.now_s() - self._spoke_s >= HEARTBEAT_S:
            self._say(())
        frames, self._outbox = self._outbox, []
        return frames

    def replay(self, start_seq: int) -> list[Frames]:
        """Return the answer to a replica's request, without the ROUTER's identity."""
        return self._log.answer(start_seq, lambda: encode(self.snapshot()))

    def snapshot(self) -> FleetSnapshot:
        """Return everything, as of the next number."""
        return FleetSnapshot(
            self._log.next_seq,
            self._clock.unix_s(),
            tuple(
                SourceState(source, self.index.trusted(source), self.index.dump(source))
                for source in self.index.sources
            ),
            self.decider.pools,
        )

    def _say(self, ops: Ops) -> None:
        self._spoke_s = self._clock.now_s()
        for start in range(0, max(len(ops), 1), OPS_MAX):
            batch = DeltaBatch(self._clock.unix_s(), ops[start : start + OPS_MAX])
            self._outbox.append(self._log.append(encode(batch)))


class Replica:
    """A copy of the authority's index that decides by itself."""

    def __init__(self, rates: Rates | None = None, limits: BookLimits | None = None) -> None:
        self.index = PrefixIndex()
        self.decider = Decider(self.index, Calibration(rates or Rates()), limits)
        self.synced = False
        """Whether the authority's stream is whole."""

    def apply(self, _authority: str, ops: Ops) -> None:
        """Take in a batch of the authority."""
        for op in ops:
            self._apply(op)

    def load(self, _authority: str, fleet: FleetSnapshot) -> None:
        """Replace everything."""
        states = {state.source: state for state in fleet.sources}
        for source in self.index.sources:
            if source not in states:
                self.index.drop_source(source)
        for state in fleet.sources:
            self.index.load(state.source, Snapshot(state.source, 0, 0, fleet.ts, state.sections))
            self.index.set_trust(state.source, trusted=state.trusted)
        for node in self.decider.pools:
            if node not in fleet.pools:
                self.decider.set_pool(node, "")
        for node, endpoint in fleet.pools.items():
            self.decider.set_pool(node, endpoint)

    def drop_source(self, _authority: str) -> None:
        """The authority restarted: go on with what was known until its snapshot is here."""
        self.synced = False

    def set_trust(self, _authority: str, *, trusted: bool) -> None:
        """The authority's stream became whole, or has a gap."""
        self.synced = trusted

    def _apply(self, op: AnyOp) -> None:
        match op:
            case Stored(source=source) | Removed(source=source) | Cleared(source=source):
                self.index.apply(source, (event_of(op),))
            case Dropped(source):
                self.index.drop_source(source)
            case Trusted(source, trusted):
                self.index.set_trust(source, trusted=trusted)
            case PoolAt(node, endpoint):
                self.decider.set_pool(node, endpoint)
