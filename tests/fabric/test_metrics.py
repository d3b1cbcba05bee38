"""The table of metrics and the recorders."""

import re

import pytest

from kvfabric.fabric.metrics import TABLE, Kind, Metric, NullRecorder, PrometheusRecorder, Recorder


def by_id(metric: Metric) -> str:
    return metric.name


def some_labels(metric: Metric) -> dict[str, str]:
    return {label.name: (label.values or ("anything",))[-1] for label in metric.labels}


def record(recorder: Recorder, metric: Metric, value: float, labels: dict[str, str]) -> None:
    match metric.kind:
        case Kind.COUNTER:
            recorder.count(metric.name, value, **labels)
        case Kind.GAUGE:
            recorder.gauge(metric.name, value, **labels)
        case Kind.HISTOGRAM:
            recorder.observe(metric.name, value, **labels)


@pytest.mark.parametrize("metric", TABLE, ids=by_id)
def test_names_follow_the_rules(metric: Metric) -> None:
    assert re.fullmatch(r"kvfabric_[a-z]+(_[a-z]+)*", metric.name)
    assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
    assert metric.help.endswith(".")
    assert "|" not in metric.help
    assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
    assert list(metric.buckets) == sorted(set(metric.buckets))
    if metric.kind is Kind.HISTOGRAM:
        assert metric.name.endswith(("_seconds", "_bytes"))


def test_names_are_unique() -> None:
    assert len({metric.name for metric in TABLE}) == len(TABLE)


@pytest.mark.parametrize("metric", TABLE, ids=by_id)
def test_both_recorders_take_every_metric(metric: Metric) -> None:
    for recorder in (NullRecorder(), PrometheusRecorder()):
        record(recorder, metric, 0.25, some_labels(metric))


@pytest.mark.parametrize("metric", TABLE, ids=by_id)
def test_both_recorders_refuse_what_the_table_lacks(metric: Metric) -> None:
    good = some_labels(metric)
    bad = [good | {"colour": "red"}]
    bad += [{key: good[key] for key in good if key != missing} for missing in good]
    bad += [good | {label.name: "never heard of"} for label in metric.labels if label.values]
    for recorder in (NullRecorder(), PrometheusRecorder()):
        for labels in bad:
            with pytest.raises(ValueError, match=metric.name):
                record(recorder, metric, 1, labels)
        with pytest.raises(ValueError, match="no counter is named"):
            recorder.count(f"{metric.name}_typo")


def test_a_metric_of_another_kind_is_refused() -> None:
    for recorder in (NullRecorder(), PrometheusRecorder()):
        with pytest.raises(ValueError, match="no gauge is named"):
            recorder.gauge("kvfabric_leases_expired_total", 1, owner="client")


def test_values_and_exposition_agree() -> None:
    recorder = PrometheusRecorder()
    recorder.count("kvfabric_stored_bytes_total", 4096, path="fs")
    recorder.count("kvfabric_stored_bytes_total", 4096, path="fs")
    recorder.gauge("kvfabric_pool_slots", 7, state="ready")
    recorder.observe("kvfabric_pull_seconds", 0.015)
    recorder.count("kvfabric_tier_jobs_total", tier="disk", kind="load", outcome="done")
    values = recorder.values()
    assert values['kvfabric_stored_bytes_total{path="fs"}'] == 8192
    assert values['kvfabric_pool_slots{state="ready"}'] == 7
    assert values['kvfabric_pool_slots{state="free"}'] == 0
    assert values['kvfabric_pull_seconds_bucket{le="0.01"}'] == 0
    assert values['kvfabric_pull_seconds_bucket{le="0.02"}'] == 1
    assert values['kvfabric_tier_jobs_total{kind="load",outcome="done",tier="disk"}'] == 1
    text = recorder.exposition().decode()
    for name, value in values.items():
        assert f"{name} {value}" in text


def test_recorders_do_not_share_state() -> None:
    first, second = PrometheusRecorder(), PrometheusRecorder()
    first.count("kvfabric_leases_expired_total", 3, owner="peer")
    assert second.values()['kvfabric_leases_expired_total{owner="peer"}'] == 0
