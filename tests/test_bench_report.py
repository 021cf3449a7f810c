"""Tables and files of the decode benchmark."""

import json
import math
from typing import Any

import pytest

from bench.decode.report import best_speedup, label, tables
from bench.decode.results import Results, merge_files
from bench.length_figures import share_at
from bench.plan import Wanted, plan
from bench.records import Records
from bench.timing import GateError


def make_content() -> dict[str, Any]:
    """Return a file's content with a case of every kind."""
    machine = dict.fromkeys(("gpu", "driver", "cuda", "cpu", "torch", "triton"), "x") | {"cpus": 1}
    ceilings = {"read_gbps": 4000.0, "copy_gbps": 4000.0, "h2d_gbps": 50.0}
    cases = []
    for context_len in (8192, 65536):
        for kind in ("op", "shared op", "e2e", "shared"):
            key = {"kind": kind, "context_len": context_len, "batch_size": 1, "placement": "device"}
            figures = {"p50_us": 100.0, "p99_us": 101.0, "moved_bytes": 10**6, "roofline_us": 10.0, "of_roofline": 0.1}
            figures |= {"hbm_bytes": 10**9, "tokens_per_s": 10.0, "attention_us": 3.0}
            parts = {"search": 20.0, "select": 10.0, "rest": 4.0, "attend": 5.0}
            moved = {"index": 10**5, "rows": 10**5}
            cases += [
                {**key, "variant": "full", "schedule": "none", **figures, "backend": "cudnn"},
                {**key, "variant": "default", "schedule": "every step", **figures, "p50_us": 40.0}
                | {"parts_us": parts, "moved_parts_bytes": moved},
                {**key, "variant": "paper", "schedule": "every step", "refused": "no room for it"},
            ]
    header = {"machine": machine, "ceilings": ceilings, "shape": "llama-3.1-8b", "keep": 0.02}
    return {**header, "cases": cases}


def test_tables_show_ratios_and_refusals():
    text = tables(make_content())
    ours = [line for line in text.splitlines() if "| csattn |" in line]
    assert len(ours) == 8 and all("| 2.50 |" in line for line in ours)
    assert all("| 20.0 | 10.0 | 4.0 |" in line for line in ours)
    assert "requests that share one context, µs" in text
    assert text.count("no room for it") == 8


def test_cases_of_several_shapes_and_settings_can_be_told_apart(tmp_path):
    paths = [tmp_path / "one.json", tmp_path / "two.json"]
    for path, shape, times in zip(paths, ("llama-3.1-8b", "qwen3.5-27b"), (1, 3), strict=True):
        content = make_content()
        cases = [{**of, "p50_us": times * of["p50_us"]} if "p50_us" in of else of for of in content["cases"]]
        path.write_text(json.dumps({**content, "shape": shape, "cases": cases}))
    merged = merge_files(paths)
    assert len(merged["cases"]) == 2 * len(content["cases"])
    text = tables(merged)
    assert "### Whole steps: llama-3.1-8b\n" in text and "### Whole steps: qwen3.5-27b\n" in text
    assert text.count("| 2.50 |") == 16
    assert {case["shape"] for case in merged["cases"]} == {"llama-3.1-8b", "qwen3.5-27b"}
    case = {"variant": "default", "schedule": "every step"}
    assert label({**case, "kv_codec": "q8_0", "slots": 0.08}) == "csattn, KV in q8_0, slots for 8 %"
    assert label({**case, "as_ampere": True}) == "csattn, as Ampere"
    whole = {**case, "kind": "e2e", "context_len": 8192, "batch_size": 1}
    assert best_speedup(whole, merged) is not None and best_speedup({**whole, "kv_codec": "q8_0"}, merged) is None


def test_magicpigs_steps_are_listed_without_figures_of_gpu_work():
    content = make_content()
    key = {"kind": "e2e", "context_len": 8192, "batch_size": 1, "placement": "host", "schedule": "every step"}
    figures = {"p50_us": 5000.0, "tokens_per_s": 200.0, "p99_us": 6000.0, "hbm_bytes": 10**9}
    text = tables({**content, "cases": [*content["cases"], {**key, "variant": "magicpig-300", **figures}]})
    assert "| host | MagicPIG, 300 tables | 5.00 | 6.00 | 200 | 0.02 |" in text


def test_results_are_stored_and_not_measured_twice(tmp_path):
    path = tmp_path / "new" / "results.json"
    key = {"kind": "op", "context_len": 8192, "batch_size": 1, "variant": "full", "placement": "device"}
    first = Results(path, {"machine": "a"})
    assert not first.has(**key)
    first.add({**key, "p50_us": 1.0})
    first.add({**key, "variant": "window", "refused": "no room"})
    again = Results(path, {"machine": "b"})
    assert not again.has(**key, as_ampere=True)
    assert again.has(**key) and not again.has(**{**key, "variant": "window"})
    again.add({**key, "p50_us": 2.0})
    assert json.loads(path.read_text())["machine"] == "b"
    other = tmp_path / "other.json"
    Results(other, {"machine": "c"}).add({**key, "p50_us": 3.0})
    merged = merge_files([path, other])
    assert sorted(case.get("p50_us", 0) for case in merged["cases"]) == [0, 3.0]


def test_a_file_of_other_settings_is_refused_and_cases_record_their_commit(tmp_path):
    path, key = tmp_path / "results.json", {"kind": "op", "context_len": 8192, "batch_size": 1}
    Results(path, {"machine": {"commit": "a"}, "keep": 0.02}).add({**key, "variant": "default"})
    with pytest.raises(GateError, match=r"measured with keep 0.02, not 0.15; name another file"):
        Results(path, {"machine": {"commit": "b"}, "keep": 0.15}, fixed_fields=("keep",))
    Results(path, {"machine": {"commit": "b"}, "keep": 0.02}, fixed_fields=("keep",)).add({**key, "variant": "lists"})
    found = json.loads(path.read_text())
    assert found["machine"]["commit"] == "b" and [case["commit"] for case in found["cases"]] == ["a", "b"]


def test_a_file_of_another_benchmark_is_refused(tmp_path):
    path = tmp_path / "results.json"
    Results(path, {}).add({"kind": "op", "variant": "full"})
    before = path.read_text()
    with pytest.raises(GateError, match=r"measured with bench decode, not rest; name another file"):
        Records(path, {"bench": "rest"}, ("text",)).add({"text": "novel"})
    assert path.read_text() == before


def test_contexts_that_fit_on_no_gpu_are_not_planned():
    assert plan(Wanted(tokens=1 << 20))["contexts_on_a_gpu"] == 4
    with pytest.raises(GateError, match=r"8,000,000 tokens takes 2\d\d GB of a GPU, which has 133 besides the weights"):
        plan(Wanted(tokens=8_000_000))


@pytest.mark.parametrize("name", ["contexts", "tokens", "gpus_per_host", "host_memory_gb", "disk_gb_per_s"])
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
def test_nothing_is_planned_with_numbers_that_are_not_above_0(name, value):
    with pytest.raises(GateError, match=rf"{name} is {value}; give a number above 0"):
        plan(Wanted(**{name: value}))


def test_the_sufficient_share_is_interpolated_between_tried_shares():
    """It is interpolated: the next larger share that was tried would overstate what other methods need."""
    tried = [(0.1, 1e-2), (0.3, 1e-4), (0.02, 1e-1)]
    assert share_at(1e-3, tried) == pytest.approx(0.2) and share_at(1e-4, tried) == pytest.approx(0.3)
    assert share_at(1.0, tried) == pytest.approx(0.02) and share_at(1e-5, tried) is None
