"""Two real peers for `test_p2p_nixl`: `p2p_peer.py SCENARIO` starts a source and pulls from it.

Prints one JSON object. Both processes end with `os._exit`, as everybody must who made a UCX agent.
"""

import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import zmq

from kvfabric.fabric.checksum import checksum
from kvfabric.fabric.clock import SystemClock
from kvfabric.fabric.config import PeerConfig
from kvfabric.fabric.types import Chunk, Lookup, NamespaceId, Released, SlotRef, make_key
from kvfabric.fabric.wire import decode
from kvfabric.tiers.p2p.actions import (
    AbortSlots,
    Connect,
    Disconnect,
    Finished,
    Landing,
    Pull,
    ReserveSlots,
    SendTo,
)
from kvfabric.tiers.p2p.consumer import PullConsumer
from kvfabric.tiers.p2p.nixl import NixlTransport, devices_for
from kvfabric.tiers.p2p.reads import ReadDone, Reads
from kvfabric.tiers.p2p.source import Placed, PullSource, SourceDescription
from kvfabric.tiers.p2p.transport import ReadItem, ReadState, Segment

NAMESPACE = NamespaceId(bytes(16))
CONFIG = PeerConfig()
CLOCK = SystemClock()
LISTEN = "tcp://127.0.0.1:*"


