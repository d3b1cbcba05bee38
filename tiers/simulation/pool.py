"""A node's pool in a simulated world: the real parts, in a shell of virtual time.

It joins what `tiers.pool.server` joins, with a network instead of sockets, shared memory of the
node instead of files, `SimTier` for a tier of files and `SimTransport` for NIXL. The control file
and the segment survive a kill; the next incarnation adopts them. Engines speak to it on the node's
own network, everybody else on the one between nodes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from ...fabric.config import EventConfig, PeerConfig
from ...fabric.events import Frames, parse_replay_request
from ...fabric.metrics import Recorder as Metrics
from ...fabric.records import TableHeader, control_bytes
from ...fabric.wire import decode
from ..event_log import EventLog
from ..p2p.actions import Connect, Disconnect
from ..p2p.consumer import PullConsumer
from ..p2p.reads import Reads
from ..p2p.source import PullSource, SourceDescription
from ..p2p.transport import Segment
from ..pool.context import PoolContext
from ..pool.core import ClientCore, PoolPlace
from ..pool.directory import Directory
from ..pool.fetcher import Fetcher
from ..pool.peering import DirectoryPins, Peering
from ..pool.stream import PoolStream
from ..pool.table import SlotTable, format_table, with_epoch, write_header
from .disk import Disk
from .network import Network
from .process import Process
from .remote_memory import RemoteMemory
from .sockets import Socket, pack, unpack
from .tier import SimTier
from .transport import REGION_ADDRESS, SimExecutor, SimTransport

BUSY_TURN_S = 0.002
"""Between looks at tiers and peers while something is under way; the server polls every 1 ms."""


@dataclass(frozen=True, slots=True)
class NodeShape:
    """How large a node is and how patient."""

    slots: int = 24
    slot_bytes: int = 4096
    lease_s: float = 2.0
    quarantine_slots_max: int = 6
    tier_bytes: int = 40 * 4096
    peers: PeerConfig = field(default_factory=PeerConfig)
    events: EventConfig = field(default_factory=EventConfig)


@dataclass(frozen=True, slots=True)
class Node:
    """What a node is made of; all of it survives its processes."""

    shape: NodeShape
    local: Network
    """Between the pool and its engines: never lossy, since it is a socket of one machine."""
    streams: Network
    """Between pools and readers of events: frames may be lost, but not overtake or double, since
    each is on one connection."""
    memory: RemoteMemory
    disk: Disk
    metrics: Metrics
    readers: tuple[str, ...]
    """Who gets the events."""
    alive: Callable[[int, int], bool]
    """Whether the process with this pid and start time still runs."""


class SimMemory:
    """The segment's slots as views and addresses."""

    def __init__(self, segment: memoryview, slot_bytes: int) -> None:
        self._segment, self._slot_bytes = segment, slot_bytes

    def view(self, slot: int, length: int) -> memoryview:
        """Return the first `length` bytes of a slot."""
        start = slot * self._slot_bytes
        return self._segment[start : start + length]

    def place(self, slot: int) -> tuple[int, int]:
        """Return segment and offset of a slot."""
        return 0, slot * self._slot_bytes

    def address(self, slot: int) -> int:
        """Return the address of a slot."""
        return REGION_ADDRESS + slot * self._slot_bytes


