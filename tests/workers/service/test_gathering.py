"""Reports of several workers are joined into one."""

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from workers.service.spread_backend import join_contexts, join_metrics
from workers.serving.messages import ContextInfo


def test_join_contexts_keeps_the_furthest_state_of_each_context() -> None:
    waits = ContextInfo(name="a", state="building", created_at=2.0)
    builds = ContextInfo(name="a", state="building", created_at=2.0, progress=0.4)
    failed = ContextInfo(name="b", state="failed", created_at=1.0)
    ready = ContextInfo(name="b", state="ready", created_at=1.0)
    assert join_contexts([[waits, failed], [builds, ready], []]) == [ready, builds]
    assert join_contexts([[ready, builds], [failed, waits]]) == [ready, builds]
    assert join_contexts([[], []]) == []


def test_join_metrics_groups_samples_with_a_worker_label() -> None:
    def told(value: float) -> list[GaugeMetricFamily | CounterMetricFamily]:
        tokens = CounterMetricFamily("tokens", "Told.", labels=["context"])
        tokens.add_metric(["book"], value)
        return [GaugeMetricFamily("running", "Now.", value=value), tokens]

    running, tokens = join_metrics({"attention-0": told(1.0), "attention-1": told(2.0)})
    assert (running.name, running.type, tokens.name, tokens.type) == ("running", "gauge", "tokens", "counter")
    assert [(s.labels, s.value) for s in running.samples] == [
        ({"worker": "attention-0"}, 1.0),
        ({"worker": "attention-1"}, 2.0),
    ]
    assert [(s.name, s.labels["context"], s.labels["worker"]) for s in tokens.samples] == [
        ("tokens_total", "book", "attention-0"),
        ("tokens_total", "book", "attention-1"),
    ]
    assert join_metrics({}) == []
