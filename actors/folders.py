"""Folders of our own for what a run writes: Ray's state, the file tier's files.

A folder is made for one owner, in the first of a few places that has room for it, and is removed
with all that is in it when the owner is done. Nothing is left when it cannot be had.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass

from ..fabric.errors import Refused

PATH_BYTES_MAX = 4095
"""Linux' limit for any path."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a folder is for, and what it must offer."""

    purpose: str
    prefix: str
    room_bytes: int
    path_bytes_max: int = PATH_BYTES_MAX


def places(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return where folders of a while may be made, in the order in which they are tried."""
    return tuple(dict.fromkeys(filter(None, (environment.get("TMPDIR"), "/tmp", "/var/tmp"))))


@contextlib.contextmanager
def own_folder(need: Need, among: Iterable[str] | None = None) -> Generator[str]:
    """Make a folder, by default in one of `places`, and remove it on exit.

    Raises `Refused` if none of the places will do, and says what each of them lacks.
    """
    folder = _make(need, places(os.environ) if among is None else among)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _make(need: Need, among: Iterable[str]) -> str:
    lacking: list[str] = []
    for place in among:
        try:
            folder = tempfile.mkdtemp(prefix=need.prefix, dir=os.path.abspath(place))
        except OSError as error:
            lacking.append(f"{place}: {error.strerror}")
            continue
        problem = _problem(need, folder)
        if not problem:
            return folder
        os.rmdir(folder)
        lacking.append(f"{place}: {problem}")
    remedy = "Free or enlarge one of them, or let TMPDIR name another place"
    if need.path_bytes_max < PATH_BYTES_MAX:
        remedy += f"; the folder's path may have {need.path_bytes_max} bytes"
    raise Refused(f"no folder for {need.purpose}", "; ".join(lacking), f"{remedy}.")


def _problem(need: Need, folder: str) -> str:
    length = len(os.fsencode(folder))
    if length > need.path_bytes_max:
        return f"a folder's path would have {length} bytes, {need.path_bytes_max} at most"
    free = shutil.disk_usage(folder).free
    if free < need.room_bytes:
        return f"{free >> 20} MiB are free, {need.room_bytes >> 20} MiB are needed"
    return ""