class SimPool:
    """The program of a pool's process. Its parts are public, for a test to look at."""

    def __init__(self, process: Process, node: Node) -> None:
        self.process, self.node = process, node
        self._connections = 0
        self._dealers: dict[str, int] = {}
        self._turn_planned = False
        self._open_region()
        self._open_parts()

    def _open_region(self) -> None:
        shape = self.node.shape
        control = self.process.shared_memory("control", control_bytes(shape.slots))
        segment_bytes = shape.slots * shape.slot_bytes
        self.segment = self.process.shared_memory("segment", segment_bytes)
        self.memory = SimMemory(self.segment, shape.slot_bytes)
        fresh = self.process.epoch == 1
        if fresh:
            format_table(control, shape.slots, shape.slot_bytes, segment_bytes, 1)
        else:
            header = TableHeader.decode(control)
            write_header(control, with_epoch(header, self.process.epoch))
        self.table = SlotTable(control)
        self.directory = Directory(self.table, quarantine_slots_max=shape.quarantine_slots_max)
        if not fresh:
            adopted = self.directory.adopt(self.node.alive)
            self.process.world.note(self.process.name, f"adopts {adopted}")

    def _open_parts(self) -> None:
        process, node, clock = self.process, self.node, self.process.clock
        shape, name, epoch = node.shape, process.name, process.epoch
        self.context = PoolContext(
            self.directory, self.memory, (process.pid, epoch), node.metrics, clock
        )
        self.tier = SimTier(node.disk, process, clock, name="sim", quota_bytes=shape.tier_bytes)
        transport = SimTransport(process, node.memory, self.segment)
        segments = (Segment(REGION_ADDRESS, self.segment.nbytes),)
        transport.register(segments)
        agent = transport.metadata()
        self.source = PullSource(
            SourceDescription(name, epoch, agent, segments, shape.slot_bytes),
            DirectoryPins(self.directory, self.memory),
            shape.peers,
        )
        consumer = PullConsumer(name, agent, shape.slot_bytes, shape.peers)
        self.peering = Peering(self.context, consumer, Reads(transport, SimExecutor(process)))
        self.fetcher = Fetcher(self.context, [self.tier], self.peering)
        log = EventLog(
            name,
            epoch,
            shape.events.buffer_batches,
            shape.events.heartbeat_s,
            clock,
        )
        self.stream = PoolStream(log, self.context, [self.tier])
        place = PoolPlace(name, "control", ("segment",), shape.slot_bytes, shape.lease_s)
        self.core = ClientCore(place, self.context, self.fetcher)
        self.fetcher.chunk_bytes = self.core.namespaces.chunk_bytes
        self.stream.chunk_tokens = self.core.namespaces.chunk_tokens

    def on_message(self, source: str, frame: bytes) -> None:
        """Take a frame of an engine, a peer or a reader of events."""
        socket, connection, message = unpack(frame)
        identity = pack(socket, connection, source.encode())
        if socket is Socket.ENGINE:
            self.core.on_frame(identity, message)
        elif socket is Socket.SOURCE:
            for send in self.source.handle(identity, decode(message), self.process.clock.now_s()):
                self.process.send(source, pack(Socket.CONSUMER, connection, send.frame))
        elif socket is Socket.CONSUMER and self._dealers.get(source) == connection:
            self.peering.on_frame(source, message)
        elif socket is Socket.REPLAY:
            self._publish()
            replies = self.stream.replay(parse_replay_request([b"", message]))
            self._send_frames(source, Socket.REPLAYED, connection, replies)
        self._turn()

    def tick(self) -> None:
        """Let time pass."""
        self._turn()

    def _turn(self) -> None:
        self._watch_processes()
        self.source.tick(self.process.clock.now_s())
        self.peering.step()
        self.fetcher.step()
        self.core.tick()
        self._flush()
        if (self.fetcher.busy or self.peering.busy) and not self._turn_planned:
            self._turn_planned = True
            self.process.at(BUSY_TURN_S, self._busy_turn, f"{self.process.name} busy")

    def _busy_turn(self) -> None:
        self._turn_planned = False
        self._turn()

    def _watch_processes(self) -> None:
        for process in sorted(self.core.processes()):
            if not self.node.alive(*process):
                self.core.process_gone(*process)

    def _flush(self) -> None:
        for reply in self.core.take_replies():
            _, connection, name = unpack(reply.identity)
            frame = pack(Socket.ENGINE, connection, reply.frame)
            self.node.local.send(self.process.name, name.decode(), frame)
        for action in self.peering.take_socket_actions():
            if isinstance(action, Connect):
                self._connections += 1
                connection = self.process.epoch << 32 | self._connections
                self._dealers[action.endpoint] = connection
            elif isinstance(action, Disconnect):
                self._dealers.pop(action.endpoint, None)
            elif action.endpoint in self._dealers:
                connection = self._dealers[action.endpoint]
                self.process.send(action.endpoint, pack(Socket.SOURCE, connection, action.frame))
        self._publish()

    def _publish(self) -> None:
        for frames in self.stream.take_frames():
            for reader in self.node.readers:
                self._send_frames(reader, Socket.EVENT, 0, [frames])

    def _send_frames(
        self, target: str, socket: Socket, connection: int, messages: list[Frames]
    ) -> None:
        """Send messages that arrive together or not at all, like a stretch of one connection."""
        frame = pack(socket, connection, msgspec.msgpack.encode(messages))
        self.node.streams.send(self.process.name, target, frame)

    def check(self) -> None:
        """Raise `Conservation` if any part's books do not balance."""
        self.fetcher.check()
        self.source.check()
        self.peering.consumer.check()
