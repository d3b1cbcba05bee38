"""Plays a workload on two nodes that share one KV cache, beside an engine without the fabric.

Each request: the router says which prefill worker runs it and from whom it pulls; the prefill
worker loads what the fabric has and computes the rest; a decode worker on the other node pulls the
prompt's KV and generates; a plain engine computes the same request from nothing. Tokens must be
equal.
"""

import contextlib
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.actor import ActorProxy
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from rich.console import Console
from rich.live import Live

from ...fabric.clock import Clock
from ...fabric.errors import Unavailable
from ...fabric.types import SourceRange
from ...tiers.pool.region import sweep
from ..cluster import NODE_LABEL, LocalCluster, local_cluster
from ..engines.reference import EngineSettings, Generated
from ..fabric import Fabric
from ..worker import WorkerActor, WorkerShell
from .options import DECODE_NODE, PREFILL_NODE, DemoOptions, longest_request
from .planner import Planner
from .tally import Served, Tally
from .view import View
from .workload import Conversations, Request

REQUEST_S = 60.0
"""A request that takes longer has hung, and the demo fails; the longest takes about 3 s."""
TRIES_MAX = 4
"""Workers tried for one step of a request: every worker of a small demo, once."""
STATS_PERIOD_S = 0.5
KILL_POOL_AT, KILL_NODE_AT = 0.33, 0.66
"""Shares of the requests after which `--kill` strikes."""

Worker = ActorProxy[WorkerShell]


@dataclass(slots=True)
class Crew:
    """The workers of a node, and which of them are still there."""

    node: str
    workers: list[Worker]
    turn: int = 0

    def next(self) -> Worker | None:
        """Return the next worker in turn; None if all are gone."""
        if not self.workers:
            return None
        self.turn += 1
        return self.workers[self.turn % len(self.workers)]

    def lose(self, worker: Worker) -> None:
        """A worker is dead."""
        if worker in self.workers:
            self.workers.remove(worker)


