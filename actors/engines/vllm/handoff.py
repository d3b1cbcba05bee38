"""Where else a request's KV is, as routers say it in `kv_transfer_params`.

Understood: `remote_prefiller` and `remote_kv_source`, each with `remote_host` and `remote_port` of
a pool's peer endpoint (vLLM's tiering connectors and the routers that speak to them), and
kvfabric's own `{"kvfabric": {"sources": ["tcp://...", ...]}}`. A prefill with `remote_decoder` is
answered with the `remote_prefiller` that the decode needs.

Params come from outside: what cannot be read is no source, and is said once in the log.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ....fabric.types import ANY_NODE, SourceRange
from .settings import HANDOFF_S, SOURCES_MAX

LOG = logging.getLogger("kvfabric.vllm")

PORT_MAX = 65535
ENDPOINT = re.compile(
    r"tcp://([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}(%[A-Za-z0-9._-]{1,16})?\])"
    r":(?P<port>[1-9][0-9]{0,4})"
)
"""A name or a number and a port. What else a router may send must not come to a socket."""


@dataclass(frozen=True, slots=True)
class Handoff:
    """What a request's params mean."""

    sources: tuple[SourceRange, ...] = ()
    again_s: float = 0.0
    """How long to ask again for what the sources have not yet: the prefill may just be ending."""
    wants_prefiller: bool = False
    """The answer should name this node's pool."""


def read_handoff(params: Any) -> Handoff:
    """Understand a request's `kv_transfer_params`: a mapping, None, or rubbish. Never raises."""
    if not params:
        return Handoff()
    if not isinstance(params, Mapping):
        LOG.warning("kv_transfer_params are no mapping; ignored")
        return Handoff()
    endpoints: list[str] = []
    prefiller = _endpoint(params.get("remote_prefiller"))
    for endpoint in (prefiller, _endpoint(params.get("remote_kv_source")), *_own(params)):
        if endpoint and endpoint not in endpoints:
            endpoints.append(endpoint)
    return Handoff(
        tuple(SourceRange(ANY_NODE, endpoint, 0, 0) for endpoint in endpoints[:SOURCES_MAX]),
        HANDOFF_S if prefiller else 0.0,
        bool(params.get("remote_decoder")),
    )


def prefiller_params(peer_endpoint: str) -> dict[str, Any] | None:
    """Return the params that let a decode pull from the pool with this peer endpoint."""
    host, _, port = peer_endpoint.removeprefix("tcp://").rpartition(":")
    if not _is_endpoint(peer_endpoint):
        return None
    return {"remote_prefiller": {"remote_host": host.strip("[]"), "remote_port": int(port)}}


def _endpoint(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, Mapping):
        host, port = value.get("remote_host"), value.get("remote_port")
        if isinstance(host, str) and isinstance(port, int | str) and not isinstance(port, bool):
            host = f"[{host}]" if ":" in host and not host.startswith("[") else host
            endpoint = f"tcp://{host}:{_decimal(port)}"
            if _is_endpoint(endpoint):
                return endpoint
    LOG.warning("kv_transfer_params: no remote_host and remote_port that can be reached; ignored")
    return ""


def _decimal(port: int | str) -> str:
    if isinstance(port, str):
        return port
    return str(port) if 0 < port <= PORT_MAX else ""


def _is_endpoint(text: str) -> bool:
    found = ENDPOINT.fullmatch(text)
    return found is not None and int(found["port"]) <= PORT_MAX


def _own(params: Mapping[str, Any]) -> list[str]:
    own = params.get("kvfabric")
    if own is None:
        return []
    sources = own.get("sources") if isinstance(own, Mapping) else None
    if not isinstance(sources, list | tuple):
        sources = [None]
    found = [each for each in sources if isinstance(each, str) and _is_endpoint(each)]
    if len(found) < len(sources):
        LOG.warning("kv_transfer_params: kvfabric.sources is no list of tcp:// endpoints")
    return found
