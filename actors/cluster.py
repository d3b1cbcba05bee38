"""A Ray cluster of several real raylets on this machine, for demo, tests and benchmarks."""

import contextlib
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.cluster_utils import Cluster

from .folders import Need, own_folder
from .nodes import NODE_LABEL
from .quiet import quiet_ray
from .ray_start import end_all, refusing, told

OBJECT_STORE_BYTES = 80 << 20
"""Ray's minimum is about 75 MB; no KV goes through the object store."""
LOGS_BYTES = 64 << 20
"""A short run writes 2 MB of logs. Object stores lie beside them where shared memory is small."""
SOCKET_PATH_BYTES_MAX = 107
"""Linux' limit for the path of a socket."""
LONGEST_SOCKET = "/ray/session_2026-12-31_23-59-59_999999_4194304/sockets/plasma_store.999"
"""The longest name that Ray gives a socket in a cluster's folder."""
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

    All of Ray's state lies in a folder of the cluster's own. On exit everything is ended and that
    folder is removed. Call `netns.isolate_network` first if the cluster must not listen on the
    host's address, and `quiet.quiet_ray` before Ray is imported if its own messages must stay out
    of the output. Raises `Refused` if the machine does not let Ray come up; nothing is left then.
    """
    quiet_ray()
    logging.getLogger("ray").setLevel(logging.ERROR)
    with own_folder(_need(len(nodes))) as folder:
        cluster = Cluster()
        try:
            with told(folder), refusing(folder):
                raylets = _start(cluster, nodes, folder, namespace)
            with _ended_by_sigterm():
                yield LocalCluster(cluster, raylets)
        finally:
            with told(folder):
                ray.shutdown()
                cluster.shutdown()
            end_all(folder)


def _need(nodes: int) -> Need:
    stores = nodes * OBJECT_STORE_BYTES
    shared = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    room = LOGS_BYTES + (0 if shared > stores else stores)
    return Need("Ray's state", "kvf-", room, SOCKET_PATH_BYTES_MAX - len(LONGEST_SOCKET))


def _start(
    cluster: Cluster, nodes: Sequence[str], folder: str, namespace: str
) -> dict[str, object]:
    raylets: dict[str, object] = {}
    for number, node in enumerate(nodes):
        head: dict[str, Any] = (
            {"_system_config": HEALTH_CHECKS, "temp_dir": f"{folder}/ray"} if number == 0 else {}
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
    return raylets


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
