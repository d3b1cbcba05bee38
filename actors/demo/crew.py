"""Workers of one kind on their nodes, and asking one of them to generate."""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import ray
from ray.actor import ActorProxy
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from ...fabric.errors import FabricError, Unavailable
from ...fabric.types import SourceRange
from ...router.plan import Candidate
from ..engines.reference import EngineSettings, Generated
from ..fabric import Fabric
from ..worker import WorkerActor, WorkerShell

REQUEST_S = 60.0
"""A request that takes longer has hung, and the run fails; the longest takes about 3 s."""

Worker = ActorProxy[WorkerShell]


class Lost(Enum):
    """Why a worker gave no answer."""

    DEAD = "dead"
    """It, or its node, is gone; it is struck off."""
    UNKNOWN = "unknown"
    """It was struck off before."""


@dataclass(frozen=True, slots=True)
class Member:
    """A worker and the node it is on."""

    node: str
    actor: Worker


@dataclass(slots=True)
class Crew:
    """Workers by name, and how many requests each of them has now. Any thread may use it."""

    members: dict[str, Member]
    lock: threading.Lock
    running: Counter[str] = field(default_factory=Counter[str])

    def candidates(self) -> list[Candidate]:
        """Return the workers as the router sees them."""
        return [Candidate(name, member.node) for name, member in self.members.items()]

    def least_busy(self) -> str:
        """Return the worker with the fewest requests; empty if all are gone."""
        return min(self.members, key=lambda name: (self.running[name], name), default="")

    def ask(
        self,
        name: str,
        prompt: Sequence[int],
        output_tokens: int,
        sources: Sequence[SourceRange],
    ) -> Generated | Lost:
        """Let a worker generate. Raises `Unavailable` if it hangs, or its error of the fabric."""
        with self.lock:
            member = self.members.get(name)
            self.running[name] += 1
        try:
            if member is None:
                return Lost.UNKNOWN
            answer = member.actor.generate.remote(prompt, output_tokens, tuple(sources))
            return answered(answer, name)
        except RayActorError:
            with self.lock:
                self.members.pop(name, None)
            return Lost.DEAD
        finally:
            with self.lock:
                self.running[name] -= 1


def hire(
    fabric: Fabric, settings: EngineSettings, nodes: Sequence[str], each: int, what: str
) -> dict[str, Member]:
    """Start workers of a kind on every node, attached to its pool."""
    members: dict[str, Member] = {}
    for node in nodes:
        endpoint = fabric.addresses(node).client
        remote = WorkerActor.options(label_selector=fabric.place(node))
        for number in range(each):
            members[f"{node}/{what}-{number}"] = Member(node, remote.remote(settings, endpoint))
    return members


def answered(answer: "ray.ObjectRef[Generated]", who: str) -> Generated:
    """Wait for a worker. Raises `Unavailable`, its error of the fabric, or `RayActorError`."""
    try:
        return ray.get(answer, timeout=REQUEST_S)
    except GetTimeoutError as error:
        raise Unavailable(f"worker {who}", REQUEST_S, "See Ray's logs.") from error
    except RayTaskError as error:
        if isinstance(error.cause, FabricError):
            raise error.cause from error
        raise
