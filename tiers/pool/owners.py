"""Who holds leases in a pool, and until when.

An owner is a client's process, a grant to a peer, or a job of the pool itself. Everything it holds
hangs on one lease: a sign of life renews it, and when it ends all that the owner held is taken back
at once. Time is handed in, on one clock of the granting side.
"""

import heapq
from collections.abc import Iterator
from itertools import count
from math import inf

from .slots import SlotEntry


class Owner:
    """One holder of a lease and what it holds."""

    __slots__ = (
        "deadline_s",
        "lapsed",
        "lease_s",
        "name",
        "pid",
        "pid_started",
        "pins",
        "quarantined",
        "writing",
    )

    def __init__(self, name: str, lease_s: float, pid: int, pid_started: int) -> None:
        self.name, self.lease_s, self.pid, self.pid_started = name, lease_s, pid, pid_started
        self.deadline_s = -inf
        self.lapsed = False
        self.writing: dict[int, SlotEntry] = {}
        self.quarantined: dict[int, SlotEntry] = {}
        self.pins: dict[int, int] = {}
        """How often it has pinned each slot."""

    @property
    def process(self) -> tuple[int, int]:
        """The pid and when it started: one process, even if the pid is used again."""
        return self.pid, self.pid_started


class Leases:
    """Owners by name, and the order in which their leases end."""

    def __init__(self) -> None:
        self._owners: dict[str, Owner] = {}
        self._due: list[tuple[float, int, Owner]] = []
        self._ties = count()

    def __len__(self) -> int:
        return len(self._owners)

    def __iter__(self) -> Iterator[Owner]:
        return iter(self._owners.values())

    def find(self, name: str) -> Owner | None:
        """Return an owner, if it is known."""
        return self._owners.get(name)

    def add(self, owner: Owner, now_s: float) -> None:
        """Know an owner from now on, and start its lease."""
        self._owners[owner.name] = owner
        owner.deadline_s = now_s + owner.lease_s
        self._push(owner)

    def extend(self, owner: Owner, now_s: float) -> None:
        """Let a lease run from now; a lapsed one begins anew."""
        sooner = now_s + owner.lease_s < owner.deadline_s
        owner.deadline_s = now_s + owner.lease_s
        if owner.lapsed or sooner:
            owner.lapsed = False
            self._push(owner)

    def forget(self, owner: Owner) -> None:
        """Know an owner no longer."""
        del self._owners[owner.name]
        owner.lapsed = True
        if len(self._due) > 2 * len(self._owners) + 64:
            self._due = [due for due in self._due if not due[2].lapsed]
            heapq.heapify(self._due)

    def pop_due(self, now_s: float) -> list[Owner]:
        """Return the owners whose leases have ended, and mark them lapsed."""
        ended: list[Owner] = []
        while self.next_deadline_s() <= now_s:
            owner = heapq.heappop(self._due)[2]
            owner.lapsed = True
            ended.append(owner)
        return ended

    def next_deadline_s(self) -> float:
        """Return when the next lease ends; infinity if none runs."""
        while self._due:
            due_s, _, owner = self._due[0]
            if not owner.lapsed and due_s == owner.deadline_s:
                return due_s
            heapq.heappop(self._due)
            if not owner.lapsed and due_s < owner.deadline_s:
                self._push(owner)
        return inf

    def _push(self, owner: Owner) -> None:
        heapq.heappush(self._due, (owner.deadline_s, next(self._ties), owner))
