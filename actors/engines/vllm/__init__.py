"""The vLLM connector: an engine's KV cache on the pool. Imports vLLM when it is asked for."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "KVFabricConnector":
        from .connector import KVFabricConnector

        return KVFabricConnector
    raise AttributeError(name)
