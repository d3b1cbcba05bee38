"""The Ray actor around a reference engine. A shell: everything is in `engines.reference`."""

import os
from collections.abc import Sequence

import ray

from ..fabric.clock import SystemClock
from ..fabric.types import SourceRange
from .engines.reference import EngineSettings, Generated, ReferenceWorker


class WorkerShell:
    """Prefills, decodes, or both. `pool_endpoint` is that of its own node's pool, or None."""

    def __init__(self, settings: EngineSettings, pool_endpoint: str | None) -> None:
        self._worker = ReferenceWorker(settings, pool_endpoint, SystemClock())

    @ray.method
    def ready(self) -> int:
        """Return the process id once the model is built."""
        return os.getpid()

    @ray.method
    def generate(
        self, tokens: Sequence[int], output_tokens: int, sources: Sequence[SourceRange]
    ) -> Generated:
        """Return greedy tokens after the prompt, reusing what the fabric has."""
        return self._worker.generate(tokens, output_tokens, sources)

    @ray.method
    def compute(self, tokens: Sequence[int], output_tokens: int) -> Generated:
        """Return greedy tokens after the prompt, computing everything."""
        return self._worker.generate(tokens, output_tokens, fabric=False)


WorkerActor = ray.remote(num_cpus=0.5, max_restarts=0)(WorkerShell)
"""Half a CPU: it computes in one thread, and one kind of worker waits while the other computes. So
a prefill, a decode and a plain worker fit a node of two cores."""
