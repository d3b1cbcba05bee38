"""What a user may set of the connector, and what it costs when the fabric is away.

The values come from `kv_connector_extra_config`; whatever stands there and is not named here is
refused by name. `KVFABRIC_POOL` names the pool where the configuration does not, because an address
is the one value that differs from node to node.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from ....fabric.config import Part, parse
from ....fabric.errors import ConfigError

POOL_VARIABLE = "KVFABRIC_POOL"

POOL_TIMEOUT_S = 0.4
"""For an answer of the pool of this node, beside what the question itself may wait. A pool that is
well answers in a millisecond; one that is busy with a full batch of commits takes 50."""
COPY_TIMEOUT_S = 1.0
"""The same for the workers' loads and saves, which nobody else waits for. On a busy machine a pool
that has just taken 1,000 chunks has needed 0.4 s to pin as many."""
PAUSE_S = 1.0
"""How long nobody asks a pool that did not answer. It is about as long as a pool takes to restart,
and makes a dead one cost one request in a second, not every request."""
HANDOFF_S = 0.5
"""How long the decode side asks again for what the prefill has just computed: the answer of the
prefill may be here before its last chunks are in its pool."""
HANDOFF_RETRY_S = 0.02
FLUSH_WAIT_S = 0.1
"""How long a step may wait for copies out of blocks that it is about to overwrite. Whatever is not
copied by then is not saved. 0.1 s is a step of a large model, and 400 MiB."""
SAVES_WAITING_MAX = 256
"""Steps whose chunks wait to be copied. More than that means that the pool is slower than the
engine; what comes on top is not saved."""
ASKERS_MAX = 8
"""Questions to the pool that may wait for peers and tiers at once. Each is a thread that sleeps."""
ASKS_WAITING_MAX = 256
"""Requests that may wait for an asker; those beyond compute."""
TELL_EVERY_S = 0.05
"""How often the pool hears what the engine's own cache gained and lost: a router that is 50 ms late
misses a prefix now and then, and 20 messages a second cost nobody anything."""
NEWS_WAITING_MAX = 32_768
"""Changes that wait for a pool that is away; beyond it all is told anew, which is not much longer.
One message."""
SAVE_SLICE_CHUNKS = 64
"""Chunks that are reserved, copied and committed at once: what is thrown away if the engine needs
their blocks, or if the pool has no room for all of them."""
ASK_GRACE_S = 0.1
"""How much longer than its own time a question may take before the scheduler goes on without it."""
SOURCES_MAX = 4
"""Peers that a request may name. Each that is dead may cost the whole time of the question."""


class LoadMode(StrEnum):
    """When the KV of a request comes into the engine's cache."""

    ASYNC = "async"
    """Between steps: the request waits, the others go on."""
    SYNC = "sync"
    """At the beginning of the request's first step. Only for models with one cache group and no
    sliding window, because vLLM cannot be told of a failed block of one group among several, and
    goes on from a failed block of a window as if the window before it were there."""


class ConnectorSettings(Part):
    """`kv_connector_extra_config`."""

    pool: Annotated[str, Field(min_length=1)]
    """`ipc://` address of this node's pool: its `addresses.client`."""
    load: LoadMode = LoadMode.ASYNC
    chunk_tokens: Annotated[int, Field(gt=0)] | None = None
    """A multiple of every cache group's block size. None: the block size. Engines share chunks only
    if they agree."""
    model: str = ""
    """Names the model in the fabric, where engines find the same model under different paths."""
    weights_version: str = ""
    """Names the weights; new weights are a new version, and old KV no longer answers."""
    tenant: str = ""
    """Engines of different tenants share nothing."""
    load_wait_s: Annotated[float, Field(ge=0, le=30)] = 1.5
    """How long a request waits for tiers and peers before it computes what is not here."""


def read_settings(extra: Mapping[str, Any], environment: Mapping[str, str]) -> ConnectorSettings:
    """Validate the extra configuration. Raises `ConfigError`, naming field and remedy."""
    values = dict(extra)
    if not values.get("pool"):
        pool = environment.get(POOL_VARIABLE, "")
        if not pool:
            raise ConfigError(
                "kv_connector_extra_config.pool",
                "says no pool",
                f"Give the pool's client address (ipc://...) there or in {POOL_VARIABLE}",
            )
        values["pool"] = pool
    return parse(ConnectorSettings, values)
