"""The two processes of `raw_nixl`: the role is the first argument, then chunks and their bytes.

The target maps and registers memory, prints its metadata and address, and serves between an odd
input line and the next. The reader reads those two from its first input line and then does one READ
of everything for each further line, printing the seconds that it took.
"""

import mmap
import os
import select
import sys

import numpy as np

from ...fabric.clock import Clock, SystemClock
from ...tiers.p2p.nixl import NixlTransport
from ...tiers.p2p.transport import ReadItem, ReadState, Segment

POLL_S = 0.0005
"""As often as a pool that has granted leases polls."""


def _shared_memory(size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Map shared memory, as a pool's segments are, and touch it."""
    descriptor = os.memfd_create("kvfabric-raw")
    os.ftruncate(descriptor, size)
    memory = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
    os.close(descriptor)
    memory[:] = 1
    return memory


def _serve(transport: NixlTransport, address: int, clock: Clock) -> None:
    """Poll from one input line to the next, then rest: it must not slow down what is compared."""
    sys.stdout.write(f"{transport.metadata().hex()} {address}\n")
    sys.stdout.flush()
    while sys.stdin.readline():
        while not select.select([sys.stdin], [], [], 0)[0]:
            transport.progress()
            clock.sleep_s(POLL_S)
        sys.stdin.readline()


def _read(transport: NixlTransport, address: int, chunks: int, chunk_bytes: int) -> None:
    clock = SystemClock()
    agent, remote = sys.stdin.readline().split()
    peer = transport.add_peer(bytes.fromhex(agent))
    items = [
        ReadItem(address + i * chunk_bytes, int(remote) + i * chunk_bytes, chunk_bytes)
        for i in range(chunks)
    ]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for _ in sys.stdin:
        begun_s = clock.now_s()
        handle = transport.start_read(peer, items)
        while (state := transport.poll(handle)) is ReadState.RUNNING:
            pass
        seconds = clock.now_s() - begun_s
        transport.release(handle)
        sys.stdout.write(f"{seconds}\n" if state is ReadState.DONE else "nan\n")
        sys.stdout.flush()


def main() -> None:
    """Play a role."""
    role, chunks, chunk_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    memory = _shared_memory(chunks * chunk_bytes)
    address = memory.ctypes.data
    transport = NixlTransport(f"raw-{role}", os.getpid(), "lo")
    transport.register([Segment(address, memory.nbytes)])
    if role == "target":
        _serve(transport, address, SystemClock())
    else:
        _read(transport, address, chunks, chunk_bytes)
    sys.stdout.flush()
    os._exit(0)  # a process that made a UCX agent does not survive an ordinary exit


if __name__ == "__main__":
    main()
