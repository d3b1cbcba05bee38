"""The demo: a local cluster of two raylets, a fabric on it, a workload played, all of it shown."""

import contextlib
import os
import signal
import threading
from collections.abc import Generator
from pathlib import Path

import ray
from rich.console import Console
from rich.live import Live

from ...fabric.clock import Clock
from ...fabric.errors import ConfigError
from ...tiers.pool.sweep import sweep
from ..cluster import LocalCluster, local_cluster
from ..fabric import Fabric
from ..folders import Need, own_folder
from .crew import REQUEST_S
from .options import DECODE_NODE, PREFILL_NODE, DemoOptions, longest_request
from .player import Player, Strike
from .tally import Tally
from .view import View

FILES = Need("the file tier", "kvf-files-", 64 << 20)
"""What the default run's files take; a disk that fills up later only stops the tier's stores."""
STATS_PERIOD_S = 0.5
KILL_POOL_AT, KILL_NODE_AT = 0.33, 0.66
"""Shares of the requests after which `--kill` strikes."""
KILL_REQUESTS_MIN = 2
"""A strike comes after a request, and one must be left that feels it."""


def run(options: DemoOptions, console: Console, clock: Clock) -> Tally:
    """Start everything, play, end everything. Raises `FabricError` for input that cannot be."""
    settings = options.settings(longest_request(options.workload()))
    if options.kill and sum(1 for _ in options.workload().requests()) < KILL_REQUESTS_MIN:
        raise ConfigError("kill", "1 request leaves none for afterwards", "Play more")
    name = f"demo-{os.getpid()}"
    with own_folder(FILES) as folder:
        pools = options.pools(name, settings, Path(folder))
        try:
            console.print(f"starting two raylets, {PREFILL_NODE} and {DECODE_NODE}")
            with local_cluster((PREFILL_NODE, DECODE_NODE)) as cluster:
                console.print("starting a pool on each, a router, and the workers")
                fabric = Fabric.start(pools)
                try:
                    with Player(options, settings, fabric, clock) as player:
                        player.ready()
                        return _play(player, fabric, cluster, console)
                finally:
                    fabric.shutdown()
        finally:
            # A pool whose node was killed leaves its files behind.
            sweep(pools[0].host.directory, name)


def _play(player: Player, fabric: Fabric, cluster: LocalCluster, console: Console) -> Tally:
    options = player.options
    total = sum(1 for _ in options.workload().requests())
    view = View(total, options.roles(), player.tally)
    strikes = _strikes(total, view, fabric, cluster) if options.kill else []
    with watching(view, fabric, console):
        return player.play(strikes)


def _strikes(total: int, view: View, fabric: Fabric, cluster: LocalCluster) -> list[Strike]:
    def kill_pool() -> None:
        pid = ray.get(fabric.pool(PREFILL_NODE).pid.remote(), timeout=REQUEST_S)
        os.kill(pid, signal.SIGKILL)
        view.tally.fault("pool killed")
        view.tell(f"killed the pool of {PREFILL_NODE} (process {pid}); Ray starts it again")

    def kill_node() -> None:
        cluster.kill_node(DECODE_NODE)
        view.tally.fault("node killed")
        view.tell(f"killed the raylet of {DECODE_NODE}; its workers and pool are gone")

    return [(int(total * KILL_POOL_AT), kill_pool), (int(total * KILL_NODE_AT), kill_node)]


@contextlib.contextmanager
def watching(view: View, fabric: Fabric, console: Console) -> Generator[None]:
    """Show the live view, and ask the pools for their numbers, off the requests' path."""
    stop = threading.Event()

    def ask() -> None:
        while not stop.wait(STATS_PERIOD_S):
            view.pools = fabric.stats()

    thread = threading.Thread(target=ask, name="kvfabric-watch", daemon=True)
    thread.start()
    try:
        with Live(view, console=console, refresh_per_second=4, transient=True):
            yield
    finally:
        stop.set()
        thread.join()
