"""The carrying out of reads, with a transport that copies between byte arrays."""

from concurrent.futures import Executor, Future

from kvfabric.fabric.checksum import checksum
from kvfabric.fabric.errors import Malformed
from kvfabric.fabric.types import SlotRef
from kvfabric.tiers.p2p.actions import Arrival, Landing, RemovePeer, StartRead, StartVerify
from kvfabric.tiers.p2p.reads import ReadDone, Reads, Verified
from kvfabric.tiers.p2p.transport import ReadState, Transport

AGENT = b"source"
REMOTE, LOCAL = 1000, 5000
BYTES = 64


class FakeTransport(Transport):
    """Addresses count from REMOTE in one array and from LOCAL in another; polls finish reads."""

    def __init__(self) -> None:
        self.remote = bytearray(range(256))
        self.local = bytearray(256)
        self.peers: list[str] = []
        self.polls_left: dict[int, int] = {}
        self.items = {}
        self.delay_polls = 0
        self.failing = False

    def metadata(self):
        return AGENT

    def register(self, segments):
        pass

    def add_peer(self, agent):
        if agent != AGENT:
            raise Malformed("agent metadata", "unknown")
        self.peers.append("source")
        return "source"

    def remove_peer(self, peer):
        self.peers.remove(peer)

    def start_read(self, peer, items):
        assert peer in self.peers
        handle = len(self.items) + 1
        self.items[handle], self.polls_left[handle] = items, self.delay_polls
        return handle

    def poll(self, handle):
        if self.polls_left[handle]:
            self.polls_left[handle] -= 1
            return ReadState.RUNNING
        if self.failing:
            return ReadState.FAILED
        for item in self.items[handle]:
            start = item.remote_address - REMOTE
            data = self.remote[start : start + item.length_bytes]
            at = item.local_address - LOCAL
            self.local[at : at + item.length_bytes] = data
        return ReadState.DONE

    def release(self, handle):
        del self.items[handle], self.polls_left[handle]

    def progress(self):
        pass

    def close(self):
        pass


class Later(Executor):
    """Runs what was submitted when the test says so."""

    def __init__(self) -> None:
        self.waiting = []

    def submit(self, fn, /, *args, **kwargs):
        future: Future = Future()
        self.waiting.append((future, fn, args))
        return future

    def run(self) -> None:
        for future, fn, args in self.waiting:
            future.set_result(fn(*args))
        self.waiting.clear()


def arrivals(transport):
    view = memoryview(transport.local)
    return tuple(
        Arrival(
            index,
            Landing(SlotRef(index, 1), LOCAL + index * BYTES, view[index * BYTES :]),
            REMOTE + (1 - index) * BYTES,
            BYTES - index,
            0,
        )
        for index in range(2)
    )


def test_a_read_and_its_verification():
    transport, later = FakeTransport(), Later()
    reads = Reads(transport, later)
    transport.delay_polls = 1
    two = arrivals(transport)
    reads.do(StartRead(1, AGENT, two))
    assert reads.busy
    assert reads.poll() == ()
    assert reads.poll() == (ReadDone(1, ReadState.DONE),)
    reads.do(StartVerify(1, two))
    assert reads.poll() == ()
    later.run()
    assert reads.poll() == (
        Verified(1, (checksum(bytes(range(64, 128))), checksum(bytes(range(63))))),
    )
    assert not reads.busy
    assert not transport.items


def test_a_peer_is_added_once_and_removed():
    transport = FakeTransport()
    reads = Reads(transport, Later())
    for read_id in range(3):
        reads.do(StartRead(read_id, AGENT, arrivals(transport)))
    assert transport.peers == ["source"]
    reads.poll()
    reads.do(RemovePeer(AGENT))
    reads.do(RemovePeer(AGENT))
    assert transport.peers == []


def test_failures_are_reported():
    transport = FakeTransport()
    reads = Reads(transport, Later())
    reads.do(StartRead(1, b"nonsense", arrivals(transport)))
    assert reads.busy
    assert reads.poll() == (ReadDone(1, ReadState.FAILED),)
    transport.failing = True
    reads.do(StartRead(2, AGENT, arrivals(transport)))
    assert reads.poll() == (ReadDone(2, ReadState.FAILED),)
    assert reads.poll() == ()
