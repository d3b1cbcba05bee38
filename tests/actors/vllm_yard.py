"""What the tests of the vLLM connector share: shapes of caches, requests, and a pool of dicts.

Loaded by `conftest.py`. The pool of dicts answers at once, in the caller's thread, and may be told
to be silent or to refuse; it counts pins, clients and slots, so that tests can balance its books.
"""

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvfabric.actors.engines.vllm.geometry import CacheGeometry, RankGroup
from kvfabric.actors.engines.vllm.prefix import EngineGroup
from kvfabric.actors.engines.vllm.scheduler import SchedulerSide
from kvfabric.actors.engines.vllm.settings import ConnectorSettings
from kvfabric.actors.engines.vllm.transfers import SaveJob, StepPlan, WorkerReport
from kvfabric.fabric.checksum import checksum
from kvfabric.fabric.errors import FabricError, Unavailable
from kvfabric.fabric.layout import GroupLayout
from kvfabric.fabric.types import Chunk, Lookup, Released, Reserved, SlotRef, make_key
from kvfabric.tiers.pool.client import Loaded, Stored

HASH_TOKENS = 4
BLOCK_BYTES = 8
LOOK_S = 0.001
SOON_S = 10.0
"""For a thread of the connector to do what it was told: it takes milliseconds."""


def layout(
    chunk_tokens: int, block_tokens: int = HASH_TOKENS, window: int | None = None, layers: int = 1
) -> GroupLayout:
    return GroupLayout.opaque(
        layers, BLOCK_BYTES * layers, block_tokens, chunk_tokens, "test", window_tokens=window
    )


def group(
    number: int, chunk_tokens: int, block_tokens: int = HASH_TOKENS, window: int | None = None
) -> EngineGroup:
    """Return a group as the scheduler's half sees it."""
    return EngineGroup(
        number, layout(chunk_tokens, block_tokens, window), block_tokens, HASH_TOKENS
    )


def geometry(*groups: EngineGroup, rank: int = 0, size: int = 1) -> CacheGeometry:
    """Return the cache of a rank with these groups."""
    ranks = (RankGroup(each.engine_group, each.layout, each.block_tokens) for each in groups)
    return CacheGeometry(rank, size, tuple(ranks), "bfloat16", "none")


