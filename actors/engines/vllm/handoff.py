"""Where else a request's KV is, as routers say it in `kv_transfer_params`.

Understood: `remote_prefiller` and `remote_kv_source`, each with `remote_host` and `remote_port` of
a pool's peer endpoint (vLLM's tiering connectors and the routers that speak to them), and
kvfabric's own `{"kvfabric": {"sources": ["tcp://...", ...]}}`. A prefill with `remote_decoder` is
answered with the `remote_prefiller` that the decode needs.

Params come from outside: what cannot be read is no source, and is said once in the log.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ....fabric.types import SourceRange
from .settings import HANDOFF_S, SOURCES_MAX

LOG = logging.getLogger("kvfabric.vllm")


@dataclass(frozen=True, slots=True)
class Handoff:
    """What a request's params mean."""

    sources: tuple[SourceRange, ...] = ()
    again_s: float = 0.0
    """How long to ask again for what the sources have not yet: the prefill may just be ending."""
    wants_prefiller: bool = False
    """The answer should name this node's pool."""


def read_handoff(params: Mapping[str, Any] | None) -> Handoff:
    """Understand a request's `kv_transfer_params`."""
    if not params:
        return Handoff()
    endpoints: list[str] = []
    prefiller = _endpoint(params.get("remote_prefiller"))
    for endpoint in (prefiller, _endpoint(params.get("remote_kv_source")), *_own(params)):
        if endpoint and endpoint not in endpoints:
            endpoints.append(endpoint)
    return Handoff(
        tuple(SourceRange(endpoint, endpoint, 0, 0) for endpoint in endpoints[:SOURCES_MAX]),
        HANDOFF_S if prefiller else 0.0,
        bool(params.get("remote_decoder")),
    )


def prefiller_params(peer_endpoint: str) -> dict[str, Any] | None:
    """Return the params that let a decode pull from the pool with this peer endpoint."""
    host, _, port = peer_endpoint.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdigit():
        return None
    return {"remote_prefiller": {"remote_host": host.strip("[]"), "remote_port": int(port)}}


def _endpoint(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, Mapping):
        host, port = value.get("remote_host"), value.get("remote_port")
        if isinstance(host, str) and host and str(port).isdigit():
            return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    LOG.warning("kv_transfer_params: %r names no remote_host and remote_port; ignored", value)
    return ""


def _own(params: Mapping[str, Any]) -> list[str]:
    own = params.get("kvfabric")
    if own is None:
        return []
    sources = own.get("sources") if isinstance(own, Mapping) else None
    if isinstance(sources, list) and all(isinstance(each, str) for each in sources):
        return [str(each) for each in sources]
    LOG.warning("kv_transfer_params: kvfabric.sources is not a list of endpoints: %r", own)
    return []
