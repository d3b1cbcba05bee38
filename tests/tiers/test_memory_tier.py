"""The reference tier under the contract, and what is its own."""

from pathlib import Path
from typing import cast

from kvfabric.fabric.types import ChunkKey, NamespaceId
from kvfabric.tiers.base import Tier
from kvfabric.tiers.memory import MemoryTier
from kvfabric.tiers.testing import HIT, MISS, ManualClock, TierContract


class TestMemoryTier(TierContract):
    def make_tier(self, tmp_path: Path, clock: ManualClock, quota_bytes: int) -> Tier:
        return MemoryTier(quota_bytes, clock)

    def corrupt(self, tier: Tier, namespace: NamespaceId, key: ChunkKey) -> None:
        copies = cast("MemoryTier", tier)._copies
        copy = copies[namespace, key]
        damaged = bytes([copy.data[0] ^ 1]) + copy.data[1:]
        copies[namespace, key] = type(copy)(damaged, copy.checksum)

    def test_the_least_recently_used_goes_first(self, tmp_path: Path):
        with self.rig(tmp_path, quota_chunks=3) as rig:
            rig.store(1, 2, 3)
            rig.load(1)
            rig.store(2)
            rig.store(4)
            assert rig.lookup(1, 2, 3, 4) == [HIT, HIT, MISS, HIT]
