"""Joins the peer roles to the pool: what a pull needs of the directory, and what a lease pins
there.

The roles decide (`tiers.p2p`); this carries out what they ask of the directory and of the
transport, and hands what is for sockets to the shell. One thread calls everything.
"""

from collections.abc import Sequence

from ...fabric.errors import Malformed
from ...fabric.types import (
    ChunkKey,
    Committed,
    Lookup,
    NamespaceId,
    Released,
    Reserved,
    SlotRef,
    SourceRange,
)
from ...fabric.wire import decode
from ..p2p.actions import (
    AbortSlots,
    Action,
    Connect,
    Disconnect,
    Finished,
    Landing,
    Pull,
    RemovePeer,
    ReserveSlots,
    SendTo,
    StartRead,
    StartVerify,
)
from ..p2p.consumer import PullConsumer
from ..p2p.reads import ReadDone, Reads
from ..p2p.source import Placed
from .context import Memory, PoolContext
from .directory import Directory
from .pulls import PullDone

PULL_DEADLINE_S = 30.0
"""For a whole pull, so that its slots come back; a source that stops answering ends it sooner."""

SocketAction = Connect | Disconnect | SendTo


class DirectoryPins:
    """What a source pins for its peers. It ends each lease itself: these have no timer."""

    def __init__(self, directory: Directory, memory: Memory) -> None:
        self._directory = directory
        self._memory = memory

    def pin(
        self,
        owner: bytes,
        namespace: NamespaceId,
        keys: Sequence[ChunkKey],
        lease_s: float,
        now_s: float,
    ) -> Sequence[Placed | Lookup]:
        """Pin what is readable; see `tiers.p2p.source.Pins`."""
        del lease_s
        name = f"peer:{owner.hex()}"
        self._directory.open_owner(name, float("inf"), 0, 0, now_s)
        pinned = self._directory.pin(name, namespace, keys, now_s)
        if all(one.status is not Lookup.HIT for one in pinned):
            self._directory.owner_gone(name)
        return [
            Placed(one.chunk, *self._memory.place(one.chunk.slot.slot))
            if one.status is Lookup.HIT
            else one.status
            for one in pinned
        ]

    def release(self, owner: bytes, refs: Sequence[SlotRef]) -> Sequence[Released]:
        """End pins."""
        return self._directory.release(f"peer:{owner.hex()}", refs, 0.0)

    def forget(self, owner: bytes) -> None:
        """End whatever is left."""
        self._directory.owner_gone(f"peer:{owner.hex()}")


