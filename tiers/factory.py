"""From configuration to tier."""

from ..fabric.clock import Clock
from ..fabric.config import FileTierConfig, TierConfig
from .base import Tier
from .fs import FileTier
from .memory import MemoryTier


def make_tier(config: TierConfig, clock: Clock) -> Tier:
    """Return the tier that a configuration describes. Raises `ConfigError`."""
    if isinstance(config, FileTierConfig):
        return FileTier(config, clock)
    return MemoryTier(config.quota_bytes, clock)
