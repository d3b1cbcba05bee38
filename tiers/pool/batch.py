"""What a reservation must be like before the directory looks at it."""

from collections.abc import Sequence

from ...fabric.errors import Malformed
from ...fabric.records import require_key
from ...fabric.types import NAMESPACE_BYTES, ChunkKey, NamespaceId


def require_batch(
    namespace: NamespaceId,
    keys: Sequence[ChunkKey],
    depths: Sequence[int],
    lengths: Sequence[int],
    slot_bytes: int,
) -> None:
    """Raise `Malformed`, naming what is wrong, for a batch that no slot record could hold."""
    if len(namespace) != NAMESPACE_BYTES:
        raise Malformed("namespace id", f"{len(namespace)} bytes, not {NAMESPACE_BYTES}")
    if not len(keys) == len(depths) == len(lengths):
        raise Malformed(
            "reservation", f"{len(keys)} keys, {len(depths)} depths, {len(lengths)} lengths"
        )
    if not keys:
        return
    require_key(min(keys, key=len))
    require_key(max(keys, key=len))
    if not 0 <= min(depths) <= max(depths) < 1 << 32:
        raise Malformed("reservation", f"depths from {min(depths)} to {max(depths)}")
    if not 0 <= min(lengths) <= max(lengths) <= slot_bytes:
        raise Malformed(
            "reservation",
            f"chunks of {min(lengths)} to {max(lengths)} bytes for slots of {slot_bytes}",
        )
