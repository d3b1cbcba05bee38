"""What things cost: rates learnt from what was observed. Pure; no clock.

A rate is an exponentially weighted mean, in units per second, kept for a whole kind and for each
key of it (a worker, a node, a source). A key not seen yet costs what its kind costs. Observations
weigh by themselves and not by their size, so that one long transfer does not drown ten short ones.
Nonsense (nothing moved, no time passed) is ignored and counted. Threading: one thread at a time.
"""

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

from ..fabric.errors import ConfigError

WEIGHT = 0.2
"""Of the newest observation: a step in the true rate is 90 % learnt after ten."""
KEYS_MAX = 8192
"""Keys of one kind remembered; the least recently observed is forgotten, and costs the mean."""


class RateKind(Enum):
    """What is measured, and the key it is measured for."""

    PREFILL = "prefill"
    """Tokens per second of a worker."""
    LOAD = "load"
    """Bytes per second from a node's host region to its GPUs."""
    TIER = "tier"
    """Bytes per second from a node's lower tiers to its host region."""
    PULL = "pull"
    """Bytes per second that a source sends."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What is believed before anything was observed."""

    prefill_tokens_s: float = 8_000.0
    load_bytes_s: float = 20e9
    tier_bytes_s: float = 2e9
    pull_bytes_s: float = 5e9
    pull_setup_s: float = 0.002
    """Of any pull, however small: lease, descriptors, release."""

    def of(self, kind: RateKind) -> float:
        """Return the rate of a kind."""
        return {
            RateKind.PREFILL: self.prefill_tokens_s,
            RateKind.LOAD: self.load_bytes_s,
            RateKind.TIER: self.tier_bytes_s,
            RateKind.PULL: self.pull_bytes_s,
        }[kind]


class Calibration:
    """The rates as observed so far."""

    def __init__(self, start: Rates, weight: float = WEIGHT, keys_max: int = KEYS_MAX) -> None:
        """Raises `ConfigError` for rates that are not above 0, or a weight outside (0, 1]."""
        if not 0 < weight <= 1:
            raise ConfigError("weight", f"{weight} is outside (0, 1]", "Use 0.2.")
        for kind in RateKind:
            if not start.of(kind) > 0:
                raise ConfigError(kind.value, f"a rate of {start.of(kind)}", "Give a guess above 0")
        self.pull_setup_s = start.pull_setup_s
        self.ignored = 0
        self._weight = weight
        self._keys_max = keys_max
        self._mean = {kind: start.of(kind) for kind in RateKind}
        self._keyed: dict[RateKind, OrderedDict[str, float]] = {
            kind: OrderedDict() for kind in RateKind
        }

    def observe(self, kind: RateKind, key: str, amount: float, seconds: float) -> None:
        """Take in that `amount` (tokens or bytes) took `seconds`."""
        if not (amount > 0 and seconds > 0):
            self.ignored += 1
            return
        seen = amount / seconds
        keyed = self._keyed[kind]
        before = keyed.get(key, self._mean[kind])
        keyed[key] = before + self._weight * (seen - before)
        keyed.move_to_end(key)
        if len(keyed) > self._keys_max:
            keyed.popitem(last=False)
        self._mean[kind] += self._weight * (seen - self._mean[kind])

    def rate(self, kind: RateKind, key: str) -> float:
        """Return units per second for a key, or for its kind where it was never observed."""
        return self._keyed[kind].get(key, self._mean[kind])
