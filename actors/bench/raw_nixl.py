"""Raw NIXL READs between two processes, as a reference: no lease, no directory, no checksum."""

import os
import subprocess
import sys
from pathlib import Path

from ...fabric.errors import Unavailable


class RawReads:
    """A target and a reader, ready to read `chunks` chunks of `chunk_bytes` again and again."""

    def __init__(self, chunks: int, chunk_bytes: int) -> None:
        arguments = [str(chunks), str(chunk_bytes)]
        self._target = _start("target", arguments)
        self._reader = _start("reader", arguments)
        assert self._target.stdout is not None
        _tell(self._reader, self._target.stdout.readline())
        self._answer()

    def read_s(self) -> float:
        """Read everything once; return the seconds."""
        _tell(self._target, "begin\n")
        _tell(self._reader, "go\n")
        seconds = float(self._answer())
        _tell(self._target, "end\n")
        return seconds

    def close(self) -> None:
        """End both processes."""
        for process in (self._reader, self._target):
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            process.wait(timeout=10)
            process.stdout.close()

    def _answer(self) -> str:
        assert self._reader.stdout is not None
        line = self._reader.stdout.readline()
        if not line:
            raise Unavailable("the raw NIXL reader", 0.0, "See its messages above.")
        return line


def _tell(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line)
    process.stdin.flush()


def _start(role: str, arguments: list[str]) -> "subprocess.Popen[str]":
    parent = str(Path(__file__).parents[3])
    path = os.pathsep.join(filter(None, (parent, os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-m", "kvfabric.actors.bench.raw_process", role, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
