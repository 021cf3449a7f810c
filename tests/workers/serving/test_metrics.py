"""Labels of contexts: as many as there may be, and none of a context that is gone."""

import time
from pathlib import Path

import pytest

from tests.workers.serving.artifacts import SECRETS
from tests.workers.serving.requests import make_request, make_scheduler, run
from workers.serving import scheduler as scheduling
from workers.serving.metrics import MAX_CONTEXTS, MAX_FORGOTTEN, Metrics
from workers.serving.step_engine import Fidelity

SEEN = Fidelity(recall=0.5, mass=0.75)


def labels_of(metrics: Metrics) -> set[str]:
    families = [metric for metric in metrics.collect() if metric.name.startswith("csattn_fidelity_")]
    recall, mass = ({sample.labels["context"] for sample in family.samples} for family in families)
    assert recall == mass
    return recall


def test_deleted_contexts_leave_room_for_new_ones_whatever_still_runs() -> None:
    metrics, first_at = Metrics(), time.monotonic()
    for number in range(MAX_CONTEXTS + 5):
        metrics.saw_fidelity(f"c{number}", first_at, SEEN)
        metrics.forget_context(f"c{number}")
        metrics.saw_fidelity(f"c{number}", first_at, SEEN)
    assert labels_of(metrics) == {"other"}
    metrics.saw_fidelity("new", first_at, SEEN)
    metrics.saw_fidelity("c0", time.monotonic(), SEEN)  # a new context of that name
    metrics.saw_fidelity("c0", first_at, SEEN)
    assert labels_of(metrics) == {"other", "new", "c0"}
    assert metrics.registry.get_sample_value("csattn_fidelity_recall_count", {"context": "c0"}) == 1


def test_names_of_deleted_contexts_are_not_kept_for_ever() -> None:
    metrics = Metrics()
    for number in range(MAX_FORGOTTEN + 5):
        metrics.forget_context(f"c{number}")
    assert len(metrics._forgotten) == MAX_FORGOTTEN


def test_a_request_that_outlives_its_context_does_not_bring_its_label_back(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduling, "WATCH_EVERY", 1)
    scheduler, _, clock = make_scheduler(built)
    clock.now = time.monotonic()
    make_request(scheduler, max_new_tokens=20)
    scheduler.turn()
    assert labels_of(scheduler.metrics) == {SECRETS[0]}
    scheduler.metrics.forget_context(SECRETS[0])
    run(scheduler)
    assert labels_of(scheduler.metrics) == {"other"}
