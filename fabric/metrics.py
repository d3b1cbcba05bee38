"""Metrics: one table of all of them, and the recorders that fill it.

The table is the only place where a metric is named. `docs/metrics.md` is made from it (`markdown`),
and a recorder refuses a name or a label that the table lacks, so that a typo fails in the first
test that passes it.

Ownership: whoever runs a loop gets a `Recorder` in its constructor. A process has one recorder.
Threading: every method may be called from any thread.
Failure: recording never raises for a value that the table allows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest


class Kind(StrEnum):
    """What a metric does over time, in Prometheus' words."""

    COUNTER = "counter"
    """Only grows; starts at 0 with the process."""
    GAUGE = "gauge"
    """The value now."""
    HISTOGRAM = "histogram"
    """How many observations fell at or below each bucket's bound."""


@dataclass(frozen=True, slots=True)
class Label:
    """A dimension of a metric."""

    name: str
    values: tuple[str, ...] = ()
    """All that it may be. Empty: names from the configuration, whose number is bounded there."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table."""

    name: str
    """With the base unit as suffix (`_bytes`, `_seconds`); a counter then ends in `_total`."""
    kind: Kind
    help: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, in the base unit; +Inf is implied."""


PATH = Label("path")
"""The way that bytes go: `host` (engine to or from the region), `peer`, or the name of a tier."""

TABLE: tuple[Metric, ...] = (
    Metric(
        "kvfabric_pool_slots",
        Kind.GAUGE,
        "Slots of the host region by state. Their sum is the region's capacity.",
        (Label("state", ("free", "writing", "ready", "quarantined")),),
    ),
    Metric(
        "kvfabric_quarantined_bytes",
        Kind.GAUGE,
        "Bytes in slots whose owner went silent while it might still write.",
    ),
    Metric(
        "kvfabric_gpu_chunks",
        Kind.GAUGE,
        "Chunks that the node's engines have in their own caches, once for each engine.",
    ),
    Metric(
        "kvfabric_gpu_chunks_refused_total",
        Kind.COUNTER,
        "Chunks on GPUs that were not announced, because the pool knows too many already.",
    ),
    Metric(
        "kvfabric_stored_bytes_total",
        Kind.COUNTER,
        "Bytes put in place and published: committed to the host region, stored in a tier.",
        (PATH,),
    ),
    Metric(
        "kvfabric_loaded_bytes_total",
        Kind.COUNTER,
        "Bytes read and verified: pinned in the host region, loaded from a tier, pulled.",
        (PATH,),
    ),
    Metric(
        "kvfabric_lookups_total",
        Kind.COUNTER,
        "Chunks asked for, by answer.",
        (Label("outcome", ("hit", "miss", "pending", "busy")),),
    ),
    Metric(
        "kvfabric_evictions_total",
        Kind.COUNTER,
        "Chunks thrown out to make room, by the place that lost them.",
        (PATH,),
    ),
    Metric(
        "kvfabric_leases_expired_total",
        Kind.COUNTER,
        "Leases that ran out before they were released.",
        (Label("owner", ("client", "peer")),),
    ),
    Metric(
        "kvfabric_checksum_failures_total",
        Kind.COUNTER,
        "Chunks whose bytes were not those that were stored, by the path they came on.",
        (PATH,),
    ),
    Metric(
        "kvfabric_tier_jobs_total",
        Kind.COUNTER,
        "Tier jobs that became terminal: every chunk done, some, none, or dropped from the queue.",
        (
            Label("tier"),
            Label("kind", ("store", "load")),
            Label("outcome", ("done", "partial", "failed", "dropped")),
        ),
    ),
    Metric(
        "kvfabric_pulls_total",
        Kind.COUNTER,
        "Pulls from a peer: every chunk verified, some, refused, past its deadline, or corrupt.",
        (Label("outcome", ("done", "partial", "refused", "expired", "corrupt")),),
    ),
    Metric(
        "kvfabric_pull_seconds",
        Kind.HISTOGRAM,
        "From the lease asked of a source to its chunks verified in the region.",
        # One source may cost a request 2 s at most; beyond that only the count matters.
        buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0),
    ),
    Metric(
        "kvfabric_events_published_total",
        Kind.COUNTER,
        "Chunks announced on the pool's stream, or withdrawn.",
        (Label("event", ("stored", "removed", "cleared")),),
    ),
    Metric(
        "kvfabric_stream_gaps_total",
        Kind.COUNTER,
        "Holes found in a source's event stream, by what mended them.",
        (Label("repair", ("replay", "snapshot")),),
    ),
    Metric(
        "kvfabric_router_decisions_total",
        Kind.COUNTER,
        "Requests placed, by what decided: the longest prefix, the shortest queue, no cache known, "
        "or nobody able to take it.",
        (Label("reason", ("prefix", "load", "cold", "none")),),
    ),
    Metric(
        "kvfabric_messages_refused_total",
        Kind.COUNTER,
        "Messages that were not of the protocol, by the socket they came on. Each was harmless.",
        (Label("channel", ("client", "peer", "replay")),),
    ),
    Metric(
        "kvfabric_loop_errors_total",
        Kind.COUNTER,
        "Errors that only a thread's outermost loop caught. Each is a bug to report.",
        (Label("loop"),),
    ),
)

_BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in TABLE}


class Recorder(Protocol):
    """Where the fabric counts. Raises `ValueError` for what the table does not have."""

    def count(self, name: str, value: float = 1, /, **labels: str) -> None:
        """Add `value` (not negative) to a counter."""
        ...

    def gauge(self, name: str, value: float, /, **labels: str) -> None:
        """Set a gauge."""
        ...

    def observe(self, name: str, value: float, /, **labels: str) -> None:
        """Add one observation to a histogram."""
        ...


def check_labels(name: str, kind: Kind, labels: Mapping[str, str]) -> None:
    """Raise `ValueError` unless the table has such a metric with exactly these labels."""
    metric = _BY_NAME.get(name)
    if metric is None or metric.kind is not kind:
        raise ValueError(f"no {kind} is named {name!r}: see TABLE in fabric/metrics.py")
    if len(labels) != len(metric.labels):
        wanted = ", ".join(label.name for label in metric.labels) or "none"
        raise ValueError(f"{name} has the labels: {wanted}; given: {', '.join(labels) or 'none'}")
    for label in metric.labels:
        value = labels.get(label.name)
        if value is None or (label.values and value not in label.values):
            allowed = ", ".join(label.values) or "a name"
            raise ValueError(f"{name}: label {label.name} is {value!r}, not one of: {allowed}")


class NullRecorder:
    """Keeps nothing, and still refuses what the table does not have."""

    def count(self, name: str, value: float = 1, /, **labels: str) -> None:
        """Check the name and labels of a counter."""
        check_labels(name, Kind.COUNTER, labels)

    def gauge(self, name: str, value: float, /, **labels: str) -> None:
        """Check the name and labels of a gauge."""
        check_labels(name, Kind.GAUGE, labels)

    def observe(self, name: str, value: float, /, **labels: str) -> None:
        """Check the name and labels of a histogram."""
        check_labels(name, Kind.HISTOGRAM, labels)


class PrometheusRecorder:
    """Keeps all metrics in a registry of its own, not in the process-wide one.

    Metrics without labels, and those whose label values are all known, show 0 from the start, so
    that a rate over them has a first point.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._counters = {
            metric.name: Counter(metric.name, metric.help, _names(metric), registry=self._registry)
            for metric in TABLE
            if metric.kind is Kind.COUNTER
        }
        self._gauges = {
            metric.name: Gauge(metric.name, metric.help, _names(metric), registry=self._registry)
            for metric in TABLE
            if metric.kind is Kind.GAUGE
        }
        self._histograms = {
            metric.name: Histogram(
                metric.name,
                metric.help,
                _names(metric),
                registry=self._registry,
                buckets=metric.buckets,
            )
            for metric in TABLE
            if metric.kind is Kind.HISTOGRAM
        }
        for metric in TABLE:
            if len(metric.labels) == 1:
                for value in metric.labels[0].values:
                    _ = (self._counters | self._gauges)[metric.name].labels(value)

    def count(self, name: str, value: float = 1, /, **labels: str) -> None:
        """Add `value` (not negative) to a counter."""
        check_labels(name, Kind.COUNTER, labels)
        counter = self._counters[name]
        (counter.labels(**labels) if labels else counter).inc(value)

    def gauge(self, name: str, value: float, /, **labels: str) -> None:
        """Set a gauge."""
        check_labels(name, Kind.GAUGE, labels)
        gauge = self._gauges[name]
        (gauge.labels(**labels) if labels else gauge).set(value)

    def observe(self, name: str, value: float, /, **labels: str) -> None:
        """Add one observation to a histogram."""
        check_labels(name, Kind.HISTOGRAM, labels)
        histogram = self._histograms[name]
        (histogram.labels(**labels) if labels else histogram).observe(value)

    def values(self) -> dict[str, float]:
        """Return every sample as `name{label="value",...}`, as `wire.StatsReply` carries them."""
        return {
            _sample_name(sample.name, sample.labels): sample.value
            for family in self._registry.collect()
            for sample in family.samples
            if not sample.name.endswith("_created")
        }

    def exposition(self) -> bytes:
        """Return the text that a Prometheus server scrapes."""
        return generate_latest(self._registry)


def _names(metric: Metric) -> tuple[str, ...]:
    return tuple(label.name for label in metric.labels)


def _sample_name(name: str, labels: Mapping[str, str]) -> str:
    pairs = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
    return f"{name}{{{pairs}}}" if pairs else name


def markdown() -> str:
    """Return the text of `docs/metrics.md`. `make docs` writes it."""
    lines = [
        "# Metrics",
        "",
        "Made by `make docs` from the table in `fabric/metrics.py`; a test keeps the two equal.",
        "",
        "| name | kind | labels | meaning |",
        "|---|---|---|---|",
    ]
    for metric in TABLE:
        labels = "<br>".join(
            f"`{label.name}`: {', '.join(label.values) or 'a configured name'}"
            for label in metric.labels
        )
        meaning = metric.help
        if metric.buckets:
            meaning += f" Buckets: {', '.join(f'{bound:g}' for bound in metric.buckets)}."
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {meaning} |")
    return "\n".join(lines) + "\n"
