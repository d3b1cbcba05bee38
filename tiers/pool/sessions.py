"""Who is attached to the pool, and for which namespace."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...fabric.errors import NamespaceMismatch, Unsupported
from ...fabric.namespace import Namespace
from ...fabric.types import NamespaceId
from ...fabric.wire import Attach, GroupGeometry

NAMESPACES_MAX = 64
"""Models, tenants and weight versions that one pool keeps apart at once. Of more versions than this
the oldest of those that were retired is forgotten; whoever still brings it is taken for newer."""


@dataclass(frozen=True, slots=True)
class Session:
    """An attached client: the socket it speaks on and the process that owns its slots."""

    identity: bytes
    client: str
    pid: int
    pid_started: int
    namespace: NamespaceId


@dataclass(frozen=True, slots=True)
class NamespaceEntry:
    """A namespace that clients brought, and the geometry of its groups."""

    namespace: Namespace
    groups: Mapping[int, GroupGeometry]
    retired: bool = False


@dataclass(slots=True)
class Namespaces:
    """Admits namespaces. Engines of one model and tenant must agree in every field but the weights.

    New weights are a new namespace and retire the old one, which is refused from then on.
    """

    slot_bytes: int
    entries: dict[NamespaceId, NamespaceEntry] = field(
        default_factory=dict[NamespaceId, NamespaceEntry]
    )

    def admit(self, attach: Attach) -> tuple[NamespaceId, tuple[NamespaceId, ...]]:
        """Return the namespace's id and those that it retires.

        Raises `NamespaceMismatch` or `Unsupported`, naming the field, and then changes nothing.
        """
        theirs = Namespace.from_fields(attach.namespace)
        theirs.refuse_unsupported()
        groups = self._admit_groups(attach.groups)
        known = self.entries.get(theirs.id)
        if known is not None:
            return self._admit_again(known, groups)
        retired: list[NamespaceId] = []
        for namespace_id, entry in self.entries.items():
            ours = entry.namespace
            if (ours.model, ours.tenant) != (theirs.model, theirs.tenant) or entry.retired:
                continue
            if ours.weights_version == theirs.weights_version:
                ours.require_equal(theirs)
            retired.append(namespace_id)
        over = [each for each, entry in self.entries.items() if entry.retired] or retired
        if len(self.entries) >= NAMESPACES_MAX and not over:
            raise Unsupported(
                "namespace", f"number {NAMESPACES_MAX + 1}", "Give this model a pool of its own."
            )
        for namespace_id in retired:
            old = self.entries[namespace_id]
            self.entries[namespace_id] = NamespaceEntry(old.namespace, old.groups, retired=True)
        if len(self.entries) >= NAMESPACES_MAX:
            del self.entries[over[0]]
        self.entries[theirs.id] = NamespaceEntry(theirs, groups)
        return theirs.id, tuple(retired)

    def chunk_bytes(self, namespace: NamespaceId, group: int) -> int | None:
        """Return how long a group's chunks are; None for a group or namespace nobody brought."""
        geometry = self._geometry(namespace, group)
        return None if geometry is None else geometry.chunk_bytes

    def chunk_tokens(self, namespace: NamespaceId, group: int) -> int:
        """Return how many tokens a group's chunks have; 0 if nobody brought it."""
        geometry = self._geometry(namespace, group)
        return 0 if geometry is None else geometry.chunk_tokens

    def _geometry(self, namespace: NamespaceId, group: int) -> GroupGeometry | None:
        entry = self.entries.get(namespace)
        return None if entry is None else entry.groups.get(group)

    def _admit_groups(self, groups: list[GroupGeometry]) -> dict[int, GroupGeometry]:
        if not groups:
            raise Unsupported("groups", "[]", "Name at least one cache group.")
        known = {group.group: group for group in groups}
        if len(known) != len(groups):
            raise Unsupported("groups", str(groups), "Name every cache group once.")
        for group in groups:
            if not (0 <= group.group < 1 << 32 and 0 < group.chunk_tokens < 1 << 31):
                raise Unsupported(
                    f"groups[{group.group}]", str(group), "An index and a number of tokens."
                )
            if not 0 < group.chunk_bytes <= self.slot_bytes:
                raise Unsupported(
                    f"groups[{group.group}].chunk_bytes",
                    str(group.chunk_bytes),
                    f"A slot of this pool holds {self.slot_bytes} bytes; raise host.slot_bytes.",
                )
        return known

    def _admit_again(
        self, known: NamespaceEntry, groups: dict[int, GroupGeometry]
    ) -> tuple[NamespaceId, tuple[NamespaceId, ...]]:
        if known.retired:
            raise NamespaceMismatch(
                "weights_version", "newer weights", known.namespace.weights_version
            )
        if known.groups != groups:
            raise NamespaceMismatch(
                "groups", str(list(known.groups.values())), str(list(groups.values()))
            )
        return known.namespace.id, ()
