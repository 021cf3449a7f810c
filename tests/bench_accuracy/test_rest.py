"""`bench.accuracy rest`: its errors agree with the sketch's definition, over the rows that are not read."""

import numpy as np
import pytest
import torch

from bench.accuracy import long, rest
from bench.accuracy.attending.attend import Reading
from bench.accuracy.attending.sketches import SketchCodes, build_sketch
from bench.timing import GateError
from csattn.config import SearchConfig, SketchConfig
from csattn.sketch import reference
from tests.bench_accuracy.test_long import make_layer, make_step
from tests.tiny import loaded


def test_mass_errors_agree_with_the_definition(rng) -> None:
    layer = make_layer(rng)
    step, index, reading = make_step(rng, layer), build_sketch(layer, SketchConfig()), Reading(20, 4, 64, "codes")
    errors = rest.mass_errors(layer, step, index, reading)
    assert errors.shape == (2, 3, 3)
    for token in range(3):
        q = step.q[:, :, token].flatten(0, 1).numpy()
        is_rest = np.zeros((2, 700), bool)
        for head in range(2):
            _, exponent, scores = reference.score_group(q[3 * head : 3 * head + 3], index, head, layer.softmax_scale)
            best = reference.group_scores(scores, exponent, index.marked_rows(head) if index.uses_marks(20) else None)
            is_rest[head, 4:636] = True
            is_rest[head, 4 + np.argsort(-best[4:636], kind="stable")[:20]] = False
        _, told = reference.attend_rest(q, index, is_rest, layer.softmax_scale)
        for row, (head, member) in enumerate(np.ndindex(2, 3)):
            logits = layer.softmax_scale * layer.k[head].double() @ step.q[head, member, token].double()
            exact = float(logits[torch.from_numpy(is_rest[head])].logsumexp(0))
            assert float(errors[head, member, token]) == pytest.approx(told[row] - exact, abs=1e-3)


def test_codes_that_differ_from_the_definition_are_refused(rng, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(rng)
    honest = SketchCodes.logits
    monkeypatch.setattr(SketchCodes, "logits", lambda self, q: honest(self, q) + 0.1)
    with pytest.raises(GateError, match="should be that of the sketch's definition, it is off by"):
        rest.mass_errors(layer, make_step(rng, layer), build_sketch(layer, SketchConfig()), Reading(20, 4, 64, "codes"))


def test_all_heads_of_all_layers_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long, "_LEAST_CONTEXT", 100)
    model = loaded()
    found = rest.compare(model, "novel", (400, 6), SearchConfig(window_len=32))
    assert found["num_queries"] == 6 * model.geometry.num_layers * model.geometry.num_q_heads
    assert (found["context_len"], found["eval_len"], found["keep"]) == (400, 6, 0.02)
    assert (
        found["mean"] < 0 > found["median"] and found["below"] > 0.5
    )  # heads this narrow lose half of their coordinates
