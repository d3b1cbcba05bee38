"""What is true in a simulation: the bytes of every key, and the requests that must end.

The bytes of a chunk are a pseudo-random function of its namespace, key and length (SHAKE-128), so
that no writer, reader or checker has to remember any, and one wrong bit anywhere is seen.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import shake_128

from ...fabric.checksum import checksum
from ...fabric.errors import Corrupt, FabricError
from ...fabric.types import ChunkKey, NamespaceId, make_key
from .world import World


class Overdue(FabricError):
    """A request of a simulated engine did not end by its deadline: the fabric hung it."""

    def __init__(self, request: str, deadline_s: float, now_s: float) -> None:
        super().__init__(request, deadline_s, now_s)
        self.request, self.deadline_s, self.now_s = request, deadline_s, now_s

    def __str__(self) -> str:
        return (
            f"request {self.request} was to end by {self.deadline_s:.6f} s and is open at "
            f"{self.now_s:.6f} s. A deadline is missing or not looked at."
        )


@lru_cache(maxsize=4096)
def true_bytes(namespace: NamespaceId, key: ChunkKey, length_bytes: int) -> bytes:
    """Return the only right content of a chunk."""
    return shake_128(namespace + key + length_bytes.to_bytes(8, "little")).digest(length_bytes)


@lru_cache(maxsize=4096)
def true_checksum(namespace: NamespaceId, key: ChunkKey, length_bytes: int) -> int:
    """Return the checksum of the right content."""
    return checksum(true_bytes(namespace, key, length_bytes))


def true_key(number: int, group: int = 0) -> ChunkKey:
    """Return a key for a number: a 32-byte digest, as a block hash would be."""
    return make_key(shake_128(number.to_bytes(8, "little")).digest(32), group)


@dataclass(slots=True)
class Recorder:
    """The books of a run: what was committed, which requests are open, how reads ended."""

    world: World
    committed: set[tuple[NamespaceId, ChunkKey]] = field(
        default_factory=set[tuple[NamespaceId, ChunkKey]]
    )
    hits: int = 0
    misses: int = 0
    refused: int = 0
    """Reads whose own verification caught wrong bytes: a miss, and the reason for checksums."""
    ended: int = 0
    _open: dict[str, float] = field(default_factory=dict[str, float])
    _began: int = 0

    def commit(self, namespace: NamespaceId, key: ChunkKey) -> None:
        """A pool said READY to a commit of this chunk."""
        self.committed.add((namespace, key))

    def hit(self, who: str, namespace: NamespaceId, key: ChunkKey, view: memoryview) -> None:
        """Somebody takes these bytes for the chunk, verified. Raises `Corrupt` if they are wrong.

        Also raises when nobody ever committed the chunk: right bytes of an unfinished writer are
        luck.
        """
        self.hits += 1
        name = key[:4].hex()
        if bytes(view) != true_bytes(namespace, key, view.nbytes):
            raise Corrupt(f"chunk {name} at {who}", "wrong bytes passed as a verified hit")
        if (namespace, key) not in self.committed:
            raise Corrupt(f"chunk {name} at {who}", "a hit, and it was never committed")

    def begin(self, who: str, timeout_s: float) -> str:
        """Open a request that must end within `timeout_s` of virtual time; return its name."""
        self._began += 1
        request = f"{who}#{self._began}"
        self._open[request] = self.world.now_s() + timeout_s
        return request

    def end(self, request: str) -> None:
        """Close a request; one that was abandoned before is ignored."""
        if self._open.pop(request, None) is not None:
            self.ended += 1

    def abandon(self, who: str) -> None:
        """Forget the open requests of somebody who was killed or stopped: nobody waits for them."""
        for request in [name for name in self._open if name.startswith(f"{who}#")]:
            del self._open[request]

    @property
    def open(self) -> int:
        """How many requests have not ended."""
        return len(self._open)

    def check(self) -> None:
        """Raise `Overdue` for a request past its deadline."""
        now_s = self.world.now_s()
        for request, deadline_s in self._open.items():
            if now_s > deadline_s:
                raise Overdue(request, deadline_s, now_s)
