"""`bench.lightning real`: HISA's choice among a model's own keys."""

import json

import pytest
import torch

from bench.accuracy import long
from bench.lightning import hisa_real
from bench.timing import GateError
from csattn.lightning import BlockedKeys, HisaConfig, causal_lens, hisa_top_k
from tests.bench_accuracy.test_long import make_layer
from tests.tiny import loaded


def test_measured_choices_agree_with_hisas(rng):
    layer, num_queries, k = make_layer(rng, num_rows=700), 5, 20
    lens = causal_lens(num_queries, 700, first_position=695)
    for head, operands in enumerate(hisa_real.indexers(layer, layer.q[:, :, -num_queries:])):
        scores, exact, choices = hisa_real.choose_all(operands, lens, k)
        centred = layer.k[head] - layer.k[head].mean(0)
        expected = torch.einsum("hqd,kd->qhk", layer.q[head, :, -num_queries:], centred).relu().sum(1)
        seen = torch.arange(700) < lens[:, None]
        error = (scores - expected)[seen].norm() / expected[seen].norm()
        assert error < 0.03, "in FP8"
        for chosen, (_, config) in zip(choices, hisa_real._settings(700), strict=True):
            blocked = BlockedKeys.of_operands(operands, config.block_size)
            wanted = hisa_top_k(operands.q, operands.weights, blocked, lens, k, config)
            assert hisa_real.overlap(chosen, wanted).min() > 0.9
        all_blocks = hisa_real._within(
            scores, torch.arange(11)[None].expand(num_queries, -1), HisaConfig().block_size // 2
        )
        assert torch.equal(all_blocks[seen], scores[seen]) and exact.shape == (num_queries, k)


def test_texts_and_needles_are_measured_once(tmp_path, monkeypatch):
    monkeypatch.setattr(long, "_LEAST_CONTEXT", 100)
    monkeypatch.setattr(hisa_real, "load_model", lambda device: loaded())
    monkeypatch.setattr(hisa_real, "NEEDLES_LEN", 1200)
    path = tmp_path / "real.json"
    assert not hisa_real.run_real(path, ["novel"], 512, seconds=-1).cases
    cases = hisa_real.run_real(path, ["novel"], 512, seconds=1e9).cases
    settings = len(list(hisa_real._settings(512)))
    assert len(cases) == settings * (1 + len(hisa_real.DEPTHS))
    monkeypatch.setattr(hisa_real, "read_context", None)  # a call would fail
    assert hisa_real.run_real(path, ["novel"], 512, seconds=1e9).cases == cases
    path.write_text(json.dumps({"cases": cases[:-1]}))  # as of a run that was stopped before its last needle
    monkeypatch.undo()
    monkeypatch.setattr(long, "_LEAST_CONTEXT", 100)
    monkeypatch.setattr(hisa_real, "load_model", lambda device: loaded())
    monkeypatch.setattr(hisa_real, "NEEDLES_LEN", 1200)
    assert len(hisa_real.run_real(path, ["novel"], 512, seconds=1e9).cases) == len(cases)
    ious = {(c["block_size"], c["share"]): c["iou_mean"] for c in cases if c["what"] == "iou"}
    assert ious[16, 1 / 16] < ious[16, 1 / 2] <= 1
    lines = hisa_real.real_tables(cases)
    assert sum(line.startswith("| blocks of") for line in lines) == 2 * len(hisa_real.BLOCK_SIZES)
    hisa_real.draw_real(cases, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_a_needle_that_does_not_occur_exactly_once_is_refused():
    assert hisa_real._rows_of([3, 4], [1, 3, 4, 3]) == {1, 2}
    for context in ([1, 3], [3, 4, 3, 4]):
        with pytest.raises(GateError, match="times in its context; wanted once"):
            hisa_real._rows_of([3, 4], context)
