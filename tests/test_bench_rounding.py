"""`bench.rounding` reports the cost of rounding as one JSON object, and needs predictions to evaluate."""

import json
from typing import Any

import pytest

from bench import rounding
from bench.timing import GateError
from tests.tiny import loaded


@pytest.fixture(autouse=True)
def tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(model: Any, dtype: str, weights: str | None = None) -> Any:
        return loaded()

    monkeypatch.setattr(rounding, "load_model", load)


def test_the_last_line_is_the_figures_as_json(monkeypatch, capsys, tmp_path) -> None:
    file = tmp_path / "figures.json"
    monkeypatch.setattr("sys.argv", ["", "--texts", "speech", "--weights", "fp8", "--len", "520", "--json", str(file)])
    rounding.main()
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told == json.loads(file.read_text())
    [case] = told["cases"]
    assert case == {"text": "speech", "weights": "fp8", "kl": 0, "top1_agreement": 1}, "here nothing is rounded"


def test_a_text_too_short_to_evaluate_is_refused(monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["", "--texts", "speech", "--len", str(rounding.SKIPPED)])
    with pytest.raises(GateError, match="speech has 512 tokens"):
        rounding.main()
