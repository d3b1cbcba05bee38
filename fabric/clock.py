"""Time, handed in. This is the only module that reads a clock."""

import time
from typing import Protocol


class Clock(Protocol):
    """What every part of the fabric asks for time."""

    def now_s(self) -> float:
        """Return seconds on a clock that never goes back. Comparable only within one process."""
        ...

    def unix_s(self) -> float:
        """Return seconds since the epoch, for stamps that other machines read."""
        ...

    def sleep_s(self, seconds: float) -> None:
        """Block the calling thread."""
        ...


class SystemClock:
    """The machine's clock."""

    def now_s(self) -> float:
        """Return the monotonic clock."""
        return time.monotonic()

    def unix_s(self) -> float:
        """Return the wall clock."""
        return time.time()

    def sleep_s(self, seconds: float) -> None:
        """Sleep for real."""
        time.sleep(seconds)
