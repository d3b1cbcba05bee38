"""A network on virtual time: frames that are late, lost, doubled, reordered or cut off.

Ownership. A frame is copied when it is sent. The network holds it until it is delivered or lost.

Failure. Nothing is reported to the sender: it hears an answer or it does not. A link is directed
and named by its two ends, so a cut may be one-way. A frame is lost when its link is cut at the
moment of sending or of arrival. A name may change hands (a restarted process has its
predecessor's), and late frames for the predecessor reach the successor.

Conservation: sent + duplicated == delivered + lost + in flight.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product

from ...fabric.errors import Conservation
from .knobs import LinkKnobs
from .world import World

Deliver = Callable[[str, bytes], None]
"""Takes the sender's name and the frame."""

TIE_S = 1e-9
"""What keeps two frames of an ordered link apart in time."""


@dataclass(slots=True)
class NetworkCounts:
    """How many frames met which fate."""

    sent: int = 0
    duplicated: int = 0
    delivered: int = 0
    lost: int = 0
    in_flight: int = 0


class Network:
    """Frames between named nodes."""

    def __init__(self, world: World, knobs: LinkKnobs, name: str = "network") -> None:
        self.name = name
        self.counts = NetworkCounts()
        self._world, self._knobs = world, knobs
        self._random = world.fork(name)
        self._nodes: dict[str, Deliver] = {}
        self._cuts: set[tuple[str, str]] = set()
        self._last_arrival_s: dict[tuple[str, str], float] = {}

    def attach(self, name: str, deliver: Deliver) -> None:
        """Give a name to whoever takes its frames from now on."""
        self._nodes[name] = deliver

    def detach(self, name: str) -> None:
        """Nobody answers to this name any more; frames to it are lost."""
        self._nodes.pop(name, None)

    def send(self, source: str, target: str, frame: bytes | memoryview) -> None:
        """Send one frame. It arrives later, once, twice or never."""
        self.counts.sent += 1
        random, knobs = self._random, self._knobs
        if (source, target) in self._cuts or random.random() < knobs.loss_share:
            self.counts.lost += 1
            self._world.trace.stamp(self._world.now_s(), f"lost {source}>{target}")
            return
        copies = 1
        if random.random() < knobs.duplicate_share:
            copies = 2
            self.counts.duplicated += 1
        body = bytes(frame)
        for _ in range(copies):
            self.counts.in_flight += 1
            self._world.at(
                self._delay_s(source, target),
                lambda: self._arrive(source, target, body),
                f"frame {source}>{target}",
            )

    def _delay_s(self, source: str, target: str) -> float:
        random, knobs = self._random, self._knobs
        delay_s = knobs.delay_s * random.uniform(0.5, 1.5)
        if random.random() < knobs.straggler_share:
            delay_s += random.expovariate(1 / knobs.straggler_s)
        if knobs.ordered:
            now_s, link = self._world.now_s(), (source, target)
            arrival_s = max(now_s + delay_s, self._last_arrival_s.get(link, 0.0) + TIE_S)
            self._last_arrival_s[link] = arrival_s
            delay_s = arrival_s - now_s
        return delay_s

    def _arrive(self, source: str, target: str, frame: bytes) -> None:
        self.counts.in_flight -= 1
        deliver = self._nodes.get(target)
        if deliver is None or (source, target) in self._cuts:
            self.counts.lost += 1
            return
        self.counts.delivered += 1
        deliver(source, frame)

    def cut(self, source: str, target: str) -> None:
        """Cut one direction between two nodes."""
        self._cut([(source, target)], f"{source} > {target}")

    def partition(self, left: Iterable[str], right: Iterable[str]) -> None:
        """Cut both directions between two sets of nodes."""
        left, right = tuple(left), tuple(right)
        links = [*product(left, right), *product(right, left)]
        self._cut(links, f"{' '.join(left)} | {' '.join(right)}")

    def _cut(self, links: Iterable[tuple[str, str]], what: str) -> None:
        self._cuts.update(links)
        self._world.note(self.name, f"cuts {what}")

    def heal(self) -> None:
        """Mend every cut."""
        if self._cuts:
            self._cuts.clear()
            self._world.note(self.name, "healed")

    def calm(self) -> None:
        """Heal, and lose, double and delay nothing unduly from now on."""
        self.heal()
        self._knobs = LinkKnobs()

    def check(self) -> None:
        """Raise `Conservation` if a frame is unaccounted for."""
        c = self.counts
        if c.sent + c.duplicated != c.delivered + c.lost + c.in_flight:
            raise Conservation(self.name, f"{c}")