class Peering:
    """The pulls of one pool."""

    def __init__(
        self,
        context: PoolContext,
        consumer: PullConsumer,
        reads: Reads,
    ) -> None:
        self.consumer = consumer
        self.reads = reads
        self._directory = context.directory
        self._memory = context.memory
        self._process = context.process
        self._recorder = context.recorder
        self._clock = context.clock
        self._done: list[PullDone] = []
        self._for_sockets: list[SocketAction] = []
        self._begun_s: dict[int, float] = {}
        self._doomed: dict[int, set[SlotRef]] = {}
        """Slots of pulls that are over, into which a read may still write."""

    @property
    def reading(self) -> bool:
        """Whether bytes are on their way: the shell looks all the time."""
        return self.reads.running

    @property
    def busy(self) -> bool:
        """Whether bytes are on their way or being summed: the shell looks often.

        Not all the time for sums alone: they need the interpreter that looking keeps busy.
        """
        return self.reads.busy

    def pull(
        self,
        pull_id: int,
        source: SourceRange,
        namespace: NamespaceId,
        keys: Sequence[ChunkKey],
    ) -> None:
        """Begin a pull of all `keys` from one source."""
        now_s = self._clock.now_s()
        pull = Pull(
            pull_id, source.node, source.endpoint, namespace, tuple(keys), now_s + PULL_DEADLINE_S
        )
        self._begun_s[pull_id] = now_s
        self._carry_out(self.consumer.want(pull, now_s))

    def connect_failed(self, endpoint: str) -> None:
        """A `Connect` could not be carried out."""
        self._carry_out(self.consumer.on_connect_failed(endpoint, self._clock.now_s()))

    def on_frame(self, endpoint: str, frame: bytes) -> None:
        """Take a source's answer."""
        try:
            envelope = decode(frame)
        except Malformed:
            self._recorder.count("kvfabric_messages_refused_total", channel="peer")
            return
        self._carry_out(self.consumer.on_message(endpoint, envelope, self._clock.now_s()))

    def on_lost(self, endpoint: str) -> None:
        """Nobody serves at a source's endpoint any more, or yet."""
        self._carry_out(self.consumer.on_connect_failed(endpoint, self._clock.now_s()))

    def step(self) -> None:
        """Move reads on and let time pass."""
        now_s = self._clock.now_s()
        for event in self.reads.poll():
            if isinstance(event, ReadDone):
                self._carry_out(self.consumer.on_read_done(event.read_id, event.state, now_s))
            else:
                self._carry_out(self.consumer.on_verified(event.read_id, event.checksums, now_s))
        self._carry_out(self.consumer.tick(now_s))

    def close(self) -> None:
        """End all pulls and say goodbye to their sources."""
        self._carry_out(self.consumer.close(self._clock.now_s()))

    def take_done(self) -> Sequence[PullDone]:
        """Return the pulls that ended since the last call."""
        done, self._done = self._done, []
        return done

    def take_socket_actions(self) -> Sequence[SocketAction]:
        """Return what is to be done on sockets, in order."""
        actions, self._for_sockets = self._for_sockets, []
        return actions

    def stats(self) -> dict[str, float]:
        """Return counts of the consumer."""
        stats = self.consumer.stats()
        return {f"pull_{n}": float(getattr(stats, n)) for n in type(stats).__dataclass_fields__}

    def _carry_out(self, actions: Sequence[Action]) -> None:
        queue = list(actions)
        while queue:
            action = queue.pop(0)
            if isinstance(action, Connect | Disconnect | SendTo):
                self._for_sockets.append(action)
            elif isinstance(action, StartRead | StartVerify | RemovePeer):
                self.reads.do(action)
            elif isinstance(action, ReserveSlots):
                queue += self._reserve(action)
            elif isinstance(action, Finished):
                self._finish(action)
            else:
                self._abort(action)

    def _owner(self, pull_id: int) -> str:
        return f"pull:{pull_id}"

    def _reserve(self, action: ReserveSlots) -> Sequence[Action]:
        now_s = self._clock.now_s()
        owner = self._owner(action.pull.pull_id)
        self._directory.open_owner(owner, float("inf"), *self._process, now_s)
        got = self._directory.reserve(
            owner,
            action.pull.namespace,
            list(action.keys),
            list(action.indices),
            list(action.lengths),
            now_s,
        )
        places = tuple(
            Landing(
                one.slot,
                self._memory.address(one.slot.slot),
                self._memory.view(one.slot.slot, length),
            )
            if one.status is Reserved.GRANTED
            else one.status
            for one, length in zip(got, action.lengths, strict=True)
        )
        return self.consumer.reserved(action.pull.pull_id, places, now_s)

    def _finish(self, action: Finished) -> None:
        owner = self._owner(action.pull.pull_id)
        now_s = self._clock.now_s()
        outcomes = list(action.outcomes)
        if action.commits:
            statuses = self._directory.commit(
                owner,
                [chunk.slot for chunk in action.commits],
                [chunk.checksum for chunk in action.commits],
                now_s,
            )
            lost = {
                chunk.key
                for chunk, status in zip(action.commits, statuses, strict=True)
                if status is Committed.LOST
            }
            outcomes = [
                Lookup.MISS if key in lost else outcome
                for key, outcome in zip(action.pull.keys, outcomes, strict=True)
            ]
        moved = sum(chunk.length_bytes for chunk in action.commits)
        self._count(action, moved)
        self._recorder.observe(
            "kvfabric_pull_seconds", now_s - self._begun_s.pop(action.pull.pull_id, now_s)
        )
        if action.aborts:
            self._directory.abort(owner, action.aborts)
        if action.doomed:
            self._doomed[action.pull.pull_id] = set(action.doomed)
        else:
            self._directory.owner_gone(owner)
        self._done.append(PullDone(action.pull.pull_id, tuple(outcomes)))

    def _count(self, action: Finished, moved_bytes: int) -> None:
        self._recorder.count("kvfabric_loaded_bytes_total", moved_bytes, path="peer")
        hits = action.outcomes.count(Lookup.HIT)
        if hits:
            outcome = "done" if hits == len(action.outcomes) else "partial"
        else:
            outcome = "expired" if action.doomed else "refused"
        self._recorder.count("kvfabric_pulls_total", outcome=outcome)

    def _abort(self, action: AbortSlots) -> None:
        owner = self._owner(action.pull_id)
        self._directory.abort(owner, action.refs)
        left = self._doomed.get(action.pull_id, set()) - set(action.refs)
        if left:
            self._doomed[action.pull_id] = left
        else:
            self._doomed.pop(action.pull_id, None)
            self._directory.owner_gone(owner)
