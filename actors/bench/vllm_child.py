"""A vLLM engine that does as told, for `vllm_engines`: options as a line of JSON, then commands.

Each line is answered with one line of JSON. The engine ends when standard input closes.

Unless its core is to live apart, the scheduler runs in this process and the worker in one of its
own, as vLLM has it with several ranks and for a server on a CPU. Then every call that the scheduler
makes to its connector is timed: what a hook takes is what the engine's loop stands still for.
"""
# pyright: reportMissingImports=false

import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...fabric.clock import Clock, SystemClock
from ...fabric.errors import Unavailable

LOOKUP = "get_num_new_matched_tokens"
SETTLE_S = 20.0
"""For what an engine still does after its last answer, such as writing files."""
SETTLE_LOOK_S = 0.005
FIRST_TOKEN, LAST_TOKEN = 10, 500


class Stopwatch:
    """Times all public methods of a scheduler's connector; a call inside another counts once."""

    def __init__(self, connector: Any, clock: Clock) -> None:
        self._clock = clock
        self._inside = False
        self._asked: set[str] = set()
        self.hooks: dict[str, list[float]] = {}
        """Seconds of each call, by the method's name."""
        self.lookups: list[float] = []
        """Seconds of each lookup that was a request's first, or that was an answer."""
        for name, _ in inspect.getmembers(type(connector), inspect.isfunction):
            if not name.startswith("_"):
                setattr(connector, name, self._timed(name, getattr(connector, name)))

    def take(self) -> dict[str, Any]:
        """Return what was timed since the last call."""
        taken = {"hooks": self.hooks, "lookups": self.lookups}
        self.hooks, self.lookups = {}, []
        self._asked.clear()
        return taken

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            if self._inside:
                return method(*args, **named)
            self._inside = True
            begun_s = self._clock.now_s()
            try:
                answer = method(*args, **named)
            finally:
                seconds = self._clock.now_s() - begun_s
                self._inside = False
                self.hooks.setdefault(name, []).append(seconds)
            if name == LOOKUP:
                self._count_lookup(args[0].request_id, seconds, again=answer[0] is None)
            return answer

        return call

    def _count_lookup(self, request_id: str, seconds: float, *, again: bool) -> None:
        if not again or request_id not in self._asked:
            self.lookups.append(seconds)
        self._asked.add(request_id)


class BenchEngine:
    """The engine and its stopwatch."""

    def __init__(self, options: Mapping[str, Any], clock: Clock) -> None:
        from vllm.entrypoints.llm import LLM

        self._clock = clock
        apart = options["core_apart"]
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(apart))
        self._llm: Any = LLM(**options["engine"], distributed_executor_backend="mp")
        self._watch: Stopwatch | None = None
        if not apart and self._scheduler.connector is not None:
            self._watch = Stopwatch(self._scheduler.connector, clock)

    def generate(
        self, number: int, length: int, tokens: int, transfer: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Answer the prompt of this number; see `vllm_engines.Life`."""
        prompt, params = self._request(number, length, tokens, transfer)
        self._take()
        begun_s = self._clock.now_s()
        (output,) = self._llm.generate([prompt], params, use_tqdm=False)
        seconds = self._clock.now_s() - begun_s
        return {"seconds": seconds, "cached": output.num_cached_tokens or 0, **self._take()}

    def glance(self, number: int, length: int) -> dict[str, Any]:
        """Let the scheduler look at a prompt once, and abort it."""
        prompt, params = self._request(number, length, 1, None)
        self._take()
        name = f"glance-{number}"
        engine = self._llm.llm_engine
        engine.add_request(name, prompt, params)
        engine.step()
        engine.abort_request([name])
        self.settle()
        return {"seconds": 0.0, "cached": 0, **self._take()}

    def settle(self) -> dict[str, Any]:
        """Step until nothing is left to do, at the pace of an engine that has other requests."""
        deadline_s = self._clock.now_s() + SETTLE_S
        while self._scheduler.has_requests():
            if self._clock.now_s() > deadline_s:
                raise Unavailable("vLLM's scheduler", SETTLE_S, "Its transfers do not end.")
            self._llm.llm_engine.step()
            self._clock.sleep_s(SETTLE_LOOK_S)
        return {}

    def forget(self) -> dict[str, Any]:
        """Empty the engine's own cache, and leave the connector's."""
        return {"done": bool(self._llm.reset_prefix_cache())}

    def close(self) -> None:
        """End the engine."""
        self._llm.llm_engine.engine_core.shutdown()

    @property
    def _scheduler(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core.scheduler

    def _take(self) -> dict[str, Any]:
        return self._watch.take() if self._watch else {"hooks": {}, "lookups": []}

    def _request(
        self, number: int, length: int, tokens: int, transfer: Mapping[str, Any] | None
    ) -> tuple[Any, Any]:
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import SamplingParams

        drawn = np.random.default_rng(number).integers(FIRST_TOKEN, LAST_TOKEN, length)
        params = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": dict(transfer)} if transfer else None,
        )
        return TokensPrompt(prompt_token_ids=drawn.tolist()), params


def main() -> None:
    """Answer until standard input closes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM and UCX write where they like

    def say(what: Mapping[str, Any]) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    engine = BenchEngine(json.loads(sys.stdin.readline()), SystemClock())
    try:
        say({})
        while line := sys.stdin.readline():
            command: dict[str, Any] = json.loads(line)
            say(getattr(engine, command.pop("do"))(**command))
    finally:
        engine.close()


if __name__ == "__main__":
    main()
