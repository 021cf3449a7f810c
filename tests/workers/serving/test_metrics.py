"""Metrics and their context labels: a bounded number, and none of a deleted context."""

import time
from pathlib import Path

import pytest

from tests.workers.serving.artifacts import SECRETS
from tests.workers.serving.requests import make_request, make_scheduler, run
from workers.serving import scheduler as scheduling
from workers.serving.build_queue import BuildCounts
from workers.serving.metrics import MAX_CONTEXTS, MAX_FORGOTTEN, ContextCounts, Metrics
from workers.serving.step_engine import Fidelity

SEEN = Fidelity(recall=0.5, mass=0.75)


def labels_of(metrics: Metrics) -> set[str]:
    families = [metric for metric in metrics.collect() if metric.name.startswith("csattn_fidelity_")]
    recall, mass = ({sample.labels["context"] for sample in family.samples} for family in families)
    assert recall == mass
    return recall


def test_request_counters_start_at_zero() -> None:
    value = Metrics().registry.get_sample_value
    for found in ("memory", "store"):
        assert value("csattn_context_requests_total", {"found": found}) == 0
    for outcome in ("stop", "cancelled", "timeout", "failed", "refused"):
        assert value("csattn_requests_total", {"outcome": outcome}) == 0


def test_each_metric_is_documented_by_a_sentence() -> None:
    """A documentation that only repeats the name fails."""
    for metric in Metrics().collect():
        assert metric.documentation.endswith(".") and " " in metric.documentation, metric.name


def test_gauges_report_context_builds_bytes_and_budgets() -> None:
    metrics = Metrics()
    builds = {"registered": BuildCounts(2, 1, 3), "prompt": BuildCounts(num_building=1)}
    metrics.context_counts = lambda: ContextCounts(builds=builds, loaded_context_bytes=5, kept_context_budget_bytes=7)
    samples = [sample for metric in metrics.collect() for sample in metric.samples]

    def value(name: str, labels: dict[str, str] | None = None) -> float | None:
        return next((of.value for of in samples if (of.name, of.labels) == (name, labels or {})), None)

    assert value("csattn_context_builds", {"of": "registered", "state": "waiting"}) == 2
    assert value("csattn_context_builds", {"of": "prompt", "state": "building"}) == 1
    assert value("csattn_context_builds_failed_total", {"of": "registered"}) == 3
    assert value("csattn_loaded_context_bytes") == 5 and value("csattn_loaded_context_budget_bytes") is None
    assert value("csattn_kept_context_bytes") is None and value("csattn_kept_context_budget_bytes") == 7


def test_deleted_contexts_free_their_labels_for_new_ones() -> None:
    metrics, first_at = Metrics(), time.monotonic()
    for number in range(MAX_CONTEXTS + 5):
        metrics.observe_fidelity(f"c{number}", first_at, SEEN)
        metrics.forget_context(f"c{number}")
        metrics.observe_fidelity(f"c{number}", first_at, SEEN)
    assert labels_of(metrics) == {"other"}
    metrics.observe_fidelity("new", first_at, SEEN)
    metrics.observe_fidelity("c0", time.monotonic(), SEEN)  # a new context of that name
    metrics.observe_fidelity("c0", first_at, SEEN)
    assert labels_of(metrics) == {"other", "new", "c0"}
    assert metrics.registry.get_sample_value("csattn_fidelity_recall_count", {"context": "c0"}) == 1


def test_the_number_of_remembered_deleted_contexts_is_bounded() -> None:
    metrics = Metrics()
    for number in range(MAX_FORGOTTEN + 5):
        metrics.forget_context(f"c{number}")
    assert len(metrics._forgotten) == MAX_FORGOTTEN


def test_a_request_that_outlives_its_context_is_counted_as_other(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "WATCH_EVERY", 1)
    scheduler, _, clock = make_scheduler(built)
    clock.now = time.monotonic()
    make_request(scheduler, max_new_tokens=20)
    scheduler.turn()
    assert labels_of(scheduler.metrics) == {SECRETS[0]}
    scheduler.metrics.forget_context(SECRETS[0])
    run(scheduler)
    assert labels_of(scheduler.metrics) == {"other"}
