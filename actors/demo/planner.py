"""The demo's router: a replica in this process, fed by the router actor, asked without any call."""

import threading
from collections.abc import Sequence
from typing import Any, Self

import zmq

from ...fabric.clock import Clock
from ...fabric.keys import BlockHasher, HashAlgorithm, low64
from ...fabric.types import ChunkKey, SourceRange, key_digest
from ...router.delta_socket import ReplicaSocket
from ...router.ingest import SourceEndpoints
from ...router.plan import Candidate, Plan, Prompt
from ...router.replica import Replica
from ..engines.reference import EngineSettings
from ..fabric import Fabric
from .options import chunk_bytes

POLL_MS = 20
"""How old a replica's knowledge may be, beside the event's own way."""


class Planner:
    """Decides where a request runs and from whom it pulls."""

    def __init__(self, fabric: Fabric, settings: EngineSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._hasher = BlockHasher(HashAlgorithm.SHA256_CBOR, None, settings.block_tokens)
        self._pools = {node: fabric.addresses(node).peer for node in fabric.nodes}
        router = fabric.router()
        self._context: zmq.Context[Any] = zmq.Context()
        self.replica = Replica()
        self._socket = ReplicaSocket(
            self._context, self.replica, SourceEndpoints(router.publish, router.replay), clock
        )
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="kvfabric-replica", daemon=True)

    def keys(self, prompt: Sequence[int]) -> list[ChunkKey]:
        """Return the keys of the prompt's full chunks."""
        return self._hasher.chunk_keys(prompt, self._settings.chunk_tokens, 0)

    def plan(self, keys: Sequence[ChunkKey], tokens: int, workers: Sequence[Candidate]) -> Plan:
        """Choose a worker and its sources. Raises `Unavailable` if there is none."""
        with self._lock:
            return self.replica.decider.decide(
                self._prompt(keys, tokens), workers, self._clock.now_s()
            )

    def settle(self, plan: Plan) -> None:
        """The request has run."""
        with self._lock:
            self.replica.decider.settle(plan.reservation)

    def cancel(self, plan: Plan) -> None:
        """The request will not run there after all: take back what was promised."""
        with self._lock:
            self.replica.decider.cancel(plan.reservation)

    def handoff(self, prefill_node: str, chunks: int) -> tuple[SourceRange, ...]:
        """Say from whom a decode worker pulls what was prefilled a moment ago.

        The prefill node has all of it, even where its events are still on their way.
        """
        return (SourceRange(prefill_node, self._pools[prefill_node], 0, chunks),)

    def _prompt(self, keys: Sequence[ChunkKey], tokens: int) -> Prompt:
        hashes = low64([key_digest(key) for key in keys])
        return Prompt(hashes, tokens, self._settings.chunk_tokens, chunk_bytes(self._settings))

    def _follow(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                self._socket.poll(0)
            self._stop.wait(POLL_MS / 1000)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._socket.close()
        self._context.term()
