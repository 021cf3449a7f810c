"""Result files of the decode benchmark, and what is calculated from them."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from bench.decode.options import KEY
from bench.length_figures import share_at
from bench.plan import Wanted, plan
from bench.records import Records
from bench.timing import GateError


def results(path: Path, header: dict[str, Any], fixed_fields: tuple[str, ...] = ()) -> Records:
    return Records(path, {"bench": "decode", **header}, KEY, fixed_fields)


def test_results_are_stored_and_not_measured_twice(tmp_path):
    path = tmp_path / "new" / "results.json"
    key = {"kind": "op", "context_len": 8192, "batch_size": 1, "variant": "full", "placement": "device"}
    first = results(path, {"machine": "a"})
    assert not first.has(**key)
    first.add({**key, "p50_us": 1.0})
    first.add({**key, "variant": "window", "refused": "no room"})
    again = results(path, {"machine": "b"})
    assert not again.has(**key, as_ampere=True)
    assert again.has(**key) and not again.has(**{**key, "variant": "window"})
    again.add({**key, "p50_us": 2.0})
    assert json.loads(path.read_text())["machine"] == "b"
    assert sorted(case.get("p50_us", 0) for case in again.cases) == [0, 2.0]


def test_a_file_of_other_settings_is_refused_and_cases_record_their_commit(tmp_path):
    path, key = tmp_path / "results.json", {"kind": "op", "context_len": 8192, "batch_size": 1}
    results(path, {"machine": {"commit": "a"}, "keep": 0.02}).add({**key, "variant": "default"})
    with pytest.raises(GateError, match=r"measured with keep 0.02, not 0.15; name another file"):
        results(path, {"machine": {"commit": "b"}, "keep": 0.15}, fixed_fields=("keep",))
    results(path, {"machine": {"commit": "b"}, "keep": 0.02}, fixed_fields=("keep",)).add({**key, "variant": "lists"})
    found = json.loads(path.read_text())
    assert found["machine"]["commit"] == "b" and [case["commit"] for case in found["cases"]] == ["a", "b"]


def test_a_file_of_another_benchmark_is_refused(tmp_path):
    path = tmp_path / "results.json"
    results(path, {}).add({"kind": "op", "variant": "full"})
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
