"""Keeping one source's event stream whole: a state machine without sockets or clocks.

A stream is fenced by (source, epoch, sequence). The machine is told what arrived and returns what
to do, as frozen values in order. Its ladder: a gap is closed by a replay; what the publisher no
longer buffers, by a snapshot; a publisher without snapshots (vLLM) is dropped and believed again
from the oldest batch that it still has, which is less than the truth and never more.

Trust. A source gives no credit from `Distrust` until `Trust`: while batches are missing, after a
restart until its snapshot is in, and when a probe stays unanswered. A stream that was silent for
`silence_s` is probed with a replay request: that finds a lost last message even where the publisher
sends no heartbeats. A request begins at the last number taken in, so that its stamp shows whether
the publisher is still the same.

A restart is another epoch, or a number that goes back with a newer stamp; in a stream without
epochs (0, vLLM) also a number that goes back with a stamp never seen. The source is dropped then.
Epochs should grow; one that does not is believed if its stamp is newer than all before. What is
left of late and doubled messages, of this epoch or an older one, is ignored.

Ownership: the machine holds batches that wait for a gap to close, at most `PENDING_MAX`. At most
one request is outstanding; where it is asked again, `fresh` tells the shell to open a new
connection, so that answers to the old one cannot be mistaken. Failure: none raised. Threading: one
thread. Lifecycle: `start`, then any order of the `on_*` methods and `tick`; no end.

The batches are opaque. The router's own delta stream uses the same machine.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from .history import History

B = TypeVar("B")
S = TypeVar("S")

PENDING_MAX = 4096
"""Batches that wait for a gap to close: 40 s of an engine at 100 steps a second."""


@dataclass(frozen=True, slots=True)
class AskReplay:
    """Ask the publisher for its batches from `start_seq` on."""

    source: str
    start_seq: int
    fresh: bool


@dataclass(frozen=True, slots=True)
class AskSnapshot:
    """Ask the publisher for all that it holds."""

    source: str
    fresh: bool


@dataclass(frozen=True, slots=True)
class Apply(Generic[B]):
    """Take in a batch: it is the next one."""

    source: str
    batch: B


@dataclass(frozen=True, slots=True)
class Load(Generic[S]):
    """Replace all that is known of the source."""

    source: str
    snapshot: S


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget all that is known of the source."""

    source: str


@dataclass(frozen=True, slots=True)
class Trust:
    """The source is whole: give it credit."""

    source: str


@dataclass(frozen=True, slots=True)
class Distrust:
    """The source may be wrong: no credit, and never pull from it."""

    source: str


Action = AskReplay | AskSnapshot | Apply[B] | Load[S] | Drop | Trust | Distrust


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """The clocks of a stream, in seconds."""

    silence_s: float = 2.5
    """Two and a half heartbeats of a pool: one may be late without costing a probe."""
    answer_s: float = 1.0
    """How long a request may stay unanswered (vLLM answers idle in 0.1 s)."""
    backoff_max_s: float = 10.0
    """Waiting doubles up to this while a publisher stays away."""


@dataclass(slots=True)
class StreamCounts:
    """What happened to a stream so far."""

    gaps: int = 0
    restarts: int = 0
    ignored: int = 0
    """Late, doubled or outdated messages."""
    replays: int = 0
    snapshots: int = 0
    overflows: int = 0


class _Asked(Enum):
    NOTHING = 0
    REPLAY = 1
    SNAPSHOT = 2


@dataclass(slots=True)
class _Wait:
    """The request outstanding."""

    patience_s: float
    kind: _Asked = _Asked.NOTHING
    since_s: float = 0.0
    answered: bool = False
    """Something of the answer has arrived that led on."""
    probe: bool = False
    """Asked of a whole stream, to find out whether it still is."""
    stale: bool = False
    """The answer was a snapshot of an older epoch."""


