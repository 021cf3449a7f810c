"""The benchmark of learned indexers: its cases are the paper's rows; it runs, resumes, and detects wrong results."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.lightning import check as checking
from bench.lightning.__main__ import main, run_tables
from bench.lightning.cases import KEY, Case, cases_of
from bench.lightning.inputs import Shape, make_fp8_operands, make_operands
from bench.lightning.layer import VARIANTS, layer_table, run_layers
from bench.lightning.measure import overlap, recall
from bench.lightning.published import exact_choice, materialise, partition_merge
from bench.lightning.run_case import run_case
from csattn.lightning import Operands, score_keys

TINY = Shape(num_heads=16, head_dim=32, dim=16)  # with fewer heads, many scores are 0, and the top-k is ambiguous


def test_cases_are_the_papers_rows() -> None:
    cases = cases_of(set(range(2, 8)), 1 << 21)
    published = [case for case in cases if case.variant == "published"]
    rows = {
        table: {c.num_tokens for c in published if c.table == table and c.kind != "recall"} for table in range(3, 8)
    }
    assert rows[3] == rows[4] == {2**n for n in range(15, 21)}
    assert rows[5] == {2**n for n in (13, 15, 16, 17, 18)}
    assert rows[6] == rows[7] == {2**18}
    assert len([c for c in published if c.table == 6 and c.kind == "time"]) == 15
    assert len({tuple(case.key.items()) for case in cases}) == len(cases)
    assert {case.top_k for case in cases if case.table == 4} == {1024}
    assert not cases_of({3}, 1 << 14)
    assert [case.cost for case in cases] == sorted(case.cost for case in cases)


@pytest.mark.parametrize("with_scales", [False, True])
@pytest.mark.parametrize("ratio", [4, None])
def test_the_published_method_chooses_the_exact_top_k_as_a_set(ratio: int | None, with_scales: bool) -> None:
    operands = make_operands(512, TINY, "cpu")
    if with_scales:
        operands = replace(operands, key_scale=torch.rand(len(operands.k)) + 0.1)
    indices, scores = partition_merge(operands, 16, ratio, 100, 48)
    if ratio is None:
        best = score_keys(operands).topk(16, dim=1).indices
    else:
        best = exact_choice(operands, 16, ratio)
        assert recall(materialise(operands, 16, ratio), best)["min"] == 1.0
    assert recall(indices, best) == {"mean": 1.0, "min": 1.0, "perfect": 1.0}
    assert ((indices < 0) == scores.isinf()).all()


def test_the_published_kernels_scores_agree_with_the_definition() -> None:
    pytest.importorskip("triton", reason="Triton, whose interpreter runs kernels on a CPU, is not installed")
    from bench.lightning.published_kernel import score_chunk

    device = "cuda" if torch.cuda.is_available() else "cpu"
    operands = Operands(torch.randn(2, 16, 32).half(), torch.randn(150, 32).half(), torch.randn(2, 16))
    moved = Operands(operands.q.to(device), operands.k.to(device), operands.weights.to(device))
    got = score_chunk(moved, range(7, 147)).cpu()
    torch.testing.assert_close(got, score_keys(operands)[:, 7:147], rtol=1e-3, atol=1e-3)


def test_recall_is_the_share_of_common_indices() -> None:
    want = torch.tensor([[3, 1, -1], [5, 6, 7], [-1, -1, -1]])
    got = torch.tensor([[1, 9, -1], [7, 6, 5], [-1, -1, -1]], dtype=torch.int32)
    assert recall(got, want) == {"mean": 0.75, "min": 0.5, "perfect": 0.5}


def test_fp8_operands_score_nearly_as_the_original_ones() -> None:
    packed = make_fp8_operands(64, TINY, "cpu")
    assert packed.q.dtype == packed.k.dtype == torch.float8_e4m3fn
    plain = make_operands(64, TINY, "cpu")
    error = (score_keys(packed) - score_keys(plain)).abs().max() / score_keys(plain).abs().max()
    assert 0 < error < 0.5


@pytest.mark.parametrize(
    ("kind", "variant"),
    [
        *(("time", variant) for variant in ("csattn", "csattn fp8", "published", "materialised")),
        *(("pipeline", variant) for variant in ("csattn", "materialised")),
        *(("recall", variant) for variant in ("csattn", "A1 no merge", "A2 short chunks skipped", "A3 float16 scores")),
    ],
)
def test_every_kind_of_case_runs(kind: str, variant: str) -> None:
    case = Case(
        table=7,
        kind=kind,
        variant=variant,
        num_tokens=256,
        top_k=16,
        query_chunk=100,
        key_chunk=24 if "A2" not in variant else 16,
    )
    figures = run_case(case, "cpu", TINY)
    if kind != "recall":
        assert figures["ms"] > 0 and figures["tflops"] >= 0
    elif variant == "csattn":
        assert figures["identical"] and figures["recall"]["min"] > 0.9
    else:
        worst = {"A1 no merge": (0.3, 0.9), "A2 short chunks skipped": (0, 0), "A3 float16 scores": (0.9, 1)}[variant]
        assert worst[0] <= figures["recall"]["mean"] <= worst[1]


def test_tables_resume_where_they_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    run_tables(out, {2}, 2048, -1, "cpu", TINY)
    assert "time is up" in capsys.readouterr().out
    run_tables(out, {2}, 2048, 60, "cpu", TINY)
    cases = json.loads(out.read_text())["cases"]
    assert sorted(case["variant"] for case in cases) == ["csattn", "csattn fp8", "published"]
    assert all(set(KEY) <= set(case) for case in cases)
    capsys.readouterr()
    run_tables(out, {2}, 2048, 60, "cpu", TINY)
    [said] = capsys.readouterr().out.splitlines()
    assert json.loads(said)["cases"] == cases, "nothing is measured again"
    main(["show", str(out), "--markdown", str(tmp_path / "figures.md")])
    text = (tmp_path / "figures.md").read_text()
    assert "| 2,048 | csattn, order as materialised | – | 512 |" in text
    assert f"commit {json.loads(out.read_text())['machine']['commit']}." in text, "it names the code that it tells of"


def test_the_gate_passes_correct_results_and_refuses_wrong_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ("cpu", 9, 131, 64, TINY)
    assert checking.check(*sizes) == []
    monkeypatch.setattr(checking, "top_k_reference", lambda scores, k, lens: torch.full((len(scores), k), 5))
    assert len(checking.check(*sizes)) > len(checking.KINDS)


def test_a_layer_is_measured_once_in_every_variant(tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32, "q_lora_rank": 16, "o_groups": 2}
    shape |= {"o_lora_rank": 8, "index_n_heads": 16, "index_head_dim": 32, "partial_rotary_factor": 0.5}
    records = run_layers(tmp_path / "f.json", {}, 1024, 60.0, "cpu", shape)
    assert {case["variant"] for case in records.cases if case["ms"] > 0} == set(VARIANTS)
    assert len(records.cases) == 4
    head, _, row = layer_table(records.cases)
    assert row.count(";") == 4 and head.count("transformers") == 2
    assert run_layers(tmp_path / "f.json", {}, 1024, 0.0, "cpu", shape).cases == records.cases


def test_overlap_of_selections_is_intersection_over_union() -> None:
    a = torch.tensor([[0, 1, 2, 3], [5, -1, -1, -1], [-1, -1, -1, -1]], dtype=torch.int32)
    b = torch.tensor([[2, 3, 4, 5], [-1, 5, -1, -1], [-1, -1, -1, -1]], dtype=torch.int32)
    torch.testing.assert_close(overlap(a, b), torch.tensor([2 / 6, 1.0, 1.0], dtype=torch.float64))
