"""A machine on which nothing has run yet: /tmp and the home folder are empty folders of a test's.

As a script it takes its place there, in a mount namespace of its own, and becomes a command:
`fresh_machine.py FOLDER [--file SOURCE TARGET | --size BYTES TARGET]... -- COMMAND...`.
FOLDER/tmp is then /tmp, FOLDER/home the home folder; of what else lies in either, only interpreter,
environment, checkout and `shared` beside it are seen. `--file` puts a file in the place of another,
`--size` an empty file system of that size, one of 0 read-only. What the command writes is seen from
outside in FOLDER, and the process keeps its number.
"""

import ctypes
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEWNS, NEWUSER = 0x00020000, 0x10000000
READ_ONLY, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 32, 4096, 16384, 1 << 18
FORBIDDEN = 77
"""The exit code where the system lets nobody make such a namespace."""


@dataclass(frozen=True, slots=True)
class FreshMachine:
    """Such a machine, seen from a test. Where namespaces are forbidden: this machine as it is."""

    folder: Path
    possible: bool

    @classmethod
    def make(cls, folder: Path) -> "FreshMachine":
        """Set one up in an empty folder."""
        for name in ("tmp", "home"):
            (folder / name).mkdir()
        tried = subprocess.run(
            [sys.executable, __file__, folder, "--", "/bin/true"], check=False, capture_output=True
        )
        if tried.returncode not in (0, FORBIDDEN):
            raise AssertionError(tried.stderr.decode())
        return cls(folder, tried.returncode == 0)

    def command(self, command: Sequence[object], *options: object) -> list[str]:
        """Return what runs a command there."""
        if not self.possible:
            return [str(part) for part in command]
        entering = [sys.executable, __file__, self.folder, *options, "--"]
        return [str(part) for part in (*entering, *command)]

    def home(self, name: str) -> str:
        """Return how a command on the machine calls a file of its home folder."""
        return str((Path.home() if self.possible else self.folder / "home") / name)

    def left(self) -> list[str]:
        """Return what lies in its /tmp, apart from where the checkout and the like are seen."""
        kept = {path.parts[2] for path in needed() if path.parts[:2] == ("/", "tmp")}
        return sorted(
            each.name for each in (self.folder / "tmp").iterdir() if each.name not in kept
        )


def mount(source: str, target: str, flags: int, kind: str = "none", data: str = "") -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    texts = (source.encode(), target.encode(), kind.encode())
    if libc.mount(*texts, ctypes.c_ulong(flags), data.encode() or None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def unshare() -> None:
    """Enter a mount namespace; who is not root, in a user namespace of his own."""
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(NEWNS) != 0:
        if libc.unshare(NEWNS | NEWUSER) != 0:
            raise PermissionError(ctypes.get_errno(), "no mount namespace may be made")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    mount("none", "/", RECURSIVE | PRIVATE)


def needed() -> set[Path]:
    """Return what a command cannot do without: interpreter, environment, checkout."""
    beside = ROOT.parent / "shared"
    prefixes = {Path(sys.prefix), Path(sys.base_prefix), Path(os.path.realpath(sys.base_prefix))}
    return {path for path in (ROOT, beside, *prefixes) if path.is_dir()}


def hide(folder: Path, sizes: Mapping[str, int]) -> None:
    """Put the empty folders in the place of /tmp and the home folder, and keep what is needed.

    Where `sizes` names a place, an empty file system of so many bytes is put there instead.
    """
    home = Path("~").expanduser().resolve()
    sources = {
        Path("/tmp"): os.open(folder / "tmp", os.O_PATH),
        home: os.open(folder / "home", os.O_PATH),
    }
    places = {*sources, *map(Path, sizes)}
    kept: dict[Path, int] = {}
    for path in sorted(needed()):
        above = [each for each in kept if each in path.parents]
        if not above and any(place in path.parents for place in places):
            kept[path] = os.open(path, os.O_PATH)
    for place, source in sources.items():
        mount(f"/proc/self/fd/{source}", str(place), BIND)
    for target, size in sizes.items():
        mount("tmpfs", target, 0, "tmpfs", f"size={size or 4096},mode=1777")
    for path, descriptor in kept.items():
        path.mkdir(parents=True, exist_ok=True)
        mount(f"/proc/self/fd/{descriptor}", str(path), BIND | RECURSIVE)
    for target in (target for target, size in sizes.items() if size == 0):
        mount("none", target, REMOUNT | READ_ONLY)
    os.environ["HOME"] = str(home)


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    given = iter(sys.argv[2 : sys.argv.index("--")])
    options = list(zip(given, given, given, strict=True))
    command = sys.argv[sys.argv.index("--") + 1 :]
    files = [(source, target) for kind, source, target in options if kind == "--file"]
    try:
        unshare()
        hide(folder, {target: int(size) for kind, size, target in options if kind == "--size"})
    except PermissionError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(FORBIDDEN)
    for source, target in files:
        mount(source, target, BIND)
    for name in ("TMPDIR", "TEMP", "TMP"):
        if not Path(os.environ.get(name, "/nowhere")).is_dir():
            os.environ.pop(name, None)
    os.chdir("/")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
