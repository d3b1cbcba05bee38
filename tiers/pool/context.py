"""What the parts of one pool share: its books, its memory, who it is, and the world handed in."""

from dataclasses import dataclass, field
from typing import Protocol

from ...fabric.clock import Clock
from ...fabric.metrics import Recorder
from .directory import Directory
from .gpu import GpuBook


class Memory(Protocol):
    """The bytes of the region."""

    def view(self, slot: int, length: int) -> memoryview:
        """Return the first `length` bytes of a slot."""
        ...

    def place(self, slot: int) -> tuple[int, int]:
        """Return segment and offset of a slot."""
        ...

    def address(self, slot: int) -> int:
        """Return the address of a slot in this process."""
        ...


@dataclass(frozen=True, slots=True)
class PoolContext:
    """Made by the shell, used on its one thread."""

    directory: Directory
    memory: Memory
    process: tuple[int, int]
    """Pid and start time of the pool's process, which owns the slots of its own jobs."""
    recorder: Recorder
    clock: Clock
    gpu: GpuBook = field(default_factory=GpuBook)
