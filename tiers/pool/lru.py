"""The order in which ready chunks are evicted: least recently used first.

A batch is moved to the recent end in order of decreasing depth, so that the tail of a request goes
before its head: a prefix without its tail is still of use, a tail without its prefix is not.
"""

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from .slots import SlotEntry


class LruOrder:
    """Slots of ready, listed chunks, the next to be evicted first."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, SlotEntry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, slot: int) -> bool:
        return slot in self._order

    def touch(self, batch: Iterable[SlotEntry]) -> None:
        """Move a batch to the recent end; what is not in the order yet is added."""
        order = self._order
        for entry in sorted(batch, key=_depth, reverse=True):
            order[entry.slot] = entry
            order.move_to_end(entry.slot)

    def add(self, entry: SlotEntry) -> None:
        """Put one that is not in the order yet at the recent end."""
        self._order[entry.slot] = entry

    def remove(self, entry: SlotEntry) -> None:
        """Take one out."""
        del self._order[entry.slot]

    def victims(self, count: int, spared: AbstractSet[int]) -> list[SlotEntry]:
        """Return the `count` that go next, without those pinned or in `spared` (slots).

        Returns fewer only if there are no more. Changes nothing.
        """
        chosen: list[SlotEntry] = []
        if count <= 0:
            return chosen
        for slot, entry in self._order.items():
            if entry.pins == 0 and slot not in spared:
                chosen.append(entry)
                if len(chosen) == count:
                    break
        return chosen

    def entries(self) -> Iterable[SlotEntry]:
        """Return all, the next to be evicted first."""
        return self._order.values()


def _depth(entry: SlotEntry) -> int:
    return entry.depth
