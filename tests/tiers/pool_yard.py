"""Pools and clients in processes of their own, for the tests that kill, stop and damage them.

Loaded by `conftest.py` as the fixture `yard`, and imported by `pool_child.py`.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from kvfabric.fabric.clock import SystemClock
from kvfabric.fabric.config import PoolConfig, parse
from kvfabric.fabric.namespace import Namespace
from kvfabric.fabric.types import ChunkKey, make_key
from kvfabric.fabric.wire import GroupGeometry
from kvfabric.tiers.pool.client import PoolClient
from kvfabric.tiers.pool.daemon import PoolProcess

SLOT_BYTES = 64 * 1024
NAMESPACE = Namespace(
    model="m",
    weights_version="1",
    kv_dtype="uint8",
    kv_scales="none",
    rope="none",
    max_model_len="4096",
    layout="bytes",
    chunk_tokens="16",
    tokens_per_hash="16",
    hash_algorithm="sha256_cbor",
    hash_seed="",
)
GROUPS = [GroupGeometry(0, 16, SLOT_BYTES)]
LOOK_S = 0.01
CLOCK = SystemClock()
RUNS = count()


def key(number: int) -> ChunkKey:
    return make_key(number.to_bytes(32, "big"), 0)


def keys(first: int, number: int) -> list[ChunkKey]:
    return [key(n) for n in range(first, first + number)]


def chunk(number: int) -> bytes:
    return (number + 1).to_bytes(8, "little") * (SLOT_BYTES // 8)


def until(condition: Callable[[], Any], within_s: float = 2.0) -> Any:
    """Look until the condition is true and return what it said; fail when the time is over."""
    deadline_s = CLOCK.now_s() + within_s
    while not (said := condition()):
        assert CLOCK.now_s() < deadline_s, f"not within {within_s} s"
        CLOCK.sleep_s(LOOK_S)
    return said


class Child:
    """A client in a process of its own: `pool_child.py`."""

    def __init__(self, endpoint: str, timeout_s: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "pool_child.py"), endpoint, f"{timeout_s}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, what: str, **arguments: Any) -> None:
        self.process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        return json.loads(self.process.stdout.readline())

    def ask(self, what: str, **arguments: Any) -> Any:
        self.tell(what, **arguments)
        return self.hear()

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        self.process.stdin.close()
        self.process.stdout.close()


class Yard:
    """Makes pools and clients, and ends them all."""

    def __init__(self) -> None:
        self.run = f"t{os.getpid()}-{next(RUNS)}"
        self.open: list[Any] = []

    def config(self, node: str = "a", slots: int = 32, **parts: Any) -> PoolConfig:
        host = {"slot_bytes": SLOT_BYTES, "region_bytes": slots * SLOT_BYTES}
        values = {"node": node, "run": self.run, "peers": {"transport": "none"}} | parts
        return parse(PoolConfig, values | {"host": host | parts.get("host", {})})

    def pool(self, config: PoolConfig | None = None, **parts: Any) -> PoolProcess:
        return self.kept(PoolProcess(config or self.config(**parts)))

    def client(self, pool: PoolProcess, timeout_s: float = 1.0, **fields: str) -> PoolClient:
        namespace = Namespace(**(NAMESPACE.fields() | fields))
        return self.kept(
            PoolClient.attach(pool.addresses.client, namespace, GROUPS, timeout_s=timeout_s)
        )

    def child(self, pool: PoolProcess, timeout_s: float = 0.5) -> Child:
        child = self.kept(Child(pool.addresses.client, timeout_s))
        assert child.hear() == "attached"
        return child

    def kept(self, one: Any) -> Any:
        self.open.append(one)
        return one

    def files(self) -> set[str]:
        return {path.name for path in Path("/dev/shm").glob(f"kvfabric-{self.run}-*")}

    def control(self, node: str = "a") -> Path:
        return Path(f"/dev/shm/kvfabric-{self.run}-{node}.control")

    def segment(self, node: str = "a") -> Path:
        return Path(f"/dev/shm/kvfabric-{self.run}-{node}.seg0")

    def close(self) -> None:
        for one in self.open:
            if isinstance(one, PoolProcess) and one.alive:
                os.kill(one.pid, signal.SIGCONT)
        while self.open:
            one = self.open.pop()
            one.stop() if isinstance(one, PoolProcess) else one.close()
        for path in Path("/dev/shm").glob(f"kvfabric-{self.run}-*"):
            path.unlink(missing_ok=True)


def store(client: PoolClient, first: int, number: int) -> None:
    """Store chunks `first` and following, all of which must be taken."""
    chunks = [memoryview(chunk(n)) for n in range(first, first + number)]
    assert client.store_bytes(keys(first, number), range(number), chunks).committed == number


def load(client: PoolClient, first: int, number: int, wait_s: float = 0.0, sources=()):
    """Load chunks and return their outcome; where it is HIT the bytes must be exact."""
    into = [bytearray(SLOT_BYTES) for _ in range(number)]
    got = client.load_bytes(keys(first, number), [memoryview(b) for b in into], wait_s, sources)
    for at, status in enumerate(got.statuses):
        if status.name == "HIT":
            assert into[at] == chunk(first + at), f"chunk {first + at} has other bytes"
    return got


def names(got: Any) -> set[str]:
    """Return the outcomes of a load, each once."""
    return {status.name for status in got.statuses}


def flip(path: Path, offset: int) -> None:
    """Flip one bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def flip_slot(path: Path, holding: bytes) -> None:
    """Flip a bit in the slot of a segment that holds these bytes."""
    at = path.read_bytes().index(holding)
    assert at % SLOT_BYTES == 0
    flip(path, at + 1000)