class Demo:
    """One run on a started cluster."""

    def __init__(
        self,
        options: DemoOptions,
        settings: EngineSettings,
        fabric: Fabric,
        cluster: LocalCluster,
        clock: Clock,
    ) -> None:
        self.options = options
        self.fabric = fabric
        self.cluster = cluster
        self.clock = clock
        self.workload = options.workload()
        self.total = sum(1 for _ in self.workload.requests())
        self.crews = {
            PREFILL_NODE: self._hire(PREFILL_NODE, options.prefill_workers, settings),
            DECODE_NODE: self._hire(DECODE_NODE, options.decode_workers, settings),
        }
        self.plain = WorkerActor.options(label_selector={NODE_LABEL: PREFILL_NODE}).remote(
            settings, None
        )
        self.planner = Planner(fabric, settings, clock)
        roles = {
            PREFILL_NODE: f"{options.prefill_workers} prefill",
            DECODE_NODE: f"{options.decode_workers} decode",
        }
        self.view = View(self.total, roles)
        self.lock = threading.Lock()

    def ready(self) -> None:
        """Wait until every model is built. Raises `Unavailable`."""
        everyone = [w for crew in self.crews.values() for w in crew.workers] + [self.plain]
        try:
            ray.get([worker.ready.remote() for worker in everyone], timeout=REQUEST_S)
        except GetTimeoutError as error:
            raise Unavailable("a worker", REQUEST_S, "The machine is overloaded.") from error

    def play(self) -> Tally:
        """Play all requests and return what came of them."""
        lanes = 1 if self.options.trace else max(self.options.prefill_workers, 1)
        conversations = Conversations()
        running: dict[Future[Served], Request] = {}
        strikes = self._strikes()
        with ThreadPoolExecutor(lanes, thread_name_prefix="kvfabric-lane") as pool:
            waiting = list(self.workload.requests())
            while waiting or running:
                busy = {request.conversation for request in running.values()}
                ready = next((r for r in waiting if r.conversation not in busy), None)
                if ready is not None and len(running) < lanes:
                    waiting.remove(ready)
                    prompt = conversations.next_prompt(ready)
                    running[pool.submit(self._serve, ready, prompt)] = ready
                    continue
                done, _ = wait(running, timeout=REQUEST_S * 2, return_when=FIRST_COMPLETED)
                for future in done:
                    request = running.pop(future)
                    served = future.result()
                    conversations.answer(request, served.decode.tokens)
                    self.view.tally.add(served)
                    while strikes and len(self.view.tally.served) >= strikes[0][0]:
                        strikes.pop(0)[1]()
        return self.view.tally

    def _hire(self, node: str, count: int, settings: EngineSettings) -> Crew:
        endpoint = self.fabric.addresses(node).client
        remote = WorkerActor.options(label_selector={NODE_LABEL: node})
        return Crew(node, [remote.remote(settings, endpoint) for _ in range(count)])

    def _serve(self, request: Request, prompt: Sequence[int]) -> Served:
        outputs = max(1, min(request.output_tokens, self.options.output_tokens_max))
        plain = self.plain.compute.remote(prompt, outputs)
        retries = 0
        keys = self.planner.keys(prompt)
        plan = self.planner.plan(keys, self.crews[PREFILL_NODE].node)
        prefill, prefill_node, failed = self._run(PREFILL_NODE, prompt, 1, plan)
        retries += failed
        handoff = self.planner.handoff(prefill_node, len(keys))
        decode, decode_node, failed = self._run(DECODE_NODE, prompt, outputs, handoff)
        retries += failed
        expected = ray.get(plain, timeout=REQUEST_S)
        return Served(
            request.request_id,
            request.turn,
            prefill,
            decode,
            expected,
            prefill_node,
            decode_node,
            retries,
        )

    def _run(
        self, node: str, prompt: Sequence[int], outputs: int, sources: Sequence[SourceRange]
    ) -> tuple[Generated, str, int]:
        """Run a step on a worker of `node`, or on whoever is left."""
        other = DECODE_NODE if node == PREFILL_NODE else PREFILL_NODE
        for tried in range(TRIES_MAX):
            crew = self.crews[node]
            with self.lock:
                worker = crew.next()
                if worker is None:
                    crew = self.crews[other]
                    worker = crew.next()
            if worker is None:
                break
            try:
                answer = worker.generate.remote(prompt, outputs, tuple(sources))
                return ray.get(answer, timeout=REQUEST_S), crew.node, tried
            except (RayActorError, RayTaskError) as error:
                with self.lock:
                    crew.lose(worker)
                    self.view.tally.fault(type(error).__name__)
        raise Unavailable("every worker", REQUEST_S, "All are dead; see Ray's logs.")

    def _strikes(self) -> list[tuple[int, Callable[[], None]]]:
        if not self.options.kill:
            return []
        return [
            (int(self.total * KILL_POOL_AT), self._kill_pool),
            (int(self.total * KILL_NODE_AT), self._kill_node),
        ]

    def _kill_pool(self) -> None:
        pid = ray.get(self.fabric.pool(PREFILL_NODE).pid.remote(), timeout=REQUEST_S)
        os.kill(pid, signal.SIGKILL)
        self.view.tally.fault("pool killed")
        self.view.tell(f"killed the pool of {PREFILL_NODE} (process {pid}); Ray starts it again")

    def _kill_node(self) -> None:
        self.cluster.kill_node(DECODE_NODE)
        self.view.tally.fault("node killed")
        self.view.tell(f"killed the raylet of {DECODE_NODE}; its workers and pool are gone")


@contextlib.contextmanager
def watching(demo: Demo, console: Console) -> Generator[None]:
    """Show the live view, and ask the pools for their numbers, off the requests' path."""
    stop = threading.Event()

    def ask() -> None:
        while not stop.wait(STATS_PERIOD_S):
            demo.view.pools = demo.fabric.stats()

    thread = threading.Thread(target=ask, name="kvfabric-watch", daemon=True)
    thread.start()
    try:
        with Live(demo.view, console=console, refresh_per_second=4, transient=True):
            yield
    finally:
        stop.set()
        thread.join()


def run(options: DemoOptions, console: Console, clock: Clock) -> Tally:
    """Start everything, play, end everything. Raises `FabricError` for input that cannot be."""
    settings = options.settings(longest_request(options.workload()))
    name = f"demo-{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="kvf-files-") as folder:
        pools = options.pools(name, Path(folder), settings)
        try:
            console.print(f"starting two raylets, {PREFILL_NODE} and {DECODE_NODE}")
            with local_cluster((PREFILL_NODE, DECODE_NODE)) as cluster:
                console.print("starting a pool on each, a router, and the workers")
                fabric = Fabric.start(pools)
                try:
                    demo = Demo(options, settings, fabric, cluster, clock)
                    demo.ready()
                    with demo.planner, watching(demo, console):
                        return demo.play()
                finally:
                    fabric.shutdown()
        finally:
            # A pool whose node was killed leaves its files behind.
            sweep(pools[0].host.directory, name)
