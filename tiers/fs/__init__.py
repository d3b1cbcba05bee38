"""The file tier: one chunk per file under a directory (`tier` has the contract's text)."""

from .ops import FileOps
from .records import IoMode
from .tier import FileTier

__all__ = ["FileOps", "FileTier", "IoMode"]
