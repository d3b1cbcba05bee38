"""What surrounds the start of Ray's processes: what they are told, and why they did not come up.

Everything that Ray notes for later lies in a folder of its own, the address of its newest cluster
included: in the folder of all users that note would replace the one of a cluster that somebody else
runs, and on a machine where Ray never ran, that folder does not even exist.
"""

import contextlib
import os
import select
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO

from ..fabric.errors import Refused

FOREIGN = ("RAY_ADDRESS", "RAY_REDIS_ADDRESS", "RAY_GCS_SERVER_PORT")
"""What leads to another cluster, or takes its port."""
LOG_BYTES_MAX = 1 << 16
"""Of the end of each log that is searched; a start writes a few KB."""
KILLED_S = 5.0
"""A killed process is gone within milliseconds, unless the system itself is stuck."""
SAID_CHARACTERS_MAX = 2000
"""Of Ray's own words in a traceback."""

PORT = (
    "Free some ports, or widen their range (sysctl net.ipv4.ip_local_port_range): Ray takes about "
    "20, and more for each worker."
)
TROUBLES = {
    "Address already in use": PORT,
    "Cannot assign requested address": "Bring the network's loopback up (ip link set lo up).",
    "No space left on device": "Free some of the disk, or let TMPDIR name another place.",
    "Too many open files": "Raise the limit (ulimit -n).",
    "Cannot allocate memory": "Free some memory.",
    "Resource temporarily unavailable": "Raise the limit of processes (ulimit -u).",
}
"""The system's own words, as they come up in Ray's logs, and what helps."""
REMEDY = "Try again when the machine is less busy; --debug shows what Ray said."


@contextlib.contextmanager
def told(folder: str) -> Generator[None]:
    """Let Ray keep everything in `folder`, and know of no other cluster."""
    before = {name: os.environ.pop(name, None) for name in (*FOREIGN, "RAY_TMPDIR")}
    os.environ["RAY_TMPDIR"] = folder
    try:
        yield
    finally:
        del os.environ["RAY_TMPDIR"]
        os.environ.update({name: value for name, value in before.items() if value is not None})


@contextlib.contextmanager
def refusing(folder: str) -> Generator[None]:
    """Turn whatever Ray raises at its start into `Refused`, which says why as far as logs tell.

    What Ray writes to descriptor 2 meanwhile is kept apart, and becomes a note of that error: its
    C++ part warns there of every address that it cannot reach, before it knows its log level.
    """
    with _standard_error_aside() as aside:
        try:
            yield
        except Exception as error:  # Ray raises bare ones too
            problem, remedy = why(Path(folder))
            refused = Refused("Ray", problem or f"it did not come up: {first_line(error)}", remedy)
            aside.seek(0)
            said = aside.read().decode(errors="replace")[-SAID_CHARACTERS_MAX:]
            refused.add_note(f"Ray said:\n{said or 'nothing'}")
            raise refused from error


def why(folder: Path) -> tuple[str, str]:
    """Return the trouble that Ray's logs tell of, and its remedy; the former may be empty."""
    for log in sorted(folder.glob("ray/session_latest/logs/*")):
        words = _end_of(log)
        for trouble, remedy in TROUBLES.items():
            if trouble in words:
                return f"it did not come up: {trouble.lower()} ({log.name})", remedy
    return "", REMEDY


def first_line(error: BaseException) -> str:
    """Return an error's first line; its class if it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def end_all(folder: str) -> None:
    """Kill what still runs of the cluster in `folder`: a start that failed halfway forgets it."""
    needle = f"RAY_TMPDIR={folder}\0".encode()
    for process in Path("/proc").glob("[0-9]*"):
        pid = int(process.name)
        with contextlib.suppress(OSError):  # it ended, or belongs to somebody else
            if pid != os.getpid() and needle in (process / "environ").read_bytes():
                _kill(pid)


def _kill(pid: int) -> None:
    ended = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(ended, signal.SIGKILL)
        select.select([ended], [], [], KILLED_S)
    finally:
        os.close(ended)


def _end_of(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - LOG_BYTES_MAX))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


@contextlib.contextmanager
def _standard_error_aside() -> Generator[BinaryIO]:
    """Collect what is written to descriptor 2, in memory: the disk may be what is full."""
    sys.stderr.flush()
    with open(os.memfd_create("kvfabric-ray-start"), "w+b") as aside:
        kept = os.dup(2)
        os.dup2(aside.fileno(), 2)
        try:
            yield aside
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
