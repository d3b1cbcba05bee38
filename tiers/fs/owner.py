"""The lock file that says that an instance of the file tier lives.

`.owner-<instance>.lock` in the root, locked with flock for as long as the process lives; the kernel
lets go of it however the process ends. Temporary files carry the instance's name, so another
instance can tell those of the dead from those of the living, also in other containers or, where
the mount supports flock, on other machines.
"""

from .ops import FileOps


def owner_path(root: str, instance: str) -> str:
    """Return the path of an instance's lock file."""
    return f"{root}/.owner-{instance}.lock"


class Owner:
    """One instance's own lock. Neither method raises `OSError`."""

    def __init__(self, root: str, instance: str, ops: FileOps) -> None:
        self._path = owner_path(root, instance)
        self._ops = ops
        self._descriptors: list[int] = []

    def take(self) -> bool:
        """Lock it; return whether it worked. Without it a sweep may turn our stores into misses."""
        try:
            self._descriptors.append(self._ops.open_lock(self._path, create=True))
            self._ops.lock(self._descriptors[0])
        except OSError:
            return False
        return True

    def release(self) -> bool:
        """Remove and unlock it, if it was made; return whether it is gone."""
        gone = True
        while self._descriptors:
            for act in (self._remove, lambda: self._ops.close(self._descriptors.pop())):
                try:
                    act()
                except OSError:
                    gone = False
        return gone

    def _remove(self) -> None:
        self._ops.unlink(self._path)
