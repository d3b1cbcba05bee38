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
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import ray
from ray.actor import ActorProxy
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from rich.console import Console
from rich.live import Live

from ...fabric.clock import Clock
from ...fabric.errors import Unavailable
from ...fabric.types import ChunkKey, SourceRange
from ...router.plan import Candidate
from ...tiers.pool.sweep import sweep
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
    """The workers of a node by name, and how many requests each of them has now."""

    node: str
    workers: dict[str, Worker]
    running: Counter[str] = field(default_factory=Counter[str])

    def candidates(self) -> list[Candidate]:
        """Return the workers as the router sees them."""
        return [Candidate(name, self.node) for name in self.workers]

    def least_busy(self) -> str | None:
        """Return the worker with the fewest requests; None if all are gone."""
        return min(self.workers, key=lambda name: (self.running[name], name), default=None)


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
        everyone = [w for crew in self.crews.values() for w in crew.workers.values()]
        everyone.append(self.plain)
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
        workers = {f"{node}/{n}": remote.remote(settings, endpoint) for n in range(count)}
        return Crew(node, workers)

    def _serve(self, request: Request, prompt: Sequence[int]) -> Served:
        outputs = max(1, min(request.output_tokens, self.options.output_tokens_max))
        plain = self.plain.compute.remote(prompt, outputs)
        retries = 0
        keys = self.planner.keys(prompt)
        prefill, prefill_node, failed = self._prefill(keys, prompt)
        retries += failed
        handoff = self.planner.handoff(prefill_node, len(keys))
        decode, decode_node, failed = self._decode(prompt, outputs, handoff)
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

    def _prefill(
        self, keys: Sequence[ChunkKey], prompt: Sequence[int]
    ) -> tuple[Generated, str, int]:
        """Run the prefill where the router says, and elsewhere if that worker dies."""
        for tried in range(TRIES_MAX):
            with self.lock:
                crew = self._crew(PREFILL_NODE)
                plan = self.planner.plan(keys, len(prompt), crew.candidates())
            try:
                done = self._ask(crew, plan.worker, prompt, 1, plan.sources)
            finally:
                self.planner.settle(plan)
            if done is not None:
                return done, crew.node, tried
        raise Unavailable("every prefill worker", REQUEST_S, "See Ray's logs.")

    def _decode(
        self, prompt: Sequence[int], outputs: int, sources: Sequence[SourceRange]
    ) -> tuple[Generated, str, int]:
        """Decode on the least busy worker, and elsewhere if it dies."""
        for tried in range(TRIES_MAX):
            with self.lock:
                crew = self._crew(DECODE_NODE)
                name = crew.least_busy()
            done = self._ask(crew, name or "", prompt, outputs, sources)
            if done is not None:
                return done, crew.node, tried
        raise Unavailable("every decode worker", REQUEST_S, "See Ray's logs.")

    def _crew(self, node: str) -> Crew:
        """Return the crew of a node, or the other one if it is gone."""
        other = DECODE_NODE if node == PREFILL_NODE else PREFILL_NODE
        return self.crews[node] if self.crews[node].workers else self.crews[other]

    def _ask(
        self,
        crew: Crew,
        name: str,
        prompt: Sequence[int],
        outputs: int,
        sources: Sequence[SourceRange],
    ) -> Generated | None:
        """Let a worker generate. None, and the worker is struck off, if it is dead."""
        worker = crew.workers.get(name)
        if worker is None:
            return None
        with self.lock:
            crew.running[name] += 1
        try:
            answer = worker.generate.remote(prompt, outputs, tuple(sources))
            return ray.get(answer, timeout=REQUEST_S)
        except (RayActorError, RayTaskError) as error:
            with self.lock:
                crew.workers.pop(name, None)
                self.view.tally.fault(type(error).__name__)
            return None
        finally:
            with self.lock:
                crew.running[name] -= 1

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
