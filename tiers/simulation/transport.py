"""The peers' transport and executor on virtual time, for `PullConsumer` and `PullSource`.

`SimTransport` does one-sided reads through `RemoteMemory`; an address is a place in its process's
region. `SimExecutor` gives results later, and none once its process is gone. Both belong to one
incarnation of one process, as a NIXL agent and a thread pool do.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import ParamSpec, TypeVar

from ...fabric.errors import Conservation, Malformed
from ..p2p.transport import ReadItem, Segment, Transport
from ..p2p.transport import ReadState as TransportState
from .process import Process
from .remote_memory import ReadState, RemoteMemory, RemoteRead

P = ParamSpec("P")
R = TypeVar("R")

REGION_ADDRESS = 1 << 40
"""Where every region begins: far from 0, so that an offset taken for an address is noticed."""
_MARK = "sim"


class SimTransport(Transport):
    """One process's end. `region` is all that it lets others read and reads into."""

    def __init__(self, process: Process, memory: RemoteMemory, region: memoryview) -> None:
        self._process, self._memory, self._region = process, memory, region
        self._name = f"{_MARK}:{process.name}:{process.epoch}"
        self._reads: dict[int, tuple[RemoteRead, ...]] = {}
        self._handle = 0

    def metadata(self) -> bytes:
        """Return the process's name and epoch."""
        return self._name.encode()

    def register(self, segments: Sequence[Segment]) -> None:
        """Publish the region. Raises `Malformed` for a segment outside it."""
        for segment in segments:
            self._local(segment.address, segment.length_bytes)
        self._memory.publish(self._process, self._region)

    def add_peer(self, agent: bytes) -> str:
        """Return the peer's metadata as text."""
        parts = agent.decode("utf-8", "replace").split(":")
        if len(parts) != 3 or parts[0] != _MARK or not parts[2].isdigit():
            raise Malformed("agent metadata", repr(agent[:64]))
        return ":".join(parts)

    def remove_peer(self, peer: str) -> None:
        """Forget nothing: a peer is only its name."""

    def start_read(self, peer: str, items: Sequence[ReadItem]) -> int:
        """Begin one remote read for each item."""
        _, name, epoch = peer.split(":")
        self._handle += 1
        self._reads[self._handle] = tuple(
            self._memory.read(
                self._process,
                name,
                int(epoch),
                item.remote_address - REGION_ADDRESS,
                self._local(item.local_address, item.length_bytes),
            )
            for item in items
        )
        return self._handle

    def poll(self, handle: int) -> TransportState:
        """Return RUNNING while any item may still be written, then whether all came."""
        states = {read.state for read in self._reads[handle]}
        if ReadState.RUNNING in states:
            return TransportState.RUNNING
        return TransportState.DONE if states <= {ReadState.DONE} else TransportState.FAILED

    def release(self, handle: int) -> None:
        """Let go of a terminal read."""
        if self.poll(handle) is TransportState.RUNNING:
            raise Conservation("reads", f"{handle} is released while it runs")
        del self._reads[handle]

    def progress(self) -> None:
        """Do nothing: the world moves reads on."""

    def close(self) -> None:
        """Let go of what is terminal."""
        for handle in tuple(self._reads):
            if self.poll(handle) is not TransportState.RUNNING:
                self.release(handle)

    def _local(self, address: int, length_bytes: int) -> memoryview:
        start = address - REGION_ADDRESS
        if not 0 <= start <= self._region.nbytes - length_bytes:
            raise Malformed("address", f"{address:#x} + {length_bytes} is not in the region")
        return self._region[start : start + length_bytes]


class SimExecutor(Executor):
    """Computes and answers `delay_s` (a mean) later, in its process."""

    def __init__(self, process: Process, delay_s: float = 0.001) -> None:
        self._process, self._delay_s = process, delay_s
        self._random = process.world.fork(f"executor/{process.name}/{process.epoch}")

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> "Future[R]":
        """Plan the answer."""
        future: Future[R] = Future()
        self._process.at(
            self._random.expovariate(1 / self._delay_s),
            lambda: future.set_result(fn(*args, **kwargs)),
            "executor",
        )
        return future
