"""Configuration: one frozen model per part, validated in one place, never the environment.

Unknown keys are refused by name. Sizes are in bytes and times in seconds, as the names say.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .errors import ConfigError


class Part(BaseModel):
    """The habits of every part: frozen, strict about names."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class HostConfig(Part):
    """The host region of a node."""

    slot_bytes: Annotated[int, Field(gt=0, multiple_of=4096)]
    """Room for one chunk. The largest chunk of any group must fit."""
    region_bytes: Annotated[int, Field(gt=0)]
    directory: str = "/dev/shm"
    """Where the control file and the segments lie; must be memory, or loads read a disk."""
    lease_s: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """How long a pin or a reservation lives without a sign of its client.

    A client renews at a third of it, so one lost message costs nothing."""
    quarantine_bytes_max: Annotated[int, Field(ge=0)] | None = None
    """Past this the pool refuses new reservations instead of letting dead writers eat the region.
    None means a quarter of the region."""


class FileTierConfig(Part):
    """A tier of files under a directory."""

    type: Literal["fs"] = "fs"
    root_dir: str
    quota_bytes: Annotated[int, Field(gt=0)]
    readers: Annotated[int, Field(gt=0, le=64)] = 2
    writers: Annotated[int, Field(gt=0, le=64)] = 1
    job_deadline_s: Annotated[float, Field(gt=0)] = 30.0
    queue_jobs_max: Annotated[int, Field(gt=0)] = 256
    """Stores waiting beyond this are dropped (and counted); loads are not."""


class MemoryTierConfig(Part):
    """The reference tier: a second pool of bytes in the pool process itself."""

    type: Literal["memory"] = "memory"
    quota_bytes: Annotated[int, Field(gt=0)]


TierConfig = Annotated[FileTierConfig | MemoryTierConfig, Field(discriminator="type")]


class PeerConfig(Part):
    """How a pool reaches other pools, and how they reach it."""

    listen: str = "tcp://127.0.0.1:*"
    transport: Literal["nixl", "none"] = "nixl"
    lease_s: Annotated[float, Field(gt=0)] = 5.0
    source_deadline_s: Annotated[float, Field(gt=0, le=30)] = 1.5
    """All that one source may cost a request: the whole detour stays under 2 s."""
    suspect_s: Annotated[float, Field(gt=0)] = 5.0
    """How long a source that missed its deadline is not asked again."""
    peers_max: Annotated[int, Field(gt=0)] = 256


class EventConfig(Part):
    """The stream of KV events that a pool publishes."""

    publish: str = "tcp://127.0.0.1:*"
    replay: str = "tcp://127.0.0.1:*"
    heartbeat_s: Annotated[float, Field(gt=0)] = 1.0
    """An empty batch after this much silence, so that a lost last message is noticed."""
    buffer_batches: Annotated[int, Field(gt=0)] = 10_000


class PoolConfig(Part):
    """One node's pool."""

    node: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    run: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] = "default"
    """Names the fabric: pools of different runs on one machine do not touch each other's files."""
    host: HostConfig
    tiers: tuple[TierConfig, ...] = ()
    peers: PeerConfig = PeerConfig()
    events: EventConfig = EventConfig()


P = TypeVar("P", bound=Part)


def parse(model: type[P], values: Mapping[str, Any]) -> P:
    """Validate a mapping. Raises `ConfigError` that names the first field at fault."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or model.__name__
        raise ConfigError(
            field, first["msg"], f"See {model.__name__} among the settings in README.md"
        ) from error
