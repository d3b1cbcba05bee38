"""Which nodes of a Ray cluster are the fabric's, and which of them gain or lose a pool. Pure."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

NODE_LABEL = "kvfabric/node"
"""The label that says which of the fabric's nodes a raylet is."""
ID_LABEL = "ray.io/node-id"
"""Ray gives it to every node; a node that comes back has a new one."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""What `PoolConfig.node` takes."""


@dataclass(frozen=True, slots=True, order=True)
class FabricNode:
    """A node that is alive, and how Ray is told to put something there."""

    name: str
    label: str
    value: str
    address: str
    """Where other nodes reach it."""

    @property
    def selector(self) -> dict[str, str]:
        """For `label_selector` of an actor or task."""
        return {self.label: self.value}


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """Which nodes get a pool and which pools go."""

    add: tuple[FabricNode, ...]
    remove: tuple[FabricNode, ...]


def plan_pools(nodes: Iterable[FabricNode], pools: Iterable[FabricNode]) -> PoolPlan:
    """Compare the nodes that are alive with those that have a pool.

    A node that came back under its name with another selector is in both parts: its old pool cannot
    return. One that only changed its address keeps its pool.
    """
    alive = {(node.name, node.label, node.value): node for node in nodes}
    have = {(node.name, node.label, node.value): node for node in pools}
    add = sorted(node for place, node in alive.items() if place not in have)
    remove = sorted(node for place, node in have.items() if place not in alive)
    return PoolPlan(tuple(add), tuple(remove))


def fabric_nodes(records: Iterable[Mapping[str, Any]]) -> list[FabricNode]:
    """Return the fabric's nodes among those of `ray.nodes()`, by name.

    Nodes labelled `kvfabric/node`; where nobody gave that label, all that are alive, named as Ray
    names them (by address), or by their id if that name is no name for a pool or not the only one.
    """
    alive = [record for record in records if record["Alive"]]
    labelled = [
        FabricNode(name, NODE_LABEL, name, record["NodeManagerAddress"])
        for record in alive
        if (name := record["Labels"].get(NODE_LABEL))
    ]
    if labelled:
        return sorted(labelled)
    names = Counter(record["NodeName"] for record in alive)
    return sorted(
        FabricNode(
            name if names[name] == 1 and _NAME.fullmatch(name) else record["NodeID"],
            ID_LABEL,
            record["NodeID"],
            record["NodeManagerAddress"],
        )
        for record in alive
        for name in (record["NodeName"],)
    )


def listen_addresses(nodes: Iterable[FabricNode]) -> dict[str, str]:
    """Return on which address the pool of each node is to be reached, by node.

    Loopback as long as all nodes share one address, so that a machine of its own opens nothing to
    its network.
    """
    nodes = list(nodes)
    alone = len({node.address for node in nodes}) <= 1
    return {node.name: "127.0.0.1" if alone else node.address for node in nodes}
