"""Feeds the recorder from the counts that the pool's parts keep for themselves.

The parts count in plain integers, which cost nothing on a request's path. When somebody asks for
the metrics, what has been added since the last time is recorded.
"""

from collections.abc import Sequence

from ...fabric.metrics import Recorder
from ..base import Tier
from ..p2p.source import PullSource
from .directory import Directory
from .gpu import GpuBook
from .peering import Peering


class Gauges:
    """Remembers how far each count was recorded."""

    def __init__(self, recorder: Recorder, slot_bytes: int) -> None:
        self._recorder = recorder
        self._slot_bytes = slot_bytes
        self._recorded: dict[tuple[str, str], int] = {}

    def record(
        self,
        directory: Directory,
        gpu: GpuBook,
        tiers: Sequence[Tier],
        peering: Peering | None,
        source: PullSource | None,
    ) -> None:
        """Record gauges as they are and counts as they grew."""
        stats = directory.stats()
        states = {
            "free": stats.free,
            "writing": stats.writing,
            "ready": stats.ready + stats.condemned,
            "quarantined": stats.quarantined,
        }
        for state, slots in states.items():
            self._recorder.gauge("kvfabric_pool_slots", slots, state=state)
        quarantined = stats.quarantined * self._slot_bytes
        self._recorder.gauge("kvfabric_quarantined_bytes", quarantined)
        self._recorder.gauge("kvfabric_gpu_chunks", gpu.chunks)
        self._grew("kvfabric_evictions_total", "path", "host", stats.evictions)
        for tier in tiers:
            counters = tier.stats().counters
            self._grew("kvfabric_evictions_total", "path", tier.name, counters.get("evicted", 0))
            corrupt = counters.get("corrupt", 0)
            self._grew("kvfabric_checksum_failures_total", "path", tier.name, corrupt)
        if peering is not None:
            corrupt = peering.consumer.stats().corrupt
            self._grew("kvfabric_checksum_failures_total", "path", "peer", corrupt)
        if source is not None:
            expired = source.stats().expired
            self._grew("kvfabric_leases_expired_total", "owner", "peer", expired)

    def _grew(self, name: str, label: str, value: str, count: int) -> None:
        before = self._recorded.get((name, value), 0)
        self._recorded[name, value] = count
        self._recorder.count(name, max(count - before, 0), **{label: value})
