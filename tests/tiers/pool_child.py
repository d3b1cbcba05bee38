"""A client that does as told: `pool_child.py ENDPOINT TIMEOUT_S`, commands as JSON lines."""

import json
import os
import select
import sys

from pool_yard import CLOCK, GROUPS, NAMESPACE, SLOT_BYTES, chunk, key, keys

from kvfabric.fabric.checksum import checksum
from kvfabric.fabric.errors import FabricError
from kvfabric.fabric.types import SourceRange
from kvfabric.tiers.pool.client import PoolClient
from kvfabric.tiers.pool.copy import copy_summed


def say(what) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


class Commands:
    def __init__(self, client: PoolClient) -> None:
        self.client = client
        self.numbers: list[int] = []
        self.refs = []

    def reserve(self, first: int, number: int):
        """Reserve, and write the first half of every slot that is granted."""
        got = self.client.reserve(keys(first, number), range(number))
        for number_, (status, ref) in enumerate(got, first):
            if status.name == "GRANTED":
                self.numbers.append(number_)
                self.refs.append(ref)
                self.client.view(ref, SLOT_BYTES // 2)[:] = chunk(number_)[: SLOT_BYTES // 2]
        return [status.name for status, _ in got]

    def commit(self):
        """Write all of every reserved slot, and commit."""
        sums = []
        for number, ref in zip(self.numbers, self.refs, strict=True):
            self.client.view(ref, SLOT_BYTES)[:] = chunk(number)
            sums.append(checksum(chunk(number)))
        return [status.name for status in self.client.commit(self.refs, sums)]

    def pin(self, first: int, number: int):
        got = self.client.pin(keys(first, number))
        self.refs = [chunk_.slot for status, chunk_, _ in got if status.name == "HIT"]
        return [status.name for status, _, _ in got]

    def release(self):
        return [status.name for status in self.client.release(self.refs)]

    def load(self, first: int, number: int, wait_s: float, node: str, endpoint: str):
        """Load from a peer; say what came, whether it was exact, and how long it took."""
        into = [bytearray(SLOT_BYTES) for _ in range(number)]
        begun_s = CLOCK.now_s()
        got = self.client.load_bytes(
            keys(first, number),
            [memoryview(one) for one in into],
            wait_s,
            [SourceRange(node, endpoint, 0, number)],
        )
        return {
            "seconds": CLOCK.now_s() - begun_s,
            "statuses": [status.name for status in got.statuses],
            "exact": all(
                into[at] == chunk(first + at)
                for at, status in enumerate(got.statuses)
                if status.name == "HIT"
            ),
        }

    def load_slowly(self, first: int):
        """Load one chunk; say so when it is pinned, and read it only after the next line."""
        into = bytearray(SLOT_BYTES)

        def drain(_index, slot, _sum):
            say("draining")
            sys.stdin.readline()
            return copy_summed(memoryview(into), slot)

        (status,) = self.client.load([key(first)], drain).statuses
        return [status.name, into == chunk(first)]

    def store_forever(self, first: int):
        """Store batches of four until a line comes; say which were committed, and which never."""
        number = first
        while not select.select([sys.stdin], [], [], 0)[0]:
            batch = range(number, number + 4)
            number += 4
            try:
                done = self.client.store_bytes(
                    [key(n) for n in batch], range(4), [memoryview(chunk(n)) for n in batch]
                )
            except FabricError as error:
                say(["lost", *batch, type(error).__name__])
                continue
            say(["stored" if done.committed == 4 else "lost", *batch])
        sys.stdin.readline()
        return "ended"


def main() -> None:
    client = PoolClient.attach(sys.argv[1], NAMESPACE, GROUPS, timeout_s=float(sys.argv[2]))
    commands = Commands(client)
    say("attached")
    while line := sys.stdin.readline():
        command = json.loads(line)
        try:
            say(getattr(commands, command.pop("do"))(**command))
        except FabricError as error:
            say({"error": type(error).__name__})
    os._exit(0)


if __name__ == "__main__":
    main()
