"""A chunk in a slot, as the directory knows it."""

from ...fabric.types import Chunk, ChunkKey, NamespaceId, SlotRef, SlotState


class SlotEntry:
    """One occupied slot. Made by a reservation, gone when the slot is free again.

    The fields up to `checksum` are those of the slot's record; `docs/protocol.md` has them.
    """

    __slots__ = (
        "_ref",
        "checksum",
        "depth",
        "generation",
        "key",
        "length_bytes",
        "listed",
        "namespace",
        "owner_pid",
        "owner_started",
        "pins",
        "slot",
        "state",
        "tag",
    )

    key: ChunkKey
    namespace: NamespaceId
    slot: int
    generation: int
    length_bytes: int
    depth: int
    tag: int
    checksum: int
    owner_pid: int
    """The process that may write the slot; 0 once committed."""
    owner_started: int
    state: SlotState
    listed: bool
    """Whether its key leads to it. What is not listed is free as soon as nobody holds it."""
    pins: int

    def __init__(self, namespace: NamespaceId, key: ChunkKey, tag: int) -> None:
        self.namespace, self.key, self.tag = namespace, key, tag
        self.slot = self.generation = self.length_bytes = self.depth = self.checksum = 0
        self.owner_pid = self.owner_started = self.pins = 0
        self.state = SlotState.WRITING
        self.listed = True
        self._ref: SlotRef | None = None

    @property
    def ref(self) -> SlotRef:
        """The slot and its generation; neither changes once this was asked."""
        if self._ref is None:
            self._ref = SlotRef(self.slot, self.generation)
        return self._ref

    @property
    def chunk(self) -> Chunk:
        """What a transfer needs to know."""
        return Chunk(self.key, self.ref, self.length_bytes, self.checksum)
