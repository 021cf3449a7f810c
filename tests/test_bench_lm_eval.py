"""The table of lm-eval's scores; samples that are in the file are not evaluated again."""

from pathlib import Path

import pytest

from bench.lm_eval.__main__ import variants
from bench.lm_eval.outcomes import FULL, Outcome, Outcomes, Part, prefills, table
from bench.timing import GateError

TASK = "ruler_vt"
FULL_VARIANT, SPARSE = variants("cpu")[:2]


def outcome(variant: str, scores: dict[str, float], cached: int = 0) -> Outcome:
    return Outcome(TASK, 4096, variant, scores, prompt_tokens=100 * len(scores), cached_tokens=cached, seconds=1.0)


def test_differences_compare_scores_of_the_same_samples() -> None:
    outcomes = [
        outcome(FULL, {"0": 1.0, "2": 0.0}),
        outcome(FULL, {"1": 1.0}),
        outcome(SPARSE.name, {"1": 0.0, "2": 0.0}),
    ]
    full, sparse = table(outcomes, [FULL, SPARSE.name])
    assert (full["samples"], full["score"], full["difference"]) == (3, 0.6667, 0.0)
    assert (sparse["samples"], sparse["score"], sparse["difference"]) == (2, 0.0, -0.5)
    assert sparse["difference_stderr"] == 0.5  # of the values 0 and -1


def test_recorded_outcomes_are_not_evaluated_again(tmp_path: Path) -> None:
    path = tmp_path / "outcomes.jsonl"
    Outcomes(path, "a model").add(outcome(FULL, {"0": 1.0, "2": 0.0}))
    again = Outcomes(path, "a model")
    assert again.has(Part(TASK, 4096, (0, 2)), FULL_VARIANT)
    assert again.has(Part(TASK, 4096, (2,)), FULL_VARIANT)  # divided into more parts than before
    again.add(outcome(FULL, {"1": 0.0}))
    assert again.has(Part(TASK, 4096, (0, 1, 2)), FULL_VARIANT)
    assert not again.has(Part(TASK, 4096, (0, 3)), FULL_VARIANT)
    assert not again.has(Part(TASK, 8192, (0, 2)), FULL_VARIANT)
    assert not again.has(Part(TASK, 4096, (0, 2)), SPARSE)
    with pytest.raises(GateError, match="has outcomes of a model, these are of another"):
        Outcomes(path, "another")


def test_prefills_separate_cached_from_computed_tokens() -> None:
    rows = prefills([outcome(FULL, {"0": 1.0}), outcome(SPARSE.name, {"0": 1.0}, cached=90)], [FULL, SPARSE.name])
    assert [(row["sent_tokens"], row["computed_tokens"]) for row in rows] == [(100, 100), (100, 10)]
