"""A pool in a process of its own, without Ray: for tests, benchmarks and engines that run no Ray.

The process prints one line of JSON with its addresses when it serves, and stops, removing its
files, when its standard input closes or it gets SIGTERM.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from ...fabric.clock import SystemClock
from ...fabric.config import PoolConfig, parse
from ...fabric.errors import FabricError, Unavailable
from .server import PoolServer
from .sockets import PoolAddresses

START_S = 30.0
"""Reserving a large region's pages takes about a second for each 2 GB."""
STOP_S = 10.0
"""Drains tiers and removes files; past it the process is killed."""


class PoolProcess:
    """A running pool process, seen from the one that started it."""

    def __init__(self, config: PoolConfig) -> None:
        package_parent = str(Path(__file__).parents[3])
        path = os.pathsep.join(filter(None, (package_parent, os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvfabric.tiers.pool.daemon"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert self._process.stdin is not None
        self._process.stdin.write(config.model_dump_json() + "\n")
        self._process.stdin.flush()
        line = _first_line(self._process, START_S)
        if not line.startswith("{"):
            self.stop()
            raise Unavailable(f"the pool of node {config.node}", START_S, line or "See its log.")
        self.addresses = PoolAddresses(**json.loads(line))

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

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

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()


def _first_line(process: "subprocess.Popen[str]", wait_s: float) -> str:
    lines: list[str] = []
    assert process.stdout is not None
    stdout = process.stdout
    reader = threading.Thread(target=lambda: lines.append(stdout.readline()), daemon=True)
    reader.start()
    reader.join(wait_s)
    return lines[0].strip() if lines else ""


def serve(values: Mapping[str, Any]) -> None:
    """Run a pool until standard input closes or SIGTERM comes, then remove its files and exit."""
    server = PoolServer(parse(PoolConfig, values), SystemClock())
    server.start()
    signal.signal(signal.SIGTERM, _close_input)
    print(json.dumps(asdict(server.addresses)), flush=True)  # noqa: T201 (the parent reads it)
    while True:
        try:
            if not sys.stdin.readline():
                break
        except ValueError:
            break
    server.stop(unlink=True)


def _close_input(_signal: int, _frame: object) -> None:
    sys.stdin.close()


def main() -> None:
    """Read the configuration from the first line of standard input and serve it."""
    code = 0
    try:
        serve(json.loads(sys.stdin.readline()))
    except FabricError as error:
        print(str(error), flush=True)  # noqa: T201 (the parent reads it)
        code = 2
    sys.stdout.flush()
    os._exit(code)  # a process that made a UCX agent does not survive an ordinary exit


if __name__ == "__main__":
    main()
