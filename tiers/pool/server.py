"""The pool as a running thing: region, tiers, sockets and one thread that drives them.

Ownership. The server owns the region's files (under their lock), the tiers, the NIXL agent and the
sockets. Everything behind `start` happens on its own thread, except the tiers' and checksums'
threads.

Lifecycle. `start` -> `addresses` -> `stop`. A server that adopts a region serves what is READY at
once. A process that made a NIXL agent must end with `os._exit` or a signal.

Failure. `start` raises `ConfigError` (for what the machine refuses: `Refused`) or `Unsupported`,
and leaves nothing. An error that escapes the core while it handles one message is counted and
logged, and the server goes on.

Addresses. Clients: `ipc://` beside the region's files, mode 0600. Peers, events and replay: as
configured, on loopback unless told otherwise.
"""

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ...fabric.clock import Clock
from ...fabric.config import PoolConfig
from ...fabric.errors import Closed, FabricError, Malformed, Refused, Unavailable
from ...fabric.events import parse_replay_request
from ...fabric.metrics import PrometheusRecorder
from ...fabric.wire import decode
from ..event_log import EventLog
from ..factory import make_tier
from ..p2p.actions import Connect, Disconnect
from ..p2p.consumer import PullConsumer
from ..p2p.reads import Reads
from ..p2p.source import PullSource, SourceDescription
from ..p2p.transport import Segment, Transport
from .context import PoolContext
from .core import ClientCore, PoolPlace
from .directory import Directory
from .fetcher import Fetcher
from .gauges import Gauges
from .peering import DirectoryPins, Peering
from .process import alive, this_process
from .pulls import NoPulls, Pulls
from .region import Region
from .scrub import Scrubber
from .sockets import Dialled, PoolSockets, send
from .stream import PoolStream
from .table import SlotTable

LOG = logging.getLogger("kvfabric.pool")

IDLE_POLL_MS = 200
"""The longest sleep of an idle server: the grain of its leases and heartbeats."""
BUSY_POLL_MS = 1
"""Between looks at tiers and peers while something is under way."""
DOOMED_POLL_MS = 20
"""Between looks at reads that nobody waits for: from a source that stands still they never end."""
VERIFY_THREADS = 2
"""For checksums of pulled chunks: one sums 12 GB/s, and the other takes what piles up."""
ERROR_PAUSE_S = 0.01
"""After an error that escaped: one that comes again every turn must not fill the log's disk."""
CALL_S = 10.0
"""How long another thread waits for the server's."""


