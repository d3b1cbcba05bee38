"""The namespace: everything that must agree before two engines may share bytes.

The engine's own block size stays out, because it only has to divide `chunk_tokens`. So do the sizes
of tensor parallelism: every rank writes its heads into the same canonical chunk. OPAQUE groups are
the exception; their layout id names both.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import msgspec

from .errors import NamespaceMismatch, Unsupported
from .types import NAMESPACE_BYTES, NamespaceId


@dataclass(frozen=True, slots=True)
class Namespace:
    """The fields, as text, in the order in which a difference is reported."""

    model: str
    weights_version: str
    kv_dtype: str
    kv_scales: str
    rope: str
    max_model_len: str
    layout: str
    """Layout id, with the shape of every group (`fabric.layout`)."""
    chunk_tokens: str
    """Per group, comma-separated."""
    tokens_per_hash: str
    hash_algorithm: str
    hash_seed: str
    pipeline_parallel: str = "1"
    context_parallel: str = "1"
    tenant: str = ""

    def fields(self) -> dict[str, str]:
        """Return name and value, in order."""
        return asdict(self)

    @property
    def id(self) -> NamespaceId:
        """The first 16 bytes of SHA-256 over the msgpack array of [name, value] pairs, in order."""
        pairs = [[name, value] for name, value in self.fields().items()]
        return NamespaceId(hashlib.sha256(msgspec.msgpack.encode(pairs)).digest()[:NAMESPACE_BYTES])

    @classmethod
    def from_fields(cls, fields: Mapping[str, str]) -> "Namespace":
        """Rebuild one from the wire. Raises `Unsupported` for a field that this version lacks."""
        known = cls.__dataclass_fields__
        for name, value in fields.items():
            if name not in known:
                raise Unsupported(
                    name, value, "Use the same kvfabric version on both sides; this one lacks it."
                )
        for name in known:
            if name not in fields and name not in (
                "pipeline_parallel",
                "context_parallel",
                "tenant",
            ):
                raise Unsupported(name, "(absent)", "The client must say it when it attaches.")
        return cls(**fields)

    def refuse_unsupported(self) -> None:
        """Raise `Unsupported`, naming the field, for parallelism that chunks do not express yet."""
        for field in ("pipeline_parallel", "context_parallel"):
            value = str(getattr(self, field))
            if value != "1":
                raise Unsupported(
                    field, value, "A chunk holds all layers and tokens of its range; use 1."
                )

    def require_equal(self, theirs: "Namespace") -> None:
        """Raise `NamespaceMismatch` for the first field that differs."""
        for name, ours in self.fields().items():
            other = str(getattr(theirs, name))
            if ours != other:
                raise NamespaceMismatch(name, ours, other)
