"""How hard a simulated world is, drawn per seed (swarm testing).

Each run draws which kinds of fault are on, each by the toss of a coin, and how strong each is, by a
log-uniform draw. A run with everything on at medium strength finds less than many runs with a few
kinds each: one fault hides another (Groce et al., "Swarm Testing", ISSTA 2012). The calm values are
those of a healthy cluster. All shares are probabilities per operation; gaps and lengths are means
of exponential draws, in virtual seconds; a gap of 0 means never.
"""

from dataclasses import asdict, dataclass
from math import exp, log
from random import Random


@dataclass(frozen=True, slots=True)
class LinkKnobs:
    """The network between nodes."""

    delay_s: float = 0.0002
    straggler_share: float = 0.0
    straggler_s: float = 0.0
    """Mean of what a straggling frame takes on top."""
    loss_share: float = 0.0
    duplicate_share: float = 0.0
    ordered: bool = True
    """Frames of one link arrive in the order sent, as on one connection."""
    partition_gap_s: float = 0.0
    partition_s: float = 1.0


@dataclass(frozen=True, slots=True)
class DiskKnobs:
    """The file store of a node."""

    delay_s: float = 0.001
    piece_bytes: int = 65_536
    """Bytes copied between disk and memory at one instant."""
    stall_share: float = 0.0
    stall_s: float = 1.0
    eio_share: float = 0.0
    enospc_share: float = 0.0
    """The disk is full although the quota is not: others fill it too."""
    torn_share: float = 0.0
    """A write that is acknowledged and keeps only its beginning."""
    flip_share: float = 0.0
    """A read after which one bit of the file is flipped for good."""


@dataclass(frozen=True, slots=True)
class RemoteMemoryKnobs:
    """One-sided reads."""

    delay_s: float = 0.0005
    piece_bytes: int = 65_536
    piece_gap_s: float = 0.00002
    fail_share: float = 0.0
    hang_share: float = 0.0
    """Never completes, and does not say so."""
    dead_hang_share: float = 0.0
    """A read from a source that died hangs instead of failing."""


@dataclass(frozen=True, slots=True)
class ProcessKnobs:
    """Processes that die, stop and keep their own time."""

    kill_gap_s: float = 0.0
    down_s: float = 0.5
    pause_gap_s: float = 0.0
    pause_s: float = 1.0
    drift: float = 0.0
    """The most by which a clock is fast or slow; 0.001 is one in a thousand."""


@dataclass(frozen=True, slots=True)
class Knobs:
    """Everything, for one run."""

    link: LinkKnobs = LinkKnobs()
    disk: DiskKnobs = DiskKnobs()
    memory: RemoteMemoryKnobs = RemoteMemoryKnobs()
    process: ProcessKnobs = ProcessKnobs()

    def text(self) -> str:
        """Return only what differs from calm, for the trace."""
        calm = asdict(CALM)
        parts = [
            f"{part}.{name}={value:.3g}"
            for part, values in asdict(self).items()
            for name, value in values.items()
            if value != calm[part][name]
        ]
        return " ".join(parts) or "calm"


CALM = Knobs()
"""No faults at all."""


def log_uniform(random: Random, low: float, high: float) -> float:
    """Draw between two positive bounds, each order of magnitude as likely as another."""
    return exp(random.uniform(log(low), log(high)))


def draw_knobs(random: Random, *, chunk_bytes: int = 65_536) -> Knobs:
    """Draw one run's faults. Pieces are drawn so that a chunk is 1 to 16 of them."""

    def share(low: float, high: float) -> float:
        return log_uniform(random, low, high) if random.random() < 0.5 else 0.0

    def piece() -> int:
        return max(1, chunk_bytes // random.choice((1, 2, 4, 16)))

    return Knobs(
        link=LinkKnobs(
            delay_s=log_uniform(random, 0.00005, 0.02),
            straggler_share=share(0.001, 0.1),
            straggler_s=log_uniform(random, 0.01, 5.0),
            loss_share=share(0.001, 0.2),
            duplicate_share=share(0.001, 0.2),
            ordered=random.random() < 0.5,
            partition_gap_s=share(0.5, 20.0),
            partition_s=log_uniform(random, 0.05, 10.0),
        ),
        disk=DiskKnobs(
            delay_s=log_uniform(random, 0.0001, 0.05),
            piece_bytes=piece(),
            stall_share=share(0.001, 0.1),
            stall_s=log_uniform(random, 0.1, 20.0),
            eio_share=share(0.001, 0.2),
            enospc_share=share(0.001, 0.2),
            torn_share=share(0.001, 0.2),
            flip_share=share(0.001, 0.2),
        ),
        memory=RemoteMemoryKnobs(
            delay_s=log_uniform(random, 0.0001, 0.1),
            piece_bytes=piece(),
            piece_gap_s=log_uniform(random, 0.00001, 0.5),
            fail_share=share(0.001, 0.2),
            hang_share=share(0.001, 0.1),
            dead_hang_share=share(0.1, 1.0),
        ),
        process=ProcessKnobs(
            kill_gap_s=share(1.0, 30.0),
            down_s=log_uniform(random, 0.05, 5.0),
            pause_gap_s=share(1.0, 30.0),
            pause_s=log_uniform(random, 0.05, 30.0),
            drift=share(0.0001, 0.01),
        ),
    )
