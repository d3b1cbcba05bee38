"""A Ray cluster of several real raylets on this machine, for demo, tests and benchmarks."""

import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from .nodes import NODE_LABEL
from .quiet import quiet_ray

OBJECT_STORE_BYTES = 80 << 20
"""Ray's minimum is about 75 MB; no KV goes through the object store."""
CPUS_PER_NODE = 8
"""Logical: workers here are small, and the machine's cores are shared anyway."""

HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 3,
}
"""Ray's defaults notice a dead node after 16 s; these after about 2 s (measured)."""


@dataclass(slots=True)
class LocalCluster:
    """A started cluster and the raylet of each node."""

    cluster: Cluster
    raylets: dict[str, object]

    def kill_node(self, node: str) -> None:
        """End a node's raylet with SIGKILL; its workers and its pool die with it."""
        self.cluster.remove_node(self.raylets.pop(node), allow_graceful=False)


@contextlib.contextmanager
def local_cluster(nodes: Sequence[str], namespace: str = "kvfabric") -> Generator[LocalCluster]:
    """Start one raylet per node, the first of them the head, and connect this process.

    On exit everything is ended and the cluster's temporary folder is removed. Call
    `netns.isolate_network` first if the cluster must not listen on the host's address, and
    `quiet.quiet_ray` before Ray is imported if its own messages must stay out of the output.
    """
    quiet_ray()
    logging.getLogger("ray").setLevel(logging.ERROR)
    folder = tempfile.mkdtemp(prefix="kvf-")
    cluster = Cluster()
    raylets: dict[str, object] = {}
    try:
        with _standard_error_aside():
            for number, node in enumerate(nodes):
                head: dict[str, Any] = (
                    {"_system_config": HEALTH_CHECKS, "temp_dir": folder} if number == 0 else {}
                )
                raylets[node] = cluster.add_node(
                    num_cpus=CPUS_PER_NODE,
                    include_dashboard=False,
                    labels={NODE_LABEL: node},
                    object_store_memory=OBJECT_STORE_BYTES,
                    **head,
                )
            ray.init(
                address=cluster.address,
                namespace=namespace,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        with _ended_by_sigterm():
            yield LocalCluster(cluster, raylets)
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(Path(folder), ignore_errors=True)


@contextlib.contextmanager
def _ended_by_sigterm() -> Generator[None]:
    """Let SIGTERM end this process the ordinary way, past every `finally`.

    After `ray.init` it would abort the process, with a dump of its stack. The exit code is 143, or
    the 1 that Ray makes of it when the signal finds it waiting.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


@contextlib.contextmanager
def _standard_error_aside() -> Generator[None]:
    """Keep what is written to descriptor 2 apart, and show it only if the start fails.

    Ray's C++ part warns there of every address that it cannot reach, before it knows its log level.
    """
    sys.stderr.flush()
    with tempfile.TemporaryFile() as aside:
        kept = os.dup(2)
        os.dup2(aside.fileno(), 2)
        try:
            yield
        except BaseException:
            aside.seek(0)
            os.write(kept, aside.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)
