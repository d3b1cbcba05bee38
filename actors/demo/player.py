"""Plays a workload over workers that share one KV cache, beside an engine without the fabric.

Each request: the router says which prefill worker runs it and from whom it pulls; the prefill
worker loads what the fabric has and computes the rest; a decode worker pulls the prompt's KV and
generates; a plain engine computes the same request from nothing. Tokens must be equal.

Failure. A worker that dies is struck off and its request runs elsewhere; a worker that hangs, and
a request that nobody can run, end the run with `Unavailable`.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Self

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from ...fabric.clock import Clock
from ...fabric.errors import Unavailable
from ...fabric.types import ChunkKey, SourceRange
from ..engines.reference import EngineSettings, Generated
from ..fabric import Fabric, end_actor
from ..worker import WorkerActor
from .crew import REQUEST_S, Crew, Lost, Worker, answered, hire
from .options import DemoOptions
from .planner import Planner
from .tally import Served, Tally
from .workload import Conversations, Request

TRIES_MAX = 4
"""Workers tried for one step of a request: every worker of a small run, once."""

Strike = tuple[int, Callable[[], None]]
"""After how many requests something is done to the cluster, and what."""


class Player:
    """One run on a started fabric. Use it as a context."""

    def __init__(
        self, options: DemoOptions, settings: EngineSettings, fabric: Fabric, clock: Clock
    ) -> None:
        self.options = options
        self.tally = Tally()
        self._lock = threading.Lock()
        prefill = hire(fabric, settings, options.prefill_nodes, options.prefill_workers, "prefill")
        decode = hire(fabric, settings, options.decode_nodes, options.decode_workers, "decode")
        self._prefillers = Crew(prefill, self._lock)
        self._decoders = Crew(decode, self._lock)
        self._plain: Worker = WorkerActor.options(
            label_selector=fabric.place(options.prefill_nodes[0])
        ).remote(settings, None)
        self._planner = Planner(fabric, settings, clock)

    def ready(self) -> None:
        """Wait until every model is built. Raises `Unavailable`."""
        try:
            ray.get([worker.ready.remote() for worker in self._everyone()], timeout=REQUEST_S)
        except (GetTimeoutError, RayActorError) as error:
            remedy = f"See Ray's logs, and whether the nodes have free CPUs for it: {error}"
            raise Unavailable("a worker", REQUEST_S, remedy) from error

    def play(self, strikes: Sequence[Strike] = ()) -> Tally:
        """Play all requests and return what came of them."""
        lanes = 1 if self.options.trace else max(self.options.prefill_workers, 1)
        conversations = Conversations()
        running: dict[Future[Served], Request] = {}
        coming = list(strikes)
        with ThreadPoolExecutor(lanes, thread_name_prefix="kvfabric-lane") as pool:
            waiting = list(self.options.workload().requests())
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
                    self.tally.add(served)
                    while coming and len(self.tally.served) >= coming[0][0]:
                        coming.pop(0)[1]()
        return self.tally

    def close(self) -> None:
        """End the workers; the fabric stays."""
        for worker in self._everyone():
            end_actor(worker)

    def __enter__(self) -> Self:
        self._planner.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._planner.__exit__()
        self.close()

    def _everyone(self) -> list[Worker]:
        members = [*self._prefillers.members.values(), *self._decoders.members.values()]
        return [*(member.actor for member in members), self._plain]

    def _serve(self, request: Request, prompt: Sequence[int]) -> Served:
        outputs = max(1, min(request.output_tokens, self.options.output_tokens_max))
        plain = self._plain.compute.remote(prompt, outputs)
        keys = self._planner.keys(prompt)
        prefill, prefill_node, failed = self._prefill(keys, prompt)
        handoff = self._planner.handoff(prefill_node, len(keys))
        decode, decode_node, failed_too = self._decode(prompt, outputs, handoff)
        return Served(
            request.request_id,
            request.turn,
            prefill,
            decode,
            answered(plain, "without the fabric"),
            prefill_node,
            decode_node,
            failed + failed_too,
        )

    def _prefill(
        self, keys: Sequence[ChunkKey], prompt: Sequence[int]
    ) -> tuple[Generated, str, int]:
        """Run the prefill where the router says, and elsewhere if that worker dies."""
        for tried in range(TRIES_MAX):
            with self._lock:
                crew = self._crew(self._prefillers)
                plan = self._planner.plan(keys, len(prompt), crew.candidates())
            done = crew.ask(plan.worker, prompt, 1, plan.sources)
            if isinstance(done, Generated):
                self._planner.settle(plan)
                return done, plan.node, tried
            self._planner.cancel(plan)
            self._note(done)
        raise Unavailable("every prefill worker", REQUEST_S, "See Ray's logs.")

    def _decode(
        self, prompt: Sequence[int], outputs: int, sources: Sequence[SourceRange]
    ) -> tuple[Generated, str, int]:
        """Decode on the least busy worker, and elsewhere if it dies."""
        for tried in range(TRIES_MAX):
            with self._lock:
                crew = self._crew(self._decoders)
                name = crew.least_busy()
                node = crew.members[name].node if name else ""
            done = crew.ask(name, prompt, outputs, sources)
            if isinstance(done, Generated):
                return done, node, tried
            self._note(done)
        raise Unavailable("every decode worker", REQUEST_S, "See Ray's logs.")

    def _crew(self, wanted: Crew) -> Crew:
        """Return a crew, or the other one if all of it is gone."""
        other = self._decoders if wanted is self._prefillers else self._prefillers
        return wanted if wanted.members else other

    def _note(self, lost: Lost) -> None:
        if lost is Lost.DEAD:
            with self._lock:
                self.tally.fault("worker died")