@dataclass
class Region:
    """Shared memory with room for `chunks` chunks."""

    chunks: int
    chunk_bytes: int

    def __post_init__(self) -> None:
        handle = os.memfd_create("region")
        os.ftruncate(handle, self.chunks * self.chunk_bytes)
        self.map = mmap.mmap(handle, self.chunks * self.chunk_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.segment = Segment(self.address, self.chunks * self.chunk_bytes)

    def view(self, index: int) -> memoryview:
        return memoryview(self.map)[index * self.chunk_bytes : (index + 1) * self.chunk_bytes]

    def fill(self) -> None:
        for index in range(self.chunks):
            self.view(index)[:] = index.to_bytes(8, "little") * (self.chunk_bytes // 8)


def say(value) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def key(index: int):
    return make_key(index.to_bytes(16, "big"), 0)


class Pins:
    """A pool that holds chunks 0 to n - 1 in slots of the same number, for ever."""

    def __init__(self, region: Region) -> None:
        self.places = {
            key(index): Placed(
                Chunk(
                    key(index), SlotRef(index, 1), region.chunk_bytes, checksum(region.view(index))
                ),
                0,
                index * region.chunk_bytes,
            )
            for index in range(region.chunks)
        }

    def pin(self, owner, namespace, keys, lease_s, now_s):
        return [self.places.get(one, Lookup.MISS) for one in keys]

    def release(self, owner, refs):
        return [Released.HELD] * len(refs)

    def forget(self, owner):
        pass


def serve(chunks: int, chunk_bytes: int) -> None:
    region = Region(chunks, chunk_bytes)
    region.fill()
    transport = NixlTransport("source", 7, devices_for(LISTEN))
    transport.register([region.segment])
    description = SourceDescription(
        "source", 7, transport.metadata(), (region.segment,), chunk_bytes
    )
    source = PullSource(description, Pins(region), CONFIG)
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(LISTEN)
    say([socket.last_endpoint.decode(), transport.metadata().hex(), region.address])
    parent = os.getppid()
    while os.getppid() == parent:
        if socket.poll(1):
            identity, frame = socket.recv_multipart()
            for send in source.handle(identity, decode(frame), CLOCK.now_s()):
                socket.send_multipart([send.identity, send.frame])
        source.tick(CLOCK.now_s())
        transport.progress()


class Puller:
    """The least that drives a `PullConsumer`."""

    def __init__(self, chunks: int, chunk_bytes: int, *, verify: bool = True) -> None:
        self.region = Region(chunks, chunk_bytes)
        self.transport = NixlTransport("consumer", 1, devices_for(LISTEN))
        self.transport.register([self.region.segment])
        self.consumer = PullConsumer("consumer", self.transport.metadata(), chunk_bytes, CONFIG)
        self.sums: dict[int, int] = {}
        self.executor = ThreadPoolExecutor(1)
        self.reads = Reads(self.transport, self.executor)
        self.context = zmq.Context()
        self.sockets: dict[str, zmq.Socket] = {}
        self.finished: Finished | None = None
        self.aborted: AbortSlots | None = None
        self.before_read = lambda: None
        self.count = 0

    def pull(self, endpoint: str, keys) -> tuple[Finished, float]:
        start_s = CLOCK.now_s()
        self.count, self.finished = self.count + 1, None
        wanted = Pull(self.count, "source", endpoint, NAMESPACE, tuple(keys), start_s + 5)
        self.do(self.consumer.want(wanted, CLOCK.now_s()))
        while self.finished is None:
            self.step()
        self.consumer.check()
        return self.finished, CLOCK.now_s() - start_s

    def step(self) -> None:
        for address, socket in tuple(self.sockets.items()):
            while self.sockets.get(address) is socket and socket.poll(0 if self.reads.busy else 1):
                envelope = decode(socket.recv())
                self.do(self.consumer.on_message(address, envelope, CLOCK.now_s()))
        for event in self.reads.poll():
            now_s = CLOCK.now_s()
            if isinstance(event, ReadDone):
                self.do(self.consumer.on_read_done(event.read_id, event.state, now_s))
            else:
                self.do(self.consumer.on_verified(event.read_id, event.checksums, now_s))
        self.do(self.consumer.tick(CLOCK.now_s()))

    def do(self, actions) -> None:
        for action in actions:
            if isinstance(action, Connect):
                socket = self.sockets[action.endpoint] = self.context.socket(zmq.DEALER)
                socket.connect(action.endpoint)
            elif isinstance(action, Disconnect):
                self.sockets.pop(action.endpoint).close(0)
            elif isinstance(action, SendTo):
                self.sockets[action.endpoint].send(action.frame, zmq.NOBLOCK)
            elif isinstance(action, ReserveSlots):
                places = tuple(
                    Landing(
                        SlotRef(index, 1),
                        self.region.address + index * self.region.chunk_bytes,
                        self.region.view(index),
                    )
                    for index in action.indices
                )
                self.before_read()
                self.do(self.consumer.reserved(action.pull.pull_id, places, CLOCK.now_s()))
            elif isinstance(action, Finished):
                self.finished = action
            elif isinstance(action, AbortSlots):
                self.aborted = action
            else:
                self.reads.do(action)


def start_source(chunks: int, chunk_bytes: int):
    process = subprocess.Popen(
        [sys.executable, __file__, "serve", str(chunks), str(chunk_bytes)],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    return process, *json.loads(process.stdout.readline())


def names(finished: Finished) -> dict[str, int]:
    return {one.name: finished.outcomes.count(one) for one in set(finished.outcomes)}


def scenario_agent() -> dict:
    transport = NixlTransport("node", 3, devices_for(LISTEN))
    listening = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout
    mine = [line.split()[3] for line in listening.splitlines() if f"pid={os.getpid()}," in line]
    result = {"torch": "torch" in sys.modules, "name": transport.name, "listening": mine}
    transport.close()
    transport.close()
    return result


def scenario_pull() -> dict:
    """Pull, then again from a source that is killed."""
    source, endpoint, _, _ = start_source(8, 1 << 20)
    puller = Puller(9, 1 << 20)
    first, _ = puller.pull(endpoint, [key(index) for index in range(9)])
    right = all(puller.region.view(index)[0] == index for index in range(8))
    os.kill(source.pid, signal.SIGKILL)
    source.wait()
    killed, killed_s = puller.pull(endpoint, [key(0)])
    after, after_s = puller.pull(endpoint, [key(0)])
    return {
        "first": names(first), "right": right, "commits": len(first.commits),
        "killed": names(killed), "killed_s": killed_s,
        "after": names(after), "after_s": after_s,
    }  # fmt: skip


def scenario_stopped() -> dict:
    """A source that is stopped when the read begins, and goes on later (over TCP)."""
    source, endpoint, _, _ = start_source(8, 1 << 20)
    puller = Puller(8, 1 << 20)
    keys = [key(index) for index in range(8)]
    first, _ = puller.pull(endpoint, keys)
    puller.before_read = lambda: os.kill(source.pid, signal.SIGSTOP)
    stopped, stopped_s = puller.pull(endpoint, keys)
    early = puller.aborted is not None
    os.kill(source.pid, signal.SIGCONT)
    patience_s = CLOCK.now_s() + 5
    while puller.aborted is None and CLOCK.now_s() < patience_s:
        puller.step()
    source.kill()
    source.wait()
    return {
        "first": names(first), "stopped": names(stopped), "stopped_s": stopped_s,
        "doomed": len(stopped.doomed), "early": early,
        "aborted": len(puller.aborted.refs) if puller.aborted else 0,
    }  # fmt: skip


def scenario_death() -> dict:
    """What the transport alone says of a peer that is killed before or during a read."""
    source, _, agent, address = start_source(64, 1 << 20)
    region = Region(64, 1 << 20)
    transport = NixlTransport("consumer", 1, devices_for(LISTEN))
    transport.register([region.segment])
    peer = transport.add_peer(bytes.fromhex(agent))
    items = [
        ReadItem(region.address + at, address + at, 1 << 20) for at in range(0, 64 << 20, 1 << 20)
    ]

    def read(*, kill: bool = False) -> tuple[str, float]:
        start_s = CLOCK.now_s()
        handle = transport.start_read(peer, items)
        if kill:
            source.kill()
        while transport.poll(handle) == ReadState.RUNNING and CLOCK.now_s() < start_s + 5:
            pass
        state = transport.poll(handle)
        transport.release(handle)
        return state.name, CLOCK.now_s() - start_s

    result = {"alive": read(), "during": read(kill=True)}
    source.wait()
    result["before"] = read()
    transport.remove_peer(peer)
    transport.remove_peer(peer)
    result["unknown"] = read()
    transport.close()
    return result


def scenario_speed() -> dict:
    """GB/s of a pull against raw reads of the same chunks in the same batches."""
    chunks, chunk_bytes, batch = 512, 2 << 20, 16
    source, endpoint, agent, address = start_source(chunks, chunk_bytes)
    puller = Puller(chunks, chunk_bytes)
    puller.pull(endpoint, [key(index) for index in range(chunks)])
    transport, base = puller.transport, puller.region.address
    peer = transport.add_peer(bytes.fromhex(agent))
    raw, pulled = [], []
    for _ in range(3):
        start_s = CLOCK.now_s()
        for first in range(0, chunks, batch):
            items = [
                ReadItem(base + at * chunk_bytes, address + at * chunk_bytes, chunk_bytes)
                for at in range(first, first + batch)
            ]
            handle = transport.start_read(peer, items)
            while transport.poll(handle) == ReadState.RUNNING:
                pass
            transport.release(handle)
        raw.append(chunks * chunk_bytes / (CLOCK.now_s() - start_s) / 1e9)
        finished, took_s = puller.pull(endpoint, [key(index) for index in range(chunks)])
        assert names(finished) == {"HIT": chunks}
        pulled.append(chunks * chunk_bytes / took_s / 1e9)
    source.kill()
    source.wait()
    ratio = sorted(pulled)[1] / sorted(raw)[1]
    return {"raw": raw, "pulled": pulled, "ratio": ratio}


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]), int(sys.argv[3]))
    else:
        say(globals()[f"scenario_{sys.argv[1]}"]())
    os._exit(0)
