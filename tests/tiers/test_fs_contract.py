"""The file tier under the contract, in each of its modes."""

import os
from pathlib import Path

import pytest

from kvfabric.fabric.config import FileTierConfig
from kvfabric.fabric.file_record import record_bytes
from kvfabric.fabric.types import ChunkKey, NamespaceId
from kvfabric.tiers.base import Tier
from kvfabric.tiers.fs import FileTier, IoMode
from kvfabric.tiers.testing import HIT, MISS, ManualClock, TierContract


class _FileTierContract(TierContract):
    mode = IoMode.PROBE
    readers = 2
    writers = 1

    def make_tier(self, tmp_path: Path, clock: ManualClock, quota_bytes: int) -> Tier:
        self.root = tmp_path
        config = FileTierConfig(
            root_dir=str(tmp_path),
            quota_bytes=quota_bytes,
            readers=self.readers,
            writers=self.writers,
        )
        return FileTier(config, clock, mode=self.mode)

    def corrupt(self, tier: Tier, namespace: NamespaceId, key: ChunkKey) -> None:
        path = self.root / namespace.hex() / key.hex()[:2] / f"{key.hex()}.kv"
        data = bytearray(path.read_bytes())
        data[4096 + 777] ^= 1
        path.write_bytes(data)

    def occupied_bytes(self, length_bytes: int) -> int:
        return record_bytes(length_bytes)

    @pytest.fixture(autouse=True)
    def nothing_left(self, tmp_path: Path):
        yield
        left = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".kv"]
        assert not left

    def test_the_least_recently_used_goes_first(self, tmp_path: Path):
        with self.rig(tmp_path, quota_chunks=3) as rig:
            rig.store(1, 2, 3)
            rig.load(1)
            rig.store(2)
            rig.store(4)
            assert rig.lookup(1, 2, 3, 4) == [HIT, HIT, MISS, HIT]

    def test_usage_is_what_the_files_occupy(self, tmp_path: Path):
        with self.rig(tmp_path, quota_chunks=3) as rig:
            for number in range(6):
                rig.store(number)
                on_disk = [os.stat(path) for path in tmp_path.rglob("*.kv")]
                assert rig.tier.stats().used_bytes == sum(stat.st_size for stat in on_disk)
                assert all(stat.st_mode & 0o777 == 0o600 for stat in on_disk)


class TestFileTierProbed(_FileTierContract):
    pass


class TestFileTierBuffered(_FileTierContract):
    mode = IoMode.BUFFERED


class TestFileTierManyWriters(_FileTierContract):
    readers = 1
    writers = 4