class RegionMemory:
    """The region's slots as views and addresses."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._bases = region.base_addresses()

    def view(self, slot: int, length: int) -> memoryview:
        """Return the first `length` bytes of a slot."""
        return self._region.view(slot, length)

    def place(self, slot: int) -> tuple[int, int]:
        """Return segment and offset of a slot."""
        return self._region.place(slot)

    def address(self, slot: int) -> int:
        """Return the address of a slot in this process."""
        segment, offset = self._region.place(slot)
        return self._bases[segment] + offset


class PoolServer:
    """One node's pool. See the module's text."""

    def __init__(self, config: PoolConfig, clock: Clock) -> None:
        self.config = config
        self.clock = clock
        self.recorder = PrometheusRecorder()
        self._gauges = Gauges(self.recorder, config.host.slot_bytes)
        self._undo: list[Callable[[], object]] = []
        self._calls: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._calls_lock = threading.Lock()
        self._serving = False
        """Whether the thread will still look at calls, and the sockets may be woken."""
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._watched: dict[int, tuple[int, int]] = {}
        self._unlink = False

    def start(self) -> None:
        """Open or adopt the region and serve. Raises `ConfigError` or `Unsupported`."""
        try:
            self._open_region()
            self._open_parts()
            self._open_sockets()
        except OSError as error:
            self._undo_all()
            remedy = "Raise the limit or free what it names (open files: ulimit -n)."
            raise Refused("the pool", f"cannot start: {error}", remedy) from error
        except BaseException:
            self._undo_all()
            raise
        self._unlink = False
        self._serving = True
        self._thread = threading.Thread(target=self._run, name="kvfabric-pool", daemon=True)
        self._thread.start()

    def stop(self, *, unlink: bool) -> None:
        """Drain and let go; with `unlink`, remove the region's files. Safe to call twice."""
        self._unlink = self._unlink or unlink
        self._stopping.set()
        if self._thread is not None:
            with self._calls_lock:
                if self._serving:
                    self.sockets.wake()
            self._thread.join()
            self._thread = None

    def stats(self) -> dict[str, float]:
        """Return gauges and counts by name. Raises `Closed`, or `Unavailable` after `CALL_S`."""
        return self._call(self._stats)

    def check(self) -> None:
        """Raise `Conservation` if the books do not balance."""
        self._call(self.fetcher.check)
        self._call(self.context.gpu.check)

    def _open_region(self) -> None:
        host = self.config.host
        self.region = Region.open(host.directory, self.config.run, self.config.node, host)
        self._unlink = not self.region.adopted  # should the start fail
        self._undo.append(lambda: self.region.close(unlink=self._unlink))
        self.memory = RegionMemory(self.region)
        slots = host.region_bytes // host.slot_bytes
        quarantine = (
            slots // 4
            if host.quarantine_bytes_max is None
            else host.quarantine_bytes_max // host.slot_bytes
        )
        self.directory = Directory(SlotTable(self.region.control), quarantine_slots_max=quarantine)
        self.context = PoolContext(
            self.directory, self.memory, this_process(), self.recorder, self.clock
        )
        adopted = self.directory.adopt(alive)
        if self.region.adopted:
            LOG.info("adopted the region of node %s: %s", self.config.node, adopted)

    def _open_parts(self) -> None:
        self._verifiers = ThreadPoolExecutor(VERIFY_THREADS, thread_name_prefix="kvfabric-verify")
        self._undo.append(lambda: self._verifiers.shutdown(wait=True))
        adopted = [chunk for _, chunk in self.directory.ready_chunks()]
        self.scrubber = Scrubber(self.context, self._verifiers, adopted)
        self.tiers = []
        for tier_config in self.config.tiers:
            tier = make_tier(tier_config, self.clock)
            self._undo.append(tier.close)
            self.tiers.append(tier)
        self.peering: Peering | None = None
        self.source: PullSource | None = None
        self.transport: Transport | None = None
        pulls: Pulls = NoPulls()
        if self.config.peers.transport == "nixl":
            pulls = self.peering = self._open_peering()
        self.fetcher = Fetcher(self.context, self.tiers, pulls)
        log = EventLog(
            self.config.node,
            self.directory.epoch,
            self.config.events.buffer_batches,
            self.config.events.heartbeat_s,
            self.clock,
        )
        self.stream = PoolStream(log, self.context, self.tiers)

    def _open_peering(self) -> Peering:
        from ..p2p.nixl import NixlTransport, devices_for

        node, epoch = self.config.node, self.directory.epoch
        devices = devices_for(self.config.peers.listen)
        transport = NixlTransport(f"{self.config.run}.{node}", epoch, devices)
        self._undo.append(transport.close)
        bases = self.region.base_addresses()
        sizes = [segment.nbytes for segment in self.region.segments]
        segments = tuple(Segment(*pair) for pair in zip(bases, sizes, strict=True))
        transport.register(segments)
        agent = transport.metadata()
        slot_bytes = self.config.host.slot_bytes
        self.transport = transport
        self.source = PullSource(
            SourceDescription(node, epoch, agent, segments, slot_bytes),
            DirectoryPins(self.directory, self.memory),
            self.config.peers,
        )
        consumer = PullConsumer(node, agent, slot_bytes, self.config.peers)
        return Peering(self.context, consumer, Reads(transport, self._verifiers))

    def _open_sockets(self) -> None:
        self.sockets = PoolSockets(self.config, self.directory.epoch)
        self._undo.append(self.sockets.close)
        self.addresses = self.sockets.addresses
        place = PoolPlace(
            self.config.node,
            self.region.control_path,
            tuple(self.region.segment_paths),
            self.config.host.slot_bytes,
            self.config.host.lease_s,
            tuple(tier.name for tier in self.tiers),
            self.addresses.peer if self.peering is not None else "",
        )
        self.core = ClientCore(place, self.context, self.fetcher)
        self.fetcher.chunk_bytes = self.core.namespaces.chunk_bytes
        self.stream.chunk_tokens = self.core.namespaces.chunk_tokens

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._turn()
            except Exception:  # the thread's outermost loop: a pool that stops answers nobody
                self.recorder.count("kvfabric_loop_errors_total", loop="pool")
                LOG.exception("an error escaped; the pool goes on")
                self._stopping.wait(ERROR_PAUSE_S)
        with self._calls_lock:
            self._serving = False
            for _, future in self._calls:
                future.set_exception(Closed("the pool"))
            self._calls.clear()
        self._say_goodbye()
        self._undo_all()

    def _say_goodbye(self) -> None:
        """Tell sources and peers, so that they need not wait for deadlines to know."""
        if self.source is not None:
            self.source.close()
        if self.peering is not None:
            self.peering.close()
        self._flush()

    def _turn(self) -> None:
        sockets = self.sockets
        ready = sockets.poll(self._poll_ms())
        for descriptor in [each for each in self._watched if each in ready]:
            self._process_ended(descriptor)
        for identity, *frames in sockets.received(sockets.clients, ready):
            self.core.on_frame(identity, frames[-1])
        for identity, *frames in sockets.received(sockets.peers, ready):
            self._on_peer(identity, frames[-1])
        for identity, *frames in sockets.received(sockets.replay, ready):
            self._on_replay(identity, frames)
        for endpoint, frames in sockets.from_sources(ready):
            if self.peering is not None:
                self.peering.on_frame(endpoint, frames[-1])
        for endpoint in sockets.lost_sources(ready):
            if self.peering is not None:
                self.peering.on_lost(endpoint)
        self._step()
        self._flush()

    def _poll_ms(self) -> int:
        peering, source = self.peering, self.source
        if peering is not None and peering.reading:
            return 0 if self.fetcher.busy else DOOMED_POLL_MS
        summing = peering is not None and peering.busy
        if summing or self.fetcher.busy or (source is not None and source.has_grants):
            return BUSY_POLL_MS
        deadline_s = min(
            self.directory.next_deadline_s(),
            self.fetcher.fetches.next_deadline_s(),
            self.scrubber.next_deadline_s(),
        )
        left_ms = (deadline_s - self.clock.now_s()) * 1000  # infinite, too, and on either side
        return int(max(0, min(IDLE_POLL_MS, left_ms + 1)))

    def _on_peer(self, identity: bytes, frame: bytes) -> None:
        try:
            envelope = decode(frame)
        except Malformed:
            self.recorder.count("kvfabric_messages_refused_total", channel="peer")
            return
        if self.source is None:
            return
        for answer in self.source.handle(identity, envelope, self.clock.now_s()):
            send(self.sockets.peers, [answer.identity, answer.frame])

    def _on_replay(self, identity: bytes, frames: list[bytes]) -> None:
        try:
            start = parse_replay_request(frames)
        except Malformed:
            self.recorder.count("kvfabric_messages_refused_total", channel="replay")
            return
        self._publish()
        for reply in self.stream.replay(start):
            send(self.sockets.replay, [identity, *reply])

    def _step(self) -> None:
        now_s = self.clock.now_s()
        if self.source is not None:
            self.source.tick(now_s)
            if self.transport is not None and self.source.has_grants:
                self.transport.progress()
        if self.peering is not None:
            self.peering.step()
        self.fetcher.step()
        self.scrubber.step()
        self.core.tick()
        with self._calls_lock:
            calls, self._calls = self._calls, []
        for call, future in calls:
            try:
                future.set_result(call())
            except FabricError as error:
                future.set_exception(error)

    def _flush(self) -> None:
        for reply in self.core.take_replies():
            send(self.sockets.clients, [reply.identity, reply.frame])
        if self.peering is not None:
            self._talk_to_sources(self.peering)
        self._publish()
        self._watch_processes()

    def _talk_to_sources(self, peering: Peering) -> None:
        for action in peering.take_socket_actions():
            if isinstance(action, Connect):
                if self.sockets.connect(action.endpoint) is Dialled.REFUSED:
                    peering.connect_failed(action.endpoint)
            elif isinstance(action, Disconnect):
                self.sockets.disconnect(action.endpoint)
            else:
                self.sockets.ask_source(action.endpoint, action.frame)

    def _publish(self) -> None:
        for frames in self.stream.take_frames():
            send(self.sockets.events, frames)

    def _watch_processes(self) -> None:
        for process in self.core.processes() - set(self._watched.values()):
            try:
                descriptor = os.pidfd_open(process[0])
            except ProcessLookupError:
                self.core.process_gone(*process)
                continue
            except OSError:  # no descriptor is left: the next turn tries again
                self.recorder.count("kvfabric_loop_errors_total", loop="watch")
                continue
            if not alive(*process):
                os.close(descriptor)
                self.core.process_gone(*process)
                continue
            self._watched[descriptor] = process
            self.sockets.watch(descriptor)

    def _process_ended(self, descriptor: int) -> None:
        self.sockets.unwatch(descriptor)
        os.close(descriptor)
        self.core.process_gone(*self._watched.pop(descriptor))

    def _call(self, work: Callable[[], Any]) -> Any:
        future: Future[Any] = Future()
        with self._calls_lock:
            if not self._serving:
                raise Closed("the pool")
            self._calls.append((work, future))
            self.sockets.wake()
        try:
            return future.result(CALL_S)
        except TimeoutError as error:
            raise Unavailable("the pool's own thread", CALL_S, "It is overloaded.") from error

    def metrics(self) -> bytes:
        """Return all metrics in Prometheus' text form."""
        return self._call(self._exposition)

    def _exposition(self) -> bytes:
        self._record()
        return self.recorder.exposition()

    def _record(self) -> None:
        gpu, tiers = self.context.gpu, self.tiers
        self._gauges.record(self.directory, gpu, tiers, self.peering, self.source)

    def _stats(self) -> dict[str, float]:
        self._record()
        return self.fetcher.stats() | self.recorder.values()

    def _undo_all(self) -> None:
        for descriptor in self._watched:
            os.close(descriptor)
        self._watched.clear()
        while self._undo:
            self._undo.pop()()
