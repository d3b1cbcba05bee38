"""`KVFabricConnector`: vLLM's connector interface over the two halves."""
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUnknownParameterType=false

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from ....fabric.clock import SystemClock
from ....fabric.errors import ConfigError, Unsupported
from ....tiers.pool.client import PoolClient
from .describe import describe_cache
from .geometry import CacheGeometry
from .gpu_watch import GpuSide, problem_of
from .namespace import engine_namespace
from .scheduler import HOST, SchedulerSide, written_blocks
from .settings import COPY_TIMEOUT_S, POOL_TIMEOUT_S, LoadMode, read_settings
from .transfers import StepPlan, WorkerReport
from .worker import WorkerSide

PEER = "peer"
LOG = logging.getLogger("kvfabric.vllm")


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """What a worker tells the scheduler before the first request."""

    geometry: CacheGeometry


@dataclass
class PlanMetadata(KVConnectorMetadata):
    """What the scheduler tells the workers in each step."""

    plan: StepPlan


@dataclass
class ReportMetadata(KVConnectorWorkerMetadata):
    """What the workers tell the scheduler after each step."""

    report: WorkerReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Take in another rank's report."""
        assert isinstance(other, ReportMetadata)
        self.report.add(other.report)
        return self


class KVFabricConnector(KVConnectorBase_V1, SupportsHMA):
    """An engine's KV cache on the pool of its node; see docs/vllm.md."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = read_settings(transfer.kv_connector_extra_config, os.environ)
        # A cache that failed costs a recomputation, never a request. vLLM reads this after it made
        # the connector, and its default is to fail.
        transfer.kv_load_failure_policy = "recompute"
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise Unsupported(
                "pipeline_parallel_size",
                str(vllm_config.parallel_config.pipeline_parallel_size),
                "A chunk holds all layers; use tensor parallelism.",
            )
        groups = kv_cache_config.kv_cache_groups
        if self._settings.load is LoadMode.SYNC and len(groups) > 1:
            raise ConfigError(
                "kv_connector_extra_config.load",
                f"is sync for a model with {len(groups)} cache groups",
                "Use async: vLLM cannot be told which of several groups' blocks failed",
            )
        _, self._hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        self._block_tokens = {
            index: int(group.kv_cache_spec.block_size) for index, group in enumerate(groups)
        }
        self._config = vllm_config
        self._clock = SystemClock()
        self._geometry: CacheGeometry | None = None
        self._scheduler: SchedulerSide | None = None
        self._block_pool: Any = None
        self._gpu: GpuSide | None = None
        self._worker: WorkerSide | None = None

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a miss later, nothing worse."""
        return False

    def shutdown(self) -> None:
        """Let go of the pool."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        if self._gpu is not None:
            self._gpu.close()
            self._gpu = None
        if self._scheduler is not None:
            self._scheduler.close()
            self._scheduler = None

    # The worker's hooks.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Describe the engine's cache, and be ready to copy."""
        self._geometry, copier = describe_cache(
            self._config,
            self._kv_cache_config,
            kv_caches,
            rank=get_tensor_model_parallel_rank(),
            size=get_tensor_model_parallel_world_size(),
            chunk_tokens=self._settings.chunk_tokens,
        )
        if self._settings.load is LoadMode.SYNC and not self._geometry.keeps_blocks:
            raise ConfigError(
                "kv_connector_extra_config.load",
                "is sync for a model with a sliding window",
                "Use async: a load that failed within a step leaves no window to go on from",
            )
        self._worker = WorkerSide(
            self._geometry,
            copier,
            lambda resets: self._attach(resets, COPY_TIMEOUT_S),
            self._clock,
        )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return this rank's geometry."""
        return None if self._geometry is None else Handshake(self._geometry)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step: save, and wait for saves whose blocks it overwrites."""
        assert self._worker is not None
        assert isinstance(kv_connector_metadata, PlanMetadata)
        self._worker.take(kv_connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the step's loads, or do them."""
        assert self._worker is not None
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PlanMetadata)
        if self._settings.load is LoadMode.SYNC:
            self._worker.load_now(metadata.plan)
        else:
            self._worker.start_loads(metadata.plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded layer by layer."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing is saved layer by layer."""

    def wait_for_save(self) -> None:
        """Saves go on beside the steps; see `handle_preemptions`."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return whose loads are over, and whose failed."""
        assert self._worker is not None
        finished = self._worker.finished()
        self._bad_blocks = finished.bad_blocks
        results = KVConnectorTransferResults()
        if self._settings.load is LoadMode.ASYNC:
            results.finished_recving = finished.requests
            if self._geometry is not None and not self._geometry.keeps_blocks:
                results.failed_recving = finished.failed
                self._bad_blocks = set()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that were to be loaded and were not, since the last results."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return what the scheduler must know."""
        assert self._worker is not None
        report = self._worker.report()
        return None if report is None else ReportMetadata(report)

    # The scheduler's hooks.

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Get the pool whose blocks are announced."""
        self._block_pool = gpu_block_pool

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Hear of the ranks' caches, and attach."""
        geometries: list[CacheGeometry] = []
        for rank in sorted(metadata):
            handshake = metadata[rank]
            assert isinstance(handshake, Handshake)
            geometries.append(handshake.geometry)
        for other in geometries[1:]:
            geometries[0].require_same(other)
        self._geometry = geometries[0]
        self._scheduler = SchedulerSide(
            self._settings, self._geometry, self._hash_tokens, self._attach, self._clock
        )
        self._scheduler.open()
        self._watch_gpu(self._scheduler)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Look up what can be loaded."""
        if self._scheduler is None or request.skip_reading_prefix_cache:
            return 0, False
        tokens = self._scheduler.matched(request, num_computed_tokens)
        return tokens, bool(tokens) and self._scheduler.loads_async

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the load."""
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Say where the loaded tokens were."""
        if self._scheduler is None or num_external_tokens == 0:
            return {}
        found: dict[CacheHitSource, int] = {}
        for origin, tokens in self._scheduler.origins(request, num_external_tokens).items():
            source = {HOST: CacheHitSource.HOST, PEER: CacheHitSource.P2P}.get(
                origin, CacheHitSource.DISK
            )
            found[source] = found.get(source, 0) + tokens
        return found

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Plan the step's saves and loads."""
        if self._scheduler is None:
            return PlanMetadata(StepPlan(0))
        cached = scheduler_output.scheduled_cached_reqs
        new = [
            (each.num_computed_tokens, each.block_ids)
            for each in scheduler_output.scheduled_new_reqs
        ]
        added: list[tuple[int, Any]] = []
        for request_id, computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            if request_id in cached.resumed_req_ids and blocks is not None:
                new.append((computed, blocks))
            else:
                added.append((computed, blocks))
        admitted = [each.req_id for each in scheduler_output.scheduled_new_reqs]
        admitted += cached.resumed_req_ids
        grown = set(admitted)
        grown.update(
            request_id
            for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True)
            if blocks is not None
        )
        state = scheduler_output.kv_connector_block_state
        plan = self._scheduler.plan(
            scheduler_output.num_scheduled_tokens,
            admitted,
            written_blocks(new, added, self._block_tokens),
            state.get_block_ids,
            grown,
        )
        return PlanMetadata(plan)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take in the workers' reports."""
        if self._scheduler is None:
            return
        metadata = connector_output.kv_connector_worker_meta
        report = metadata.report if isinstance(metadata, ReportMetadata) else None
        self._scheduler.observed(report, connector_output.finished_recving or ())

    def take_events(self) -> Iterable[Any]:
        """Called once for each step's output. The pool publishes events, this engine's too."""
        if self._scheduler is not None:
            self._scheduler.step_over()
        if self._gpu is not None:
            self._gpu.step_over()
        return ()

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished_all_groups`, for one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Plan the last saves. The blocks may be freed: the fence sees to it."""
        if self._scheduler is None:
            return False, None
        return False, self._scheduler.finished(request, block_ids)

    def reset_cache(self) -> bool | None:
        """From now on find nothing that is in the fabric."""
        if self._scheduler is not None:
            self._scheduler.reset()
        if self._gpu is not None:
            self._gpu.pool_changed()
        return True

    def _watch_gpu(self, scheduler: SchedulerSide) -> None:
        problem = "no block pool" if self._block_pool is None else problem_of(self._block_pool)
        if problem:
            LOG.warning("this vLLM cannot be watched (%s): its GPU is not announced", problem)
            return
        assert self._geometry is not None
        self._gpu = GpuSide(
            self._block_pool, self._geometry, self._hash_tokens, lambda: scheduler.client
        )
        self._gpu.start()

    def _attach(self, resets: int, timeout_s: float = POOL_TIMEOUT_S) -> PoolClient:
        assert self._geometry is not None
        namespace = engine_namespace(
            self._config, self._settings, self._geometry, self._hash_tokens, resets
        )
        return PoolClient.attach(
            self._settings.pool, namespace, self._geometry.wire_groups, timeout_s=timeout_s
        )
