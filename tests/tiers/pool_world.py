"""A pool's core over memory, with clients that speak frames to it.

Loaded by `conftest.py`; tests import it by name.
"""

from collections.abc import Sequence

from kvfabric.fabric import wire
from kvfabric.fabric.checksum import checksum
from kvfabric.fabric.metrics import NullRecorder
from kvfabric.fabric.types import (
    ChunkKey,
    Committed,
    Lookup,
    NamespaceId,
    Reserved,
    SourceRange,
    make_key,
)
from kvfabric.tiers.base import Tier
from kvfabric.tiers.pool.context import PoolContext
from kvfabric.tiers.pool.core import ClientCore, PoolPlace
from kvfabric.tiers.pool.directory import Directory
from kvfabric.tiers.pool.fetcher import Fetcher
from kvfabric.tiers.pool.pulls import NoPulls, PullDone
from kvfabric.tiers.pool.table import SlotTable, control_bytes, format_table

SLOT_BYTES = 4096
FIELDS = {
    "model": "m",
    "weights_version": "1",
    "kv_dtype": "bf16",
    "kv_scales": "none",
    "rope": "r",
    "max_model_len": "4096",
    "layout": "l",
    "chunk_tokens": "16",
    "tokens_per_hash": "16",
    "hash_algorithm": "sha256_cbor",
    "hash_seed": "",
}


def key(number: int) -> ChunkKey:
    return make_key(number.to_bytes(32, "big"), 0)


class Memory:
    def __init__(self, slots: int) -> None:
        self.bytes = bytearray(slots * SLOT_BYTES)

    def view(self, slot: int, length: int) -> memoryview:
        start = slot * SLOT_BYTES
        return memoryview(self.bytes)[start : start + length]

    def place(self, slot: int) -> tuple[int, int]:
        return 0, slot * SLOT_BYTES

    def address(self, slot: int) -> int:
        return slot * SLOT_BYTES


class ScriptedPulls(NoPulls):
    """Records pulls, and ends them when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, SourceRange, tuple[ChunkKey, ...]]] = []

    def pull(
        self,
        pull_id: int,
        source: SourceRange,
        namespace: NamespaceId,
        keys: Sequence[ChunkKey],
    ) -> None:
        self.asked.append((pull_id, source, tuple(keys)))

    def end(self, pull_id: int, outcomes: Sequence[Lookup]) -> None:
        self._done.append(PullDone(pull_id, tuple(outcomes)))


class World:
    """A core, its memory, and clients that speak frames to it."""

    def __init__(self, clock, slots: int = 8, tiers: Sequence[Tier] = (), pulls=None) -> None:
        control = bytearray(control_bytes(slots))
        format_table(memoryview(control), slots, SLOT_BYTES, slots * SLOT_BYTES, 7)
        self.clock = clock
        self.memory = Memory(slots)
        self.directory = Directory(SlotTable(memoryview(control)), quarantine_slots_max=slots)
        context = PoolContext(self.directory, self.memory, (1, 1), NullRecorder(), clock)
        self.context = context
        self.fetcher = Fetcher(context, tiers, pulls or NoPulls())
        place = PoolPlace("a", "/control", ("/segment",), SLOT_BYTES, 10.0)
        self.core = ClientCore(place, context, self.fetcher)
        self.fetcher.chunk_bytes = self.core.namespaces.chunk_bytes
        self.answers: dict[bytes, list[wire.Envelope]] = {}
        self.request = 0

    def say(self, who: bytes, body: wire.Message, epoch: int = 7) -> wire.Message | None:
        self.request += 1
        self.core.on_frame(who, wire.encode(epoch, self.request, body))
        return self.heard(who, self.request)

    def heard(self, who: bytes, request: int) -> wire.Message | None:
        for reply in self.core.take_replies():
            self.answers.setdefault(reply.identity, []).append(wire.decode(reply.frame))
        for envelope in self.answers.get(who, []):
            if envelope.request == request:
                return envelope.body
        return None

    def attach(self, who: bytes, pid: int = 100, **fields: str) -> wire.Message | None:
        groups = [wire.GroupGeometry(0, 16, SLOT_BYTES)]
        return self.say(who, wire.Attach(who.decode(), pid, 5, FIELDS | fields, groups))

    def store(self, who: bytes, numbers: Sequence[int]) -> list[Committed]:
        namespace = self.core.sessions[who].namespace
        keys = [key(n) for n in numbers]
        got = self.say(who, wire.Reserve(namespace, keys, list(range(len(keys)))))
        assert isinstance(got, wire.ReserveReply)
        assert set(got.statuses) == {Reserved.GRANTED}
        sums = []
        for slot, number in zip(got.slots, numbers, strict=True):
            self.memory.view(slot, SLOT_BYTES)[:] = content(number)
            sums.append(checksum(content(number)))
        done = self.say(who, wire.Commit(got.slots, got.generations, sums))
        assert isinstance(done, wire.CommitReply)
        return done.statuses

    def pin(self, who: bytes, numbers: Sequence[int], wait_s: float = 0.0, sources=()):
        namespace = self.core.sessions[who].namespace
        return self.say(who, wire.Pin(namespace, [key(n) for n in numbers], wait_s, list(sources)))

    def turn(self) -> None:
        self.fetcher.step()
        self.core.tick()


def content(number: int) -> bytes:
    return bytes([number % 251]) * SLOT_BYTES


def source(node: str, start: int, count: int) -> wire.SourceRangeWire:
    return wire.SourceRangeWire(node, f"tcp://{node}", start, count)
