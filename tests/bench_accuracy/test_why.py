"""`bench.accuracy why`: variants agree with the product's presets, and figures with calculations by hand."""

import json
import time
from dataclasses import replace

import pytest
import torch

from bench.accuracy import long, why
from bench.accuracy.attending.context import read_context
from bench.accuracy.attending.heads import NUM_SUBSPACES, describe_heads
from bench.accuracy.texts import find_text, tokenize
from bench.accuracy.ways import CURVES, Way, find_ways, ways
from bench.accuracy.why_report import draw, table
from bench.records import Records
from bench.timing import GateError
from csattn.artifact import open_artifact
from csattn.config import ListConfig, SearchConfig, preset
from index_build.pipeline import build_artifact
from tests.bench_accuracy.test_long import make_layer, make_step
from tests.tiny import byte_tokenizer, loaded
from workers.evaluate import full_attention, measure

BY_NAME = {way.name: way for way in ways()}
FOREVER = 1e9


@pytest.mark.parametrize("name", ["paper", "lists"])
@pytest.mark.parametrize("window_len", [16, 256])
def test_measured_losses_of_lists_agree_with_the_product(name, window_len, tmp_path):
    model, ids = loaded(), tokenize(find_text("novel"), byte_tokenizer())
    context, following, search = ids[:500], ids[500:548], SearchConfig(keep=0.05, window_len=window_len)
    index = preset(name)
    assert isinstance(index, ListConfig)
    way = Way("", index, "path", not index.share_group, window_len=window_len, own_window=window_len)
    read = read_context(model, context, following)
    codebooks = [why.make_layer_codebooks(why._seen_by(way, layer), index) for layer in read.layers]
    codes = [why._codes(way, layer, codebooks[i : i + 1]) for i, layer in enumerate(read.layers)]
    found = why.measure(read, way, search.keep, codes)
    report = build_artifact(model, context, index, tmp_path)
    with open_artifact(report.path) as artifact:
        baseline = full_attention(model, artifact, following)
        wanted = measure(model, artifact, search, "csattn", following, baseline)
    assert found["kl"] == pytest.approx(wanted.kl, rel=0.05)
    assert found["mass"] == pytest.approx(wanted.attention_mass, abs=0.005)


def test_a_text_is_measured_once_and_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(long, "_LEAST_CONTEXT", 100)
    path, names = tmp_path / "figures.json", ";".join([*CURVES, "m = 16", "a window of 32, own rows too"])
    arguments = loaded(), "novel", (400, 70), find_ways(names), [0.05]
    assert not why.compare(*arguments, Records(None, {}, why.KEY), deadline=time.monotonic() - 1)
    for _ in range(2):
        records = Records(path, {"bench": "why"}, why.KEY)
        before = len(records.cases)
        assert why.compare(*arguments, records, FOREVER)
    assert before == len(records.cases) == 1 + 6 + len(CURVES)
    by_name = {case["way"]: case for case in json.loads(path.read_text())["cases"] if case["keep"] == 0.05}
    exact, paper, shared = (by_name[name] for name in ("exact, per query head", "paper", CURVES[2]))
    assert exact["recall"] == 1 > paper["recall"] > 0 and exact["mass"] > paper["mass"]
    assert shared["rows_per_kv_head"] == 0.05 < paper["rows_per_kv_head"] <= 0.1
    [curve] = [case for case in records.cases if (case["way"], case["keep"]) == ("paper", why.OVER_KEEP)]
    assert curve["mass"] == sorted(curve["mass"], reverse=True)
    assert "| m = 16 |" in table(records.cases)
    draw(records.cases, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_recall_and_mass_of_a_choice_agree_with_a_calculation_by_hand(rng):
    layer, reading = make_layer(rng, num_rows=300), replace(BY_NAME["paper"].reading(2), window_len=10)
    step = make_step(rng, layer)
    logits = (layer.softmax_scale * step.q @ layer.k[:, None].mT)[..., 4:290]
    chosen = logits[:, 0].topk(2, dim=-1).indices + 4  # what the first head of each group would read
    [[recall, mass, rows]] = why.judge(layer, step, chosen, reading, [2]).tolist()
    wanted = (logits.topk(2, dim=-1).indices + 4)[..., None] == chosen[:, None, :, None]
    assert recall == pytest.approx(float(wanted.any(-1).float().mean())) and recall >= 1 / 3
    assert rows == pytest.approx(2 / 300) and 0 < mass < 1


def test_describe_heads_gives_normalised_statistics_and_finds_a_common_direction(rng):
    layer = make_layer(rng)
    layer.k.add_(5 * torch.ones(64))
    described = describe_heads(layer, make_step(rng, layer).q, 20)
    for name in ("spectrum_queries", "spectrum_keys", "spectrum_centred_keys", "keys_by_query_axis", "share_plain"):
        assert float(described[name].sum()) == pytest.approx(1, abs=1e-4)
    assert described["spectrum_keys"][0] > 0.9 > described["spectrum_centred_keys"][0] and described["mean_share"] > 0.9
    assert described["in_list"].shape == (NUM_SUBSPACES,) and (described["in_list"] > 0.25).float().mean() > 0.5
    assert (described["share_plain"].diff() <= 0).all()


def test_ways_that_lose_nothing_have_a_mean():
    case = {"text": "novel", "keep": 1.0, "way": "paper", "recall": 1.0, "mass": 1.0, "rows_per_kv_head": 1.0}
    assert "| paper | 0.0000 | 0.0000 | 1.000 |" in table([{**case, "kl": 0.0}])


def test_unknown_ways_are_refused():
    assert [way.name for way in find_ways("exact;paper")] == ["exact, per query head", "exact, per KV head", "paper"]
    with pytest.raises(GateError, match="unknown way nothing; choose from"):
        find_ways("nothing")


def test_each_variant_of_the_paper_changes_one_option():
    letter = preset("paper")
    for way in ways():
        if way.group == "letter":
            changed = [name for name, value in letter.to_json().items() if way.index.to_json()[name] != value]
            windows = way.window_len != BY_NAME["paper"].window_len
            assert len(changed) + windows == 1, way.name
    assert BY_NAME["+ one choice per KV head (`lists`)"].index == preset("lists")
    assert BY_NAME["+ the rest by its codes (`default`)"].index == preset("default")
