"""What the demo adds up, and the one JSON object that it prints."""

import statistics
from dataclasses import dataclass, field
from typing import Any

from ..engines.reference import ORIGINS, Generated


@dataclass(frozen=True, slots=True)
class Served:
    """One request, played with the fabric and without it."""

    request_id: int
    turn: int
    prefill: Generated
    decode: Generated
    plain: Generated
    prefill_node: str
    decode_node: str
    retries: int

    @property
    def identical(self) -> bool:
        """Whether every generated token equals the one computed without the fabric."""
        return self.decode.tokens == self.plain.tokens and (
            self.prefill.tokens[0] == self.plain.tokens[0]
        )


@dataclass(slots=True)
class Tally:
    """Sums over the requests served so far."""

    served: list[Served] = field(default_factory=list[Served])
    faults: dict[str, int] = field(default_factory=dict[str, int])

    def add(self, one: Served) -> None:
        """Count a request."""
        self.served.append(one)
        for generated in (one.prefill, one.decode):
            for name, count in generated.faults.items():
                self.fault(name, count)

    def fault(self, name: str, count: int = 1) -> None:
        """Count something that went wrong and was survived."""
        self.faults[name] = self.faults.get(name, 0) + count

    @property
    def tokens_identical(self) -> bool:
        """Whether all requests so far came out as without the fabric."""
        return all(one.identical for one in self.served)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens asked."""
        return sum(one.prefill.prompt_tokens for one in self.served)

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that prefill workers computed."""
        return sum(one.prefill.computed_tokens for one in self.served)

    def reused(self, origin: str) -> int:
        """Prompt tokens that prefill workers loaded from one kind of place."""
        return sum(one.prefill.reused.get(origin, 0) for one in self.served)

    def bytes(self, origin: str) -> int:
        """Bytes that all workers loaded from one kind of place."""
        return sum(
            generated.loaded_bytes.get(origin, 0)
            for one in self.served
            for generated in (one.prefill, one.decode)
        )

    @property
    def handoff_tokens(self) -> int:
        """Prompt tokens whose KV decode workers loaded instead of computing."""
        return sum(sum(one.decode.reused.values()) for one in self.served)

    @property
    def handoff_computed_tokens(self) -> int:
        """Prompt tokens that decode workers computed: what follows the last full chunk, the last
        token in any case, and what did not come over."""
        return sum(one.decode.computed_tokens for one in self.served)

    def ttft_ms(self, kind: str) -> list[float]:
        """Times to first token, in the order served: `with` or `without` the fabric."""
        return [(one.prefill if kind == "with" else one.plain).ttft_s * 1e3 for one in self.served]

    def summary(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        reused = {origin: self.reused(origin) for origin in ORIGINS}
        prompt = self.prompt_tokens
        times = {kind: self.ttft_ms(kind) for kind in ("with", "without")}
        return {
            "requests": len(self.served),
            "tokens_identical": self.tokens_identical,
            "prompt_tokens": prompt,
            "computed_tokens": self.computed_tokens,
            "reused_tokens": reused,
            "handoff_tokens": self.handoff_tokens,
            "handoff_computed_tokens": self.handoff_computed_tokens,
            "hit_ratio": sum(reused.values()) / prompt if prompt else 0.0,
            "ttft_ms": {k: statistics.fmean(v) if v else 0.0 for k, v in times.items()},
            "ttft_p50_ms": {k: statistics.median(v) if v else 0.0 for k, v in times.items()},
            "bytes": {origin: self.bytes(origin) for origin in ORIGINS},
            "generated_tokens": sum(len(one.decode.tokens) for one in self.served),
            "retries": sum(one.retries for one in self.served),
            "faults": sum(self.faults.values()),
            "faults_by_kind": dict(sorted(self.faults.items())),
        }
