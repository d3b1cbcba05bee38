"""The messages by which an authority tells replicas what changed. Formats only.

They travel as a pool's events do: topic `kvfabric@<authority>@<epoch>`, number, payload, replay
and snapshot on a ROUTER. A payload is `[ts, ops]`; an op is an array that begins with its name.
Hashes are packed little-endian uint64. Token ids and parents are not passed on.
"""

from typing import Annotated

import msgspec
import numpy as np

from ..fabric.errors import Malformed
from ..fabric.events import (
    HASHES_MAX,
    SNAPSHOT_BYTES_MAX,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    Name,
    Snapshot,
    SnapshotSection,
    hashes_low64,
)

OPS_MAX = 65_536
"""As many as events in a batch."""


class Op(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """The root of all ops."""


class Stored(Op, frozen=True, tag="S"):
    """A source announced chunks. `medium` is None where the event had none."""

    source: Name
    group: int
    medium: Name | None
    chunk_tokens: int
    hashes: bytes


class Removed(Op, frozen=True, tag="R"):
    """A source took chunks back."""

    source: Name
    group: int
    medium: Name | None
    hashes: bytes


class Cleared(Op, frozen=True, tag="C"):
    """A source's GPU lost everything."""

    source: Name


class Dropped(Op, frozen=True, tag="D"):
    """Forget a source."""

    source: Name


class Trusted(Op, frozen=True, tag="T"):
    """Give a source credit, or none."""

    source: Name
    trusted: bool


class PoolAt(Op, frozen=True, tag="P"):
    """A node's pool serves peers at an address; an empty one withdraws it."""

    node: Name
    endpoint: Name


AnyOp = Stored | Removed | Cleared | Dropped | Trusted | PoolAt
Ops = tuple[AnyOp, ...]


class DeltaBatch(msgspec.Struct, array_like=True, frozen=True):
    """What one message carries."""

    ts: float
    ops: Annotated[Ops, msgspec.Meta(max_length=OPS_MAX)]


class SourceState(msgspec.Struct, array_like=True, frozen=True):
    """One source, whole."""

    source: Name
    trusted: bool
    sections: tuple[SnapshotSection, ...]


class FleetSnapshot(msgspec.Struct, array_like=True, frozen=True, tag="Fleet"):
    """All that an authority knows; `next_seq` numbers the first batch that is not contained."""

    next_seq: int
    ts: float
    sources: tuple[SourceState, ...]
    pools: dict[Name, Name]
    """By node, the address of its pool."""


_encoder = msgspec.msgpack.Encoder()
_batches = msgspec.msgpack.Decoder(DeltaBatch)
_fleets = msgspec.msgpack.Decoder(FleetSnapshot)


def op_of(source: str, event: Event) -> AnyOp:
    """Return the op that tells a source's event."""
    if isinstance(event, AllBlocksCleared):
        return Cleared(source)
    hashes = np.array(hashes_low64(event.block_hashes), dtype="<u8").tobytes()
    group = event.group_idx or 0
    if isinstance(event, BlockStored):
        return Stored(source, group, event.medium, event.block_size, hashes)
    return Removed(source, group, event.medium, hashes)


def ops_of_load(source: str, snapshot: Snapshot) -> list[AnyOp]:
    """Return the ops that replace a source, none with more hashes than an event may have."""
    ops: list[AnyOp] = [Dropped(source)]
    step = 8 * HASHES_MAX
    for one in snapshot.sections:
        ops.extend(
            Stored(source, one.group, one.medium, one.chunk_tokens, one.hashes[at : at + step])
            for at in range(0, len(one.hashes), step)
        )
    return ops


def event_of(op: Stored | Removed | Cleared) -> Event:
    """Return the event that an op tells, as a placeholder."""
    if isinstance(op, Cleared):
        return AllBlocksCleared()
    if len(op.hashes) % 8:
        raise Malformed("delta", f"{len(op.hashes)} bytes of hashes of 8 bytes")
    hashes = tuple(np.frombuffer(op.hashes, dtype="<u8").tolist())
    if isinstance(op, Stored):
        return BlockStored(
            hashes, None, (), op.chunk_tokens, None, op.medium, None, group_idx=op.group
        )
    return BlockRemoved(hashes, op.medium, op.group)


def encode(message: DeltaBatch | FleetSnapshot) -> bytes:
    """Return the payload of a message. Raises `Malformed` for one beyond the bound."""
    payload = _encoder.encode(message)
    if len(payload) > SNAPSHOT_BYTES_MAX:
        raise Malformed("delta", f"{len(payload)} bytes, more than {SNAPSHOT_BYTES_MAX}")
    return payload


class DeltaCodec:
    """Reads an authority's stream."""

    def batch(self, payload: bytes) -> tuple[float, Ops]:
        """Read a batch of ops."""
        try:
            batch = _batches.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Malformed("delta", str(error)) from error
        for op in batch.ops:
            if isinstance(op, Stored | Removed) and len(op.hashes) % 8:
                raise Malformed("delta", f"{len(op.hashes)} bytes of hashes of 8 bytes")
        return batch.ts, batch.ops

    def empty(self) -> Ops:
        """Return no ops."""
        return ()

    def snapshot(self, payload: bytes) -> tuple[int, float, FleetSnapshot]:
        """Read a fleet's snapshot."""
        try:
            fleet = _fleets.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Malformed("fleet snapshot", str(error)) from error
        for state in fleet.sources:
            if any(len(section.hashes) % 8 for section in state.sections):
                raise Malformed("fleet snapshot", "hashes are not of 8 bytes")
        return fleet.next_seq, fleet.ts, fleet
