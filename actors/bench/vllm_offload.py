"""vLLM's tiering offload on the CPU platform: its own specification, with copies made by numpy.

Everything that the scheduler does stays vLLM's: manager, shared region, tiers. vLLM only refuses to
copy on a CPU, so the worker's part is here. vLLM loads this module by its name; see
`kv_connector_extra_config` in `vllm.py`.
"""
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

Rows = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.int64]


class CpuTieringSpec(TieringOffloadingSpec):
    """As vLLM's, with a worker for the CPU platform."""

    def get_worker(self, kv_caches: Any) -> Any:
        """Return the worker, the same each time."""
        if not self._worker:
            rank = 0 if self.replicated_layout else self.config.parallel.rank
            region = SharedOffloadRegion(
                self._engine_id,
                self.num_chunks,
                rank,
                self.kv_bytes_per_chunk,
                self.cpu_page_size_per_worker,
            )
            self._worker = NumpyWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker


class NumpyWorker(OffloadingWorker):
    """Copies when it is asked to, and reports the job as done at the next question."""

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, region: Any) -> None:
        self._each = blocks_per_chunk
        self._region = region
        self._engine: list[Rows] = []
        self._host: list[Rows] = []
        for cache in kv_caches.tensors:
            page = cache.page_size_bytes
            bytes_of = cache.tensor.view(torch.uint8).numpy()
            self._engine.append(bytes_of.reshape(bytes_of.shape[0], -1))
            view = region.create_next_worker_view(page * blocks_per_chunk).numpy().view(np.uint8)
            self._host.append(view.reshape(len(view), blocks_per_chunk, page))
        self._refs: Sequence[Sequence[Any]] = kv_caches.group_data_refs
        self._done: list[Any] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy blocks of the engine into chunks."""
        for tensor, length, blocks, chunks, parts in self._moves(src_spec, dst_spec):
            self._host[tensor][chunks, parts, :length] = self._engine[tensor][blocks, :length]
        self._done.append(TransferResult(job_id, success=True))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy chunks into blocks of the engine."""
        for tensor, length, blocks, chunks, parts in self._moves(dst_spec, src_spec):
            self._engine[tensor][blocks, :length] = self._host[tensor][chunks, parts, :length]
        self._done.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[Any]:
        """Return the jobs since the last question."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """All that was submitted is done."""

    def shutdown(self) -> None:
        """Let go of the memory."""
        self._engine.clear()
        self._host.clear()
        self._region.cleanup()

    def _moves(
        self, engine: Any, host: Any
    ) -> Iterator[tuple[int, int, Indices, Indices, Indices]]:
        """Yield tensor, bytes, blocks, chunks and places in them, tensor by tensor."""
        block_at = chunk_at = 0
        for refs, count, index in zip(
            self._refs, engine.group_sizes, engine.block_indices, strict=True
        ):
            # A group's first block may lie in the middle of its first chunk.
            at = np.arange(count) + index % self._each
            blocks = np.asarray(engine.block_ids[block_at : block_at + count], np.int64)
            chunks = np.asarray(host.block_ids, np.int64)[chunk_at + at // self._each]
            for ref in refs:
                yield ref.tensor_idx, ref.page_size_bytes, blocks, chunks, at % self._each
            block_at += count
            chunk_at += int(at[-1]) // self._each + 1 if count else 0