def digest(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()


def hashes(name: object, count: int) -> list[bytes]:
    """Return the block hashes of a prompt with this name."""
    return [digest(name, at) for at in range(count)]


@dataclass(eq=False)
class Asked:
    """A request, as vLLM's has the fields that the connector looks at."""

    request_id: str
    block_hashes: Sequence[bytes]
    num_tokens: int
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    kv_transfer_params: Any = None

    def ran(self, tokens: int) -> None:
        """Let the engine compute so many tokens, and see the output."""
        self.num_computed_tokens += tokens


def request(name: str = "r", tokens: int = 40, **fields: Any) -> Asked:
    return Asked(name, hashes(name, tokens // HASH_TOKENS), tokens, **fields)


@dataclass
class DictPool:
    """Chunks in a dict for each reset, and what tiers and peers have beside it."""

    media: tuple[str, ...] = ()
    peer_endpoint: str = ""
    chunks: dict[tuple[int, bytes], bytes] = field(default_factory=dict)
    elsewhere: dict[bytes, tuple[bytes, str]] = field(default_factory=dict)
    """Key: bytes and origin of what a tier or peer has."""
    refusal: FabricError | None = None
    """What the next calls raise; `silence` makes it."""
    slots_max: int = 1 << 30
    chunk_bytes: int = 2 * BLOCK_BYTES
    pinned: Counter[int] = field(default_factory=Counter)
    asked: list[tuple[Any, ...]] = field(default_factory=list)
    """Keys, wait and sources of all pins."""
    clients: list["DictClient"] = field(default_factory=list)
    corrupt: set[bytes] = field(default_factory=set)
    on_ask: Callable[[], None] = lambda: None
    """Called before every answer, in the asking thread."""

    def attach(self, reset: int = 0) -> "DictClient":
        self.answer()
        client = DictClient(self, reset)
        self.clients.append(client)
        return client

    def answer(self) -> None:
        self.on_ask()
        if self.refusal is not None:
            raise self.refusal

    def silence(self, *, silent: bool = True) -> None:
        self.refusal = Unavailable("the pool", 0.1, "Start it.") if silent else None

    def put(self, keys: Iterable[bytes], reset: int = 0) -> None:
        self.chunks.update({(reset, key): key for key in keys})

    @property
    def held(self) -> int:
        """How many pins are out."""
        return sum(self.pinned.values())

    @property
    def open_clients(self) -> int:
        return sum(not client.closed for client in self.clients)


class DictClient:
    """A client of a `DictPool`."""

    def __init__(self, pool: DictPool, reset: int) -> None:
        self.pool = pool
        self.reset = reset
        self.closed = False
        self.media = pool.media
        self.peer_endpoint = pool.peer_endpoint
        self.owed: list[SlotRef] = []

    def lookup(self, keys: Sequence[bytes]) -> Any:
        assert not self.closed
        here = [(self.reset, key) in self.pool.chunks for key in keys]
        states = np.array([Lookup.HIT if each else Lookup.MISS for each in here], np.uint8)
        return SimpleNamespace(states=states)

    def pin(self, keys: Sequence[bytes], wait_s: float = 0.0, sources: Iterable[Any] = ()) -> Any:
        assert not self.closed
        sources = list(sources)
        self.pool.asked.append((list(keys), wait_s, sources))
        self.pool.answer()
        return [self._pin(key, bool(sources or self.media)) for key in keys]

    def release(self, refs: Sequence[SlotRef]) -> list[Released]:
        assert not self.closed
        for ref in refs:
            self.pool.pinned[ref.slot] -= 1
            assert self.pool.pinned[ref.slot] >= 0, "a pin was given back twice"
        return [Released.HELD for _ in refs]

    def store(
        self, keys: Sequence[bytes], depths: Sequence[int], fill: Callable[[int, memoryview], int]
    ) -> Stored:
        assert not self.closed
        assert len(keys) == len(depths)
        self.pool.answer()
        if len(self.pool.chunks) + len(keys) > self.pool.slots_max:
            return Stored((Reserved.BUSY,) * len(keys), 0)
        made: dict[tuple[int, bytes], bytes] = {}
        statuses: list[Reserved] = []
        for at, key in enumerate(keys):
            if (self.reset, key) in self.pool.chunks:
                statuses.append(Reserved.PRESENT)
                continue
            slot = bytearray(self.pool.chunk_bytes)
            assert fill(at, memoryview(slot)) == checksum(bytes(slot))
            made[self.reset, key] = bytes(slot)
            statuses.append(Reserved.GRANTED)
        self.pool.chunks.update(made)
        return Stored(tuple(statuses), len(made))

    def load(self, keys: Sequence[bytes], drain: Callable[[int, memoryview, int], int]) -> Loaded:
        assert not self.closed
        self.pool.answer()
        statuses: list[Lookup] = []
        for at, key in enumerate(keys):
            data = self.pool.chunks.get((self.reset, key))
            if data is None:
                statuses.append(Lookup.MISS)
                continue
            expected = checksum(data)
            slot = bytearray(data)
            slot[0] ^= key in self.pool.corrupt
            good = drain(at, memoryview(slot), expected) == expected
            statuses.append(Lookup.HIT if good else Lookup.MISS)
            if not good:
                del self.pool.chunks[self.reset, key]
        return Loaded(tuple(statuses), tuple("host" for _ in statuses))

    def close(self) -> None:
        self.closed = True

    def _pin(self, key: bytes, far: bool) -> tuple[Lookup, Chunk, str]:
        origin = "host"
        if (self.reset, key) not in self.pool.chunks:
            if not far or key not in self.pool.elsewhere:
                return Lookup.MISS, Chunk(key, SlotRef(0, 0), 0, 0), ""
            self.pool.chunks[self.reset, key], origin = self.pool.elsewhere[key]
        slot = int.from_bytes(digest(key)[:6], "big")
        self.pool.pinned[slot] += 1
        return Lookup.HIT, Chunk(key, SlotRef(slot, 1), 0, 0), origin


class Desk:
    """A scheduler's half on a pool of dicts; chunks of two blocks where no groups are given."""

    def __init__(
        self, pool: DictPool, clock: Any, *groups: EngineGroup, size: int = 1, **settings: Any
    ) -> None:
        self.pool = pool
        self.cache = geometry(*(groups or (group(0, 8),)), size=size)
        self.side = SchedulerSide(
            ConnectorSettings(pool="ipc:///pool", **settings),
            self.cache,
            HASH_TOKENS,
            pool.attach,
            clock,
        )
        self.side.open()

    def keys(self, one: Asked, chunks: Iterable[int], at: int = 0) -> list[bytes]:
        """Return the keys of a request's chunks in the group at this place, of all ranks."""
        each = self.cache.groups[at].layout.chunk_tokens // HASH_TOKENS
        return [
            make_key(one.block_hashes[chunk * each + each - 1], index)
            for chunk in chunks
            for index in self.cache.indices(at)
        ]

    def put(self, one: Asked, chunks: int) -> None:
        """Put the first chunks of a request into the pool, for all groups."""
        for at in range(len(self.cache.groups)):
            self.pool.put(self.keys(one, range(chunks), at))

    def step(
        self,
        tables: Mapping[str, Sequence[Sequence[int]]],
        admitted: Sequence[str] = (),
        written: Sequence[int] = (),
    ) -> StepPlan:
        """Plan a step in which the requests with these tables run."""
        return self.side.plan(list(tables), admitted, written, tables.get)

    def load(self, one: Asked, tables: Sequence[Sequence[int]], *, failed: bool = False) -> None:
        """Let a request load all that it is promised."""
        tokens = self.side.matched(one, 0)
        assert tokens
        self.side.allocated(one, tables, tokens)
        assert [job.request_id for job in self.step({}).loads] == [one.request_id]
        report = WorkerReport(failed_loads=[one.request_id]) if failed else None
        self.side.observed(report, [one.request_id])

    def saved_by_workers(self, job: SaveJob) -> None:
        for _ in range(self.cache.size):
            self.side.observed(WorkerReport(saved=[job.job]), [])

    @staticmethod
    def saved(job: SaveJob) -> dict[int, dict[int, list[int]]]:
        """Return a job's blocks by group and chunk."""
        found: dict[int, dict[int, list[int]]] = {}
        for run in job.runs:
            for at in range(len(run.digests)):
                found.setdefault(run.engine_group, {})[run.first + at] = list(run.blocks_of(at))
        return found

    def books(self) -> bool:
        """Whether anything is left of loads and saves, or of requests that are over."""
        over = [each for each in self.side._requests.values() if each.finished]
        return bool(over or len(self.side._fence) or self.pool.held)


def soon(condition: Callable[[], Any]) -> Any:
    """Let the connector's threads run until a condition is true, and return what it said."""
    pause = threading.Event()
    for _ in range(int(SOON_S / LOOK_S)):
        if said := condition():
            return said
        pause.wait(LOOK_S)
    raise AssertionError(f"not within {SOON_S} s")


class Gate:
    """Lets threads come so far and no further, until `open`."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._opened = threading.Event()

    def pass_through(self) -> None:
        """For the thread: say that it is here, and wait."""
        self.reached.set()
        assert self._opened.wait(SOON_S), "nobody opened the gate"

    def wait_reached(self) -> None:
        assert self.reached.wait(SOON_S), "nobody came"

    def open(self) -> None:
        self._opened.set()
