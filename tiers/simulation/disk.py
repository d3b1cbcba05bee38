"""A file store on virtual time: slow, full, torn and flipped.

Ownership. The disk owns its files; they outlive processes. A transfer borrows a view until its
callback runs.

Lifecycle. Every operation ends by calling `done` once, in its owner (a `Scheduler`): it waits while
the owner is paused and is never called once the owner is gone. A write copies its view piece by
piece at different virtual times. When its owner dies in the middle, what was copied stays.

Failure. Outcomes are named. A torn write says DONE and keeps only its beginning; a flipped bit says
nothing at all. `rename` and `remove` are atomic and instant, as the metadata of a journalled file
system is to its callers.

Conservation: the sizes of the files sum to `used_bytes`, at most `capacity_bytes`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from ...fabric.errors import Conservation
from .knobs import DiskKnobs
from .world import Scheduler, Timer, World


class DiskOutcome(IntEnum):
    """How an operation on a file ended."""

    DONE = 0
    ABSENT = 1
    """No such file, or it is shorter than what was asked."""
    EIO = 2
    ENOSPC = 3


Done = Callable[[DiskOutcome], None]


@dataclass(slots=True)
class DiskCounts:
    """Faults that the disk committed."""

    eio: int = 0
    enospc: int = 0
    torn: int = 0
    flipped: int = 0
    stalled: int = 0


class DiskTransfer:
    """One write or read under way. It borrows its view until `done` has been called."""

    def __init__(
        self, name: str, view: memoryview, file_offset: int, owner: Scheduler, done: Done
    ) -> None:
        self.name, self.view, self.file_offset, self.owner = name, view, file_offset, owner
        self.moved = 0
        self.torn_at = -1
        """Bytes of the view after which a torn write keeps nothing; -1 for a whole one."""
        self.outcome: DiskOutcome | None = None
        """Set once the bytes are decided; `done` is then on its way."""
        self.piece: Callable[[], None] | None = None
        self._done: Done | None = done

    def deliver(self) -> None:
        """Call `done`, the first time that this is called."""
        done, self._done = self._done, None
        if done is not None and self.outcome is not None:
            done(self.outcome)

    def hurry(self) -> None:
        """End it now: the rest of its bytes, then `done`, in no virtual time."""
        while self.outcome is None and self.piece is not None:
            self.piece()
        self.deliver()


class Disk:
    """The files of one node."""

    def __init__(
        self, world: World, knobs: DiskKnobs, name: str = "disk", capacity_bytes: int = 1 << 40
    ) -> None:
        self.name, self.capacity_bytes = name, capacity_bytes
        self.counts = DiskCounts()
        self.used_bytes = 0
        self._world, self._knobs = world, knobs
        self._random = world.fork(f"disk/{name}")
        self._files: dict[str, bytearray] = {}
        self._stalled: list[Timer] = []

    def names(self) -> list[str]:
        """Return the names of all files, in order of creation."""
        return list(self._files)

    def size_bytes(self, name: str) -> int | None:
        """Return a file's size, None if there is none."""
        file = self._files.get(name)
        return None if file is None else len(file)

    def write(
        self, name: str, header: bytes, view: memoryview, owner: Scheduler, done: Done
    ) -> DiskTransfer:
        """Write a file anew: `header` at once, then `view` in pieces."""
        random, knobs = self._random, self._knobs
        transfer = DiskTransfer(name, view, len(header), owner, done)
        self.remove(name)
        full = self.used_bytes + len(header) + view.nbytes > self.capacity_bytes
        if full or random.random() < knobs.enospc_share:
            self.counts.enospc += 1
            return self._finish(transfer, DiskOutcome.ENOSPC)
        self._files[name] = bytearray(header)
        self.used_bytes += len(header)
        if random.random() < knobs.torn_share:
            self.counts.torn += 1
            transfer.torn_at = random.randrange(max(1, view.nbytes))
            self._world.note(self.name, f"tears {name[-12:]} at {transfer.torn_at}")
        return self._begin(transfer, self._write_piece)

    def read(
        self, name: str, offset: int, view: memoryview, owner: Scheduler, done: Done
    ) -> DiskTransfer:
        """Fill `view`, in pieces, from `offset` of a file."""
        transfer = DiskTransfer(name, view, offset, owner, done)
        file = self._files.get(name)
        if file is None or len(file) < offset + view.nbytes:
            return self._finish(transfer, DiskOutcome.ABSENT)
        if self._random.random() < self._knobs.flip_share:
            self.flip(name)
        return self._begin(transfer, self._read_piece)

    def rename(self, name: str, new_name: str) -> DiskOutcome:
        """Give a file another name, in place of one that has it."""
        file = self._files.get(name)
        if file is None:
            return DiskOutcome.ABSENT
        self.remove(new_name)
        self._files[new_name] = self._files.pop(name)
        return DiskOutcome.DONE

    def remove(self, name: str) -> DiskOutcome:
        """Delete a file."""
        file = self._files.pop(name, None)
        if file is None:
            return DiskOutcome.ABSENT
        self.used_bytes -= len(file)
        return DiskOutcome.DONE

    def flip(self, name: str) -> None:
        """Flip one bit of a file, for good."""
        file = self._files[name]
        self.counts.flipped += 1
        bit = self._random.randrange(8 * len(file))
        file[bit // 8] ^= 1 << bit % 8
        self._world.note(self.name, f"flips bit {bit} of {name[-12:]}")

    def calm(self) -> None:
        """Commit no further faults, and let what is stalled begin. What is corrupt stays so."""
        self._knobs = DiskKnobs(piece_bytes=self._knobs.piece_bytes)
        for timer in self._stalled:
            if timer.pending and timer.fn is not None:
                self._world.at(self._knobs.delay_s, timer.fn, timer.label)
                timer.cancel()
        self._stalled.clear()

    def _begin(self, transfer: DiskTransfer, piece: Callable[[DiskTransfer], None]) -> DiskTransfer:
        random, knobs = self._random, self._knobs
        delay_s = knobs.delay_s * random.uniform(0.5, 1.5)
        if random.random() < knobs.eio_share:
            self.counts.eio += 1
            return self._finish(transfer, DiskOutcome.EIO, delay_s)
        transfer.piece = lambda: piece(transfer)
        if random.random() < knobs.stall_share:
            self.counts.stalled += 1
            delay_s += random.expovariate(1 / knobs.stall_s)
            self._stalled.append(self._later(transfer, delay_s))
        else:
            self._later(transfer, delay_s)
        return transfer

    def _later(self, transfer: DiskTransfer, delay_s: float) -> Timer:
        return transfer.owner.dma(delay_s, lambda: self._go_on(transfer), f"{self.name} piece")

    def _go_on(self, transfer: DiskTransfer) -> None:
        """Move the next piece, unless `hurry` has ended the transfer meanwhile."""
        if transfer.outcome is not None or transfer.piece is None:
            return
        transfer.piece()
        if transfer.outcome is None:
            self._later(transfer, self._knobs.delay_s * self._random.uniform(0.05, 0.15))
        else:
            transfer.owner.at(0.0, transfer.deliver, f"{self.name} done")

    def _write_piece(self, transfer: DiskTransfer) -> None:
        file = self._files.get(transfer.name)
        if file is None:
            transfer.outcome = DiskOutcome.ABSENT
            return
        data = self._next_piece(transfer)
        start = transfer.moved
        transfer.moved += data.nbytes
        if transfer.torn_at >= 0:
            data = data[: max(0, transfer.torn_at - start)]
        if self.used_bytes + data.nbytes > self.capacity_bytes:
            self.counts.enospc += 1
            transfer.outcome = DiskOutcome.ENOSPC
            return
        file += data
        self.used_bytes += data.nbytes
        if transfer.moved == transfer.view.nbytes:
            transfer.outcome = DiskOutcome.DONE

    def _read_piece(self, transfer: DiskTransfer) -> None:
        file = self._files.get(transfer.name)
        piece = self._next_piece(transfer)
        start = transfer.file_offset + transfer.moved
        if file is None or len(file) < start + piece.nbytes:
            transfer.outcome = DiskOutcome.ABSENT
            return
        piece[:] = memoryview(file)[start : start + piece.nbytes]
        transfer.moved += piece.nbytes
        if transfer.moved == transfer.view.nbytes:
            transfer.outcome = DiskOutcome.DONE

    def _next_piece(self, transfer: DiskTransfer) -> memoryview:
        return transfer.view[transfer.moved : transfer.moved + self._knobs.piece_bytes]

    def _finish(
        self, transfer: DiskTransfer, outcome: DiskOutcome, delay_s: float = 0.0
    ) -> DiskTransfer:
        """Decide a transfer that moves no bytes."""
        transfer.outcome = outcome
        transfer.owner.at(delay_s, transfer.deliver, f"{self.name} {outcome.name}")
        return transfer

    def check(self) -> None:
        """Raise `Conservation` if the sizes do not sum up."""
        total = sum(map(len, self._files.values()))
        if total != self.used_bytes or self.used_bytes > self.capacity_bytes:
            raise Conservation(
                self.name, f"files {total}, used {self.used_bytes} of {self.capacity_bytes}"
            )
