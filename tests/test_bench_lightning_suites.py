"""Suites of bench/lightning do not time wrong results, and measure nothing twice."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.lightning import decode_suite, hisa_suite, topk_suite
from bench.lightning.decode_workloads import INDEXER_WORKLOADS
from bench.lightning.suite import Prepared, run_suite
from bench.lightning.suite_report import suites_as_markdown
from bench.timing import GateError


def run(trials: Any, out: Path | None) -> None:
    run_suite(trials, out, {"cpu": "of a test"}, seconds=600, device="cpu")


def test_measured_cases_are_stored_and_not_measured_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "topk.json"
    run(topk_suite.trials("cpu"), out)
    cases = json.loads(out.read_text())["cases"]
    assert {case["variant"] for case in cases} == {"csattn by position", "csattn by score", "torch.topk"}
    assert all(case["p50_us"] > 0 for case in cases)
    capsys.readouterr()
    run(topk_suite.trials("cpu"), out)
    [said] = capsys.readouterr().out.splitlines()
    assert json.loads(said)["cases"] == cases


def test_a_wrong_selection_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(scores: torch.Tensor, k: int, *, order: str, out: torch.Tensor) -> torch.Tensor:
        return out.zero_()

    monkeypatch.setattr(topk_suite, "top_k", wrong)
    with pytest.raises(GateError, match="differs from the definition"):
        run(topk_suite.trials("cpu"), None)


def test_a_suite_that_is_out_of_time_starts_no_trial(capsys: pytest.CaptureFixture[str]) -> None:
    def never() -> Prepared:
        raise AssertionError("began")

    trial = topk_suite.Trial("topk", "none", "none", "none", never)
    run_suite([trial], None, {}, seconds=-1, device="cpu")
    assert "time is up" in capsys.readouterr().out


def test_hisas_gate_passes_correct_results_and_detects_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = [t for t in hisa_suite.trials("cpu") if t.variant == "HISA" and t.case == "prefix 1024"]
    prepared = trials[0].prepare()
    assert prepared.faults() == []
    assert prepared.figures["iou_mean"] > trials[1].prepare().figures["iou_mean"], "structure helps"
    monkeypatch.setattr(hisa_suite, "top_k_reference", lambda scores, k, lens: torch.zeros(1))
    assert prepared.faults() == ["differs from DSA on a short prefix"]


def test_the_gate_of_decoding_detects_a_wrong_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_suite, "INDEX_HEADS", 4)
    inputs = decode_suite.make_inputs([300, 20], 8, "cpu")
    assert decode_suite.choice_faults(inputs, 50) == []
    monkeypatch.setattr(decode_suite, "dsa_topk_indexer", lambda *_, num_chosen: torch.zeros(2, num_chosen).int())
    assert "the choice is not that of the scores" in decode_suite.choice_faults(inputs, 50)


def test_workloads_have_their_known_lengths() -> None:
    for work in INDEXER_WORKLOADS:
        lens = work.seq_lens
        assert len(lens) == work.batch_size
        assert tuple(lens[: len(work.known)]) == work.known
        assert lens == work.seq_lens
        assert all(1 <= n <= 5806 for n in lens)


def test_the_report_compares_hisa_with_the_faster_dsa() -> None:
    common = {"suite": "hisa", "name": "noise", "case": "prefix 8"}
    cases = [
        {**common, "variant": "DSA", "p50_us": 300.0},
        {**common, "variant": "DSA, streamed", "p50_us": 400.0},
        {**common, "variant": "HISA", "p50_us": 100.0, "iou_mean": 0.5, "iou_min": 0.25},
        {**common, "variant": "block-sparse", "case": "prefix 9", "refused": "out of memory"},
    ]
    machine = {"gpu": "x", "commit": "45050321d930"}
    first, _, *lines = suites_as_markdown({"machine": machine, "cases": cases}).splitlines()
    assert first.startswith("Measured on x,") and "45050321d930" in first
    assert lines[2] == "| | DSA | DSA, streamed | HISA | block-sparse |"
    assert lines[4] == "| prefix 8 | 300.0 | 400.0 | 100.0, 3.0 ×, IoU 0.5000 (least 0.2500) |  |"
    assert lines[5] == "| prefix 9 |  |  |  | out of memory |"
