"""A process on virtual time: it can be killed, stopped and started again.

Ownership. A process owns its program, its timers and its inbox. Shared memory belongs to the node:
it outlives every process that maps it.

Lifecycle. `start` makes a new program under the next epoch. `kill` is SIGKILL: the program, its
timers, its unread frames and its devices' writes are gone, in one instant. `pause` is SIGSTOP: no
code runs and frames wait in the inbox (the oldest `inbox_frames_max`; later ones are lost, as at a
full socket), but devices go on writing to memory that the process gave them. `resume` runs what is
overdue, in order.

Failure. An exception in a program is a failure of the simulation, not of the process.
"""

import zlib
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import Protocol

from .knobs import ProcessKnobs
from .network import Network
from .world import LocalClock, Timer, World

INBOX_FRAMES_MAX = 1000
"""ZeroMQ's default high-water mark."""
CLOCK_OFFSET_S_MAX = 1e6
"""Clocks of two processes differ by up to eleven days: a point in time sent over is noticed."""

PID_MIN, PIDS = 2, 1 << 22
"""1 is init, and 0 is nobody."""


class ProcessState(IntEnum):
    """What a process is doing."""

    DOWN = 0
    RUNNING = 1
    PAUSED = 2


class Program(Protocol):
    """What runs in a process: a sans-I/O core in its thin shell."""

    def on_message(self, source: str, frame: bytes) -> None:
        """Take one frame from the network."""
        ...

    def tick(self) -> None:
        """Do what is due; called every `tick_s` of virtual time."""
        ...


class Process:
    """One named process of a node; a `Scheduler` for its program."""

    def __init__(
        self,
        world: World,
        network: Network,
        name: str,
        program: Callable[["Process"], Program],
        *,
        tick_s: float = 0.05,
        knobs: ProcessKnobs | None = None,
    ) -> None:
        self.world, self.network, self.name, self.tick_s = world, network, name, tick_s
        self.pid = PID_MIN + zlib.crc32(name.encode()) % PIDS
        """Unique among names that a test would use, and the same in every run."""
        self.epoch = 0
        """Counts incarnations; with `pid` it names one, as a start time would."""
        self.disturbances = 0
        """Starts, kills, pauses and resumptions so far. Only while this stays the same may anybody
        count on an answer in time."""
        self.state = ProcessState.DOWN
        self.program: Program | None = None
        self._make = program
        self._random = world.fork(f"process/{name}")
        self._drift = (knobs or ProcessKnobs()).drift
        self.clock = self._new_clock()
        self._overdue: deque[Callable[[], None]] = deque()
        self._inbox_frames = 0
        self._shared: dict[str, bytearray] = {}
        self._networks = [network]

    def join(self, network: Network) -> None:
        """Answer to this name on another network too, from the next start."""
        self._networks.append(network)

    def _new_clock(self) -> LocalClock:
        offset_s = self._random.uniform(0.0, CLOCK_OFFSET_S_MAX)
        rate = 1.0 + self._random.uniform(-self._drift, self._drift)
        return LocalClock(self.world, offset_s, rate)

    def shared_memory(self, name: str, size_bytes: int) -> memoryview:
        """Map shared memory of the node, zeroed where it is new. It outlives the process."""
        if name not in self._shared:
            self._shared[name] = bytearray(size_bytes)
        return memoryview(self._shared[name])

    def is_gone(self, epoch: int) -> bool:
        """Return whether the incarnation of this epoch has ended, as a pidfd would say."""
        return epoch < self.epoch or (epoch == self.epoch and self.state is ProcessState.DOWN)

    def start(self) -> None:
        """Begin a new incarnation, if none lives."""
        if self.state is not ProcessState.DOWN:
            return
        self.epoch += 1
        self.disturbances += 1
        self.state = ProcessState.RUNNING
        self.clock = self._new_clock()
        self.world.note(self.name, f"starts, epoch {self.epoch}")
        self.program = self._make(self)
        for network in self._networks:
            network.attach(self.name, self._deliver)
        self._tick_later()

    def kill(self) -> None:
        """End it in one instant: memory is lost, shared memory stays."""
        if self.state is ProcessState.DOWN:
            return
        self.state = ProcessState.DOWN
        self.disturbances += 1
        self.program = None
        self._overdue.clear()
        self._inbox_frames = 0
        for network in self._networks:
            network.detach(self.name)
        self.world.note(self.name, f"killed, epoch {self.epoch}")

    def pause(self) -> None:
        """Stop its code; its devices go on."""
        if self.state is ProcessState.RUNNING:
            self.state = ProcessState.PAUSED
            self.disturbances += 1
            self.world.note(self.name, "paused")

    def resume(self) -> None:
        """Let its code go on, with everything that became due meanwhile."""
        if self.state is not ProcessState.PAUSED:
            return
        self.state = ProcessState.RUNNING
        self.disturbances += 1
        self.world.note(self.name, f"resumed, {len(self._overdue)} things overdue")
        overdue, self._overdue = self._overdue, deque()
        self._inbox_frames = 0
        for fn in overdue:
            self.at(0.0, fn, f"{self.name} overdue")

    def send(self, target: str, frame: bytes | memoryview) -> None:
        """Send a frame under this process's name."""
        self.network.send(self.name, target, frame)

    def at(self, delay_s: float, fn: Callable[[], None], label: str = "") -> Timer:
        """Plan code of this incarnation. It waits while paused and ends with the incarnation."""
        epoch = self.epoch

        def run() -> None:
            if timer.fn is not None:
                fn()

        def fire() -> None:
            if self.is_gone(epoch):
                return
            if self.state is ProcessState.PAUSED:
                self._overdue.append(run)
            else:
                fn()

        timer = self.world.at(delay_s, fire, label or self.name)
        return timer

    def dma(self, delay_s: float, fn: Callable[[], None], label: str = "") -> Timer:
        """Plan a device's write for this incarnation. It lands even while paused."""
        epoch = self.epoch
        return self.world.at(
            delay_s, lambda: None if self.is_gone(epoch) else fn(), label or f"{self.name} dma"
        )

    def _deliver(self, source: str, frame: bytes) -> None:
        if self.state is not ProcessState.PAUSED:
            self._handle(source, frame)
        elif self._inbox_frames < INBOX_FRAMES_MAX:
            self._inbox_frames += 1
            self._overdue.append(lambda: self._handle(source, frame))

    def _handle(self, source: str, frame: bytes) -> None:
        if self.program is not None:
            self.program.on_message(source, frame)

    def _tick_later(self) -> None:
        self.at(self.tick_s * self._random.uniform(0.5, 1.5), self._tick, f"{self.name} tick")

    def _tick(self) -> None:
        if self.program is not None:
            self.program.tick()
            self._tick_later()
