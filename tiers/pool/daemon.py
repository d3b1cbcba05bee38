"""A pool in a process of its own, without Ray: for tests, benchmarks and engines that run no Ray.

The process reads its configuration from the first line of standard input and answers every line
with one line of JSON: the first with its addresses, `stats` with gauges and counts by name, `check`
with an empty object if its books balance. An error of the fabric is answered with its class and its
arguments. The process stops, removing its files, when standard input closes or it gets SIGTERM.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from ...fabric import errors
from ...fabric.clock import SystemClock
from ...fabric.config import PoolConfig, parse
from ...fabric.errors import FabricError, Unavailable
from .process import own_process
from .server import PoolServer
from .sockets import PoolAddresses

START_S = 30.0
"""Reserving a large region's pages takes about a second for each 2 GB."""
STOP_S = 10.0
"""Drains tiers and removes files; past it the process is killed."""
ANSWER_S = 10.0
"""As long as the server itself gives its own thread."""


class PoolProcess:
    """A running pool process, seen from the one that started it.

    Raises what the pool raised when it could not start, and `Unavailable` if it said nothing.
    """

    def __init__(self, config: PoolConfig) -> None:
        self._node = config.node
        package_parent = str(Path(__file__).parents[3])
        path = os.pathsep.join(filter(None, (package_parent, os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvfabric.tiers.pool.daemon"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        try:
            self.addresses = PoolAddresses(**self._ask(config.model_dump_json(), START_S))
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs, or is stopped."""
        return self._process.poll() is None

    def stats(self) -> dict[str, float]:
        """Return the pool's gauges and counts by name, metrics among them."""
        return self._ask("stats", ANSWER_S)

    def check(self) -> None:
        """Raise `Conservation` if the pool's books do not balance."""
        self._ask("check", ANSWER_S)

    def kill(self) -> None:
        """End it with SIGKILL; its files stay."""
        self._process.kill()
        self._process.wait()
        self._close_pipes()

    def stop(self) -> None:
        """Let it drain, remove its files and end. Safe to call twice, and after `kill`."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._close_pipes()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _ask(self, line: str, wait_s: float) -> dict[str, Any]:
        stdin = self._process.stdin
        assert stdin is not None
        with suppress(BrokenPipeError):  # then there is no answer either
            stdin.write(line + "\n")
            stdin.flush()
        answer = _line(self._process, wait_s)
        if not answer:
            raise Unavailable(f"the pool of node {self._node}", wait_s, "See its log.")
        values: dict[str, Any] = json.loads(answer)
        if "error" in values:
            raise getattr(errors, values["error"])(*values["args"])
        return values

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                with suppress(BrokenPipeError):
                    pipe.close()


def _line(process: "subprocess.Popen[str]", wait_s: float) -> str:
    lines: list[str] = []
    assert process.stdout is not None
    stdout = process.stdout
    reader = threading.Thread(target=lambda: lines.append(stdout.readline()), daemon=True)
    reader.start()
    reader.join(wait_s)
    return lines[0].strip() if lines else ""


class _Terminated(Exception):
    """SIGTERM came."""


class _Answers:
    """What the parent reads: standard output, which nobody else may write from now on.

    UCX writes its errors there. They would garble the answers, and block the pool when the pipe is
    full; they go to standard error.
    """

    def __init__(self) -> None:
        self._pipe = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def say(self, values: Mapping[str, Any]) -> None:
        """Write a line."""
        self._pipe.write(json.dumps(values) + "\n")
        self._pipe.flush()

    def say_error(self, error: FabricError) -> None:
        """Write an error as a line."""
        self.say({"error": type(error).__name__, "args": error.args})


def serve(values: Mapping[str, Any], answers: _Answers) -> None:
    """Run a pool until standard input closes or SIGTERM comes, then remove its files and exit."""
    signal.signal(signal.SIGTERM, _terminate)
    own_process()
    server = PoolServer(parse(PoolConfig, values), SystemClock())
    server.start()
    try:
        answers.say(asdict(server.addresses))
        for line in sys.stdin:
            _answer(server, line.strip(), answers)
    except _Terminated:
        pass
    finally:
        server.stop(unlink=True)


def _answer(server: PoolServer, line: str, answers: _Answers) -> None:
    try:
        if line == "check":
            server.check()
        answers.say(server.stats() if line == "stats" else {})
    except FabricError as error:
        answers.say_error(error)


def _terminate(_signal: int, _frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends already
    raise _Terminated


def main() -> None:
    """Read the configuration from the first line of standard input and serve it."""
    code = 0
    answers = _Answers()
    try:
        serve(json.loads(sys.stdin.readline()), answers)
    except _Terminated:
        code = 128 + signal.SIGTERM
    except FabricError as error:
        answers.say_error(error)
        code = 2
    os._exit(code)  # a process that made a UCX agent does not survive an ordinary exit


if __name__ == "__main__":
    main()