class SourceStream(Generic[B, S]):
    """The machine of one source. Times are handed in, on any monotonic clock."""

    def __init__(self, source: str, times: StreamTimes) -> None:
        self.source = source
        self.trusted = False
        self.counts = StreamCounts()
        self.expected = 0
        """The number of the next batch to take in."""
        self.epoch = 0
        self._times = times
        self._history = History()
        self._pending: dict[int, tuple[float, B]] = {}
        self._wait = _Wait(times.answer_s)
        self._heard_s = 0.0
        self._rebuilt_s = 0.0
        self._want_rebuild = False
        """A rebuild is due, and was put off because the last one is too recent."""
        self._known = False
        """Whether an epoch was ever heard."""
        self._has_snapshots = True
        """Whether the publisher is thought to have snapshots; what shows an epoch has them."""
        self._adopt = False
        """The next batch, whatever its number, is where the stream begins."""
        self._actions: list[Action[B, S]] = []

    def start(self, now_s: float) -> list[Action[B, S]]:
        """Begin: nothing is known, so ask for everything."""
        self._heard_s = now_s
        self._send_snapshot(now_s, fresh=False)
        return self._take()

    def on_live(
        self, epoch: int, seq: int, ts: float, batch: B, now_s: float
    ) -> list[Action[B, S]]:
        """A message came on the live stream."""
        late = self._is_late(seq, ts)
        if not self._fence(epoch, ts, now_s):
            return self._take()
        self._heard_s = now_s
        if seq < self.expected and not self._adopt:
            if late:
                self.counts.ignored += 1
                return self._take()
            self._restart(now_s)
        self._hold(seq, ts, batch)
        if self._wait.kind is _Asked.NOTHING:
            self._settle(now_s)
        elif self.trusted and self._catch_up():
            self._found_gap()
        return self._take()

    def on_replayed(
        self, epoch: int, seq: int, ts: float, batch: B, now_s: float
    ) -> list[Action[B, S]]:
        """A batch came as part of the answer to a replay request."""
        late = self._is_late(seq, ts)
        if self._wait.kind is not _Asked.REPLAY or not self._fence(epoch, ts, now_s):
            return self._take()
        self._heard_s = now_s
        if self._wait.kind is not _Asked.REPLAY:
            return self._take()
        if self._adopt:
            self._adopt = False
            self.expected = seq
            self._forget_before(seq)
        if seq < self.expected:
            if not late:
                self._restart(now_s)
            self.counts.ignored += 1
            return self._take()
        self._hold(seq, ts, batch)
        if self._drain():
            self._wait.answered = True
            self._wait.since_s = now_s
        elif not self._wait.answered:
            self._rebuild(now_s)
        return self._take()

    def on_snapshot(
        self, epoch: int, next_seq: int, ts: float, snapshot: S, now_s: float
    ) -> list[Action[B, S]]:
        """A snapshot came. One not asked for is ignored, and an outdated one asked again."""
        if self._wait.kind is not _Asked.SNAPSHOT:
            self.counts.ignored += 1
            return self._take()
        if self._known and epoch != self.epoch:
            if not self._is_newer(epoch, ts):
                self.counts.ignored += 1
                self._wait.stale = True
                return self._take()
            self._pending.clear()
        self._enter(epoch, now_s)
        self._heard_s = now_s
        self.counts.snapshots += 1
        self._actions.append(Load(self.source, snapshot))
        self.expected = next_seq
        self._adopt = False
        self._history.newest_ts = max(self._history.newest_ts, ts)
        self._forget_before(next_seq)
        self._drain()
        self._wait.answered = True
        return self._take()

    def on_end(self, now_s: float) -> list[Action[B, S]]:
        """The answer to the outstanding request is complete."""
        wait = self._wait
        lacks_snapshot = wait.kind is _Asked.SNAPSHOT and not wait.answered
        if wait.kind is _Asked.NOTHING or wait.stale or (lacks_snapshot and self.epoch):
            return self._take()  # A snapshot lost or outdated is asked again when its time is over.
        self._heard_s = now_s
        wait.kind = _Asked.NOTHING
        if lacks_snapshot:
            self._has_snapshots = False
            self._begin_anew(now_s)
            return self._take()
        self._adopt_pending()
        if self._catch_up() and not wait.answered and not wait.probe:
            self._rebuild(now_s)
        else:
            self._settle(now_s)
        return self._take()

    def on_malformed(self, now_s: float) -> list[Action[B, S]]:
        """A message came whose content is unreadable and was taken for an empty batch, or lost.

        Only a snapshot can make up for it. Without snapshots it costs wrong hits, thus misses.
        """
        if self._has_snapshots:
            self._distrust()
            self._rebuild(now_s)
        return self._take()

    def tick(self, now_s: float) -> list[Action[B, S]]:
        """Time passed: ask again what stayed unanswered, probe a stream that is silent."""
        wait = self._wait
        if self._want_rebuild and wait.kind is not _Asked.SNAPSHOT:
            self._rebuild(now_s)
        elif wait.kind is _Asked.NOTHING:
            if now_s - self._heard_s >= self._times.silence_s:
                self._ask_replay(now_s, fresh=False)
        elif now_s - wait.since_s >= wait.patience_s:
            self._distrust()
            patience = min(2 * wait.patience_s, self._times.backoff_max_s)
            if wait.kind is _Asked.SNAPSHOT:
                self._send_snapshot(now_s, fresh=True)
            else:
                self._ask_replay(now_s, fresh=True)
            wait.patience_s = patience
        return self._take()

    def _take(self) -> list[Action[B, S]]:
        actions, self._actions = self._actions, []
        return actions

    def _is_newer(self, epoch: int, ts: float) -> bool:
        return epoch > self.epoch or ts > self._history.newest_ts

    def _is_late(self, seq: int, ts: float) -> bool:
        return self._history.knows(seq, ts) or (self.epoch != 0 and ts <= self._history.newest_ts)

    def _fence(self, epoch: int, ts: float, now_s: float) -> bool:
        """Whether a message counts: an older epoch is ignored, a newer one is a restart."""
        if self._known and epoch != self.epoch:
            if not self._is_newer(epoch, ts):
                self.counts.ignored += 1
                return False
            self._restart(now_s)
        self._enter(epoch, now_s)
        self._history.newest_ts = max(self._history.newest_ts, ts)
        return True

    def _enter(self, epoch: int, now_s: float) -> None:
        self._known = True
        self.epoch = epoch
        if epoch and not self._has_snapshots:
            self._has_snapshots = True
            self._distrust()
            self._rebuild(now_s)

    def _restart(self, now_s: float) -> None:
        """Drop the source; its publisher began anew, perhaps with chunks that it kept."""
        self.counts.restarts += 1
        self._distrust()
        self._actions.append(Drop(self.source))
        self._pending.clear()
        self._history = History()
        self.expected = 0
        self._adopt = False
        outstanding = self._wait.kind is not _Asked.NOTHING
        if self._has_snapshots:
            self._send_snapshot(now_s, fresh=outstanding)
        else:
            self._ask_replay(now_s, fresh=outstanding)

    def _begin_anew(self, now_s: float) -> None:
        """Without snapshots: forget, and begin where the publisher's buffer begins."""
        self._distrust()
        self._actions.append(Drop(self.source))
        self._want_rebuild = False
        self._rebuilt_s = now_s
        self._adopt = True
        self._ask_replay(now_s, fresh=self._wait.kind is not _Asked.NOTHING)

    def _rebuild(self, now_s: float) -> None:
        """Get the whole truth: after what is under way, not more often than an answer may take."""
        too_soon = now_s - self._rebuilt_s < self._times.answer_s
        if too_soon or self._wait.kind is _Asked.SNAPSHOT:
            self._want_rebuild = True
        elif self._has_snapshots:
            self._send_snapshot(now_s, fresh=self._wait.kind is not _Asked.NOTHING)
        else:
            self._begin_anew(now_s)

    def _adopt_pending(self) -> None:
        """The publisher had nothing buffered: the stream begins with what waits, or at 0."""
        if self._adopt:
            self._adopt = False
            self.expected = min(self._pending, default=0)

    def _found_gap(self) -> None:
        self.counts.gaps += 1
        self._distrust()

    def _settle(self, now_s: float) -> None:
        """Nothing is asked: take in what is next; what then still waits has a gap before it."""
        gap = self._catch_up()
        if self._want_rebuild:
            return
        if gap:
            if self.trusted:
                self._found_gap()
            self._ask_replay(now_s, fresh=False)
            return
        self._wait.patience_s = self._times.answer_s
        if not self.trusted:
            self.trusted = True
            self._actions.append(Trust(self.source))

    def _hold(self, seq: int, ts: float, batch: B) -> None:
        full = len(self._pending) >= PENDING_MAX and seq not in self._pending
        if full and seq != self.expected:
            self.counts.overflows += 1
            del self._pending[next(iter(self._pending))]
        self._pending[seq] = (ts, batch)

    def _forget_before(self, seq: int) -> None:
        self._pending = {at: held for at, held in self._pending.items() if at >= seq}

    def _drain(self) -> bool:
        """Take in what is next, as far as it goes. Says whether anything was."""
        before = self.expected
        while not self._adopt and self.expected in self._pending:
            ts, batch = self._pending.pop(self.expected)
            self._history.note(self.expected, ts)
            self._actions.append(Apply(self.source, batch))
            self.expected += 1
        return self.expected > before

    def _catch_up(self) -> bool:
        """Take in what is next. Says whether something waits behind a gap."""
        self._drain()
        if self.epoch == 0:
            self._forget_former_life()
        return bool(self._pending)

    def _forget_former_life(self) -> None:
        """Drop what waits with a later number and no later stamp: sent before a restart."""
        last = self._history.applied_ts
        for seq in [at for at, held in self._pending.items() if held[0] <= last]:
            del self._pending[seq]
            self.counts.ignored += 1

    def _distrust(self) -> None:
        if self.trusted:
            self.trusted = False
            self._actions.append(Distrust(self.source))

    def _ask_replay(self, now_s: float, *, fresh: bool) -> None:
        self.counts.replays += 1
        self._begin_wait(_Asked.REPLAY, now_s)
        start = 0 if self._adopt else max(self.expected - 1, 0)
        self._actions.append(AskReplay(self.source, start, fresh))

    def _send_snapshot(self, now_s: float, *, fresh: bool) -> None:
        self._want_rebuild = False
        self._rebuilt_s = now_s
        self._begin_wait(_Asked.SNAPSHOT, now_s)
        self._actions.append(AskSnapshot(self.source, fresh))

    def _begin_wait(self, kind: _Asked, now_s: float) -> None:
        wait = self._wait
        wait.kind, wait.since_s = kind, now_s
        wait.answered = wait.stale = False
        wait.probe = self.trusted
