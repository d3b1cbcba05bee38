"""A simulated cluster on virtual time, for the fabric's tests and for those of other tiers.

Pure: no sockets, threads, files or real clock. A `World` gives time and order from a seed; a
`Network`, `Disk` and `RemoteMemory` carry bytes badly; a `Process` runs a program that can be
killed and stopped; `Chaos` does so; a `Recorder` knows what is true. `SimTier` is a `Tier` over a
`Disk`. `docs/simulation.md` says how to write a test with them.
"""

from .chaos import Chaos
from .disk import Disk, DiskOutcome, DiskTransfer
from .knobs import (
    CALM,
    DiskKnobs,
    Knobs,
    LinkKnobs,
    ProcessKnobs,
    RemoteMemoryKnobs,
    draw_knobs,
    log_uniform,
)
from .network import Network
from .oracle import Overdue, Recorder, true_bytes, true_checksum, true_key
from .process import Process, ProcessState, Program
from .remote_memory import ReadState, RemoteMemory, RemoteRead
from .tier import SimTier
from .trace import Trace
from .world import LocalClock, Scheduler, Stop, Timer, World, seeds

__all__ = [
    "CALM",
    "Chaos",
    "Disk",
    "DiskKnobs",
    "DiskOutcome",
    "DiskTransfer",
    "Knobs",
    "LinkKnobs",
    "LocalClock",
    "Network",
    "Overdue",
    "Process",
    "ProcessKnobs",
    "ProcessState",
    "Program",
    "ReadState",
    "Recorder",
    "RemoteMemory",
    "RemoteMemoryKnobs",
    "RemoteRead",
    "Scheduler",
    "SimTier",
    "Stop",
    "Timer",
    "Trace",
    "World",
    "draw_knobs",
    "log_uniform",
    "seeds",
    "true_bytes",
    "true_checksum",
    "true_key",
]
