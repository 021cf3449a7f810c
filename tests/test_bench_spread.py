"""`bench.spread` and `bench.load` on a small scale: their counts, and answers while a node is lost."""

import argparse
import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import load, spread
from bench.service_watch import ServiceWatch
from bench.timing import GateError


@pytest.mark.ray
def test_a_lost_node_causes_no_wrong_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="the package ray is not installed; pip install 'csattn[serve]'")
    monkeypatch.setattr(spread, "NODE_DOWN_S", 0.5)
    sizes = "--nodes 2 --workers 2 --contexts 3 --context-chars 300 --answer-tokens 40 --every-s 4 --least-kills 1"
    trace = "--sessions 20 --per-minute 150 --turns 2 --think-s 0.1"
    result = spread.measure(spread.parser().parse_args(f"{sizes} {trace}".split()), tmp_path)
    assert result["killed"] >= 1 and result["turns"] >= 20 and result["samples"] > 3
    assert 0 < result["requests_where_their_context_was"] <= 1


def turn_result(ended_at: float) -> load.TurnResult:
    return load.TurnResult(0, 0.1, 0.2, ended_at, new_tokens=10, prompt_tokens=5, cached_tokens=5)


def test_a_trace_replayed_until_enough_kills_counts_every_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    options = spread.parser().parse_args(["--least-kills", "3", "--every-s", "0", "--sessions", "4"])

    async def replay(_client: Any, _model: str, trace: list[load.Session], *_: Any) -> list[load.TurnResult]:
        chaos.num_killed += 1
        return [turn_result(time.perf_counter()) for session in trace for _ in session.questions]

    async def nothing(*_: Any) -> str:
        return "model"

    chaos = SimpleNamespace(num_killed=-1, back_s=[], num_held=[])  # the first replay, before any kill, raises it to 0
    watch = SimpleNamespace(sample=nothing, run=nothing, found=lambda _tokens: {})
    for name, value in (("replay", replay), ("model_name", nothing)):
        monkeypatch.setattr(spread, name, value)
    monkeypatch.setattr(spread, "ServiceWatch", lambda _options: watch)
    monkeypatch.setattr(spread, "Chaos", lambda *_: chaos)
    result = asyncio.run(spread.run(SimpleNamespace(url="http://127.0.0.1:9"), None, options, {}))  # type: ignore[arg-type]
    once = sum(len(session.questions) for session in load.make_trace(options))
    assert result["killed"] == 3 and result["turns"] == 3 * once


def test_a_context_has_as_many_characters_as_requested() -> None:
    for number, num_chars in ((0, 300), (3, 100_000), (7, 1_000_000)):
        assert len(load.context_text(number, num_chars)) == len(f"Document {number}.\n\n") + num_chars


def options_of(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    load.add_options(parser)
    return parser.parse_args(words)


def test_tokens_per_second_cover_only_the_time_in_which_sessions_start() -> None:
    figures = load.trace_report(
        [turn_result(105.0), turn_result(110.0), turn_result(113.0)], [], 100.0, 113.0, options_of("--for-s", "10")
    )
    assert (figures["tokens_per_s"], figures["seconds"], figures["turns"]) == (2.0, 13.0, 3)


def test_few_samples_report_a_maximum_instead_of_p99() -> None:
    assert load.quantiles("wait", []) == {}
    assert load.quantiles("wait", [1.0, 3.0]) == {"wait_p50_ms": 2000.0, "wait_most_ms": 3000.0, "wait_num": 2}
    assert load.quantiles("wait", [1.0] * 99 + [3.0])["wait_p99_ms"] < 3000


def test_a_watch_counts_from_its_first_sample_and_raises_its_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = [(90, 10), (97, 11), (2, 1)]  # the last is of a restarted process

    def get(_watch: ServiceWatch, path: str) -> Any:
        if path == "/v1/status":
            return {"workers": [{"held_bytes": 5, "budget_bytes": 9}]}
        memory, store = counts.pop(0)
        name = "csattn_context_requests_total"
        return f'{name}{{found="memory",worker="a"}} {memory}\n{name}{{found="store",worker="a"}} {store}\n'

    monkeypatch.setattr(ServiceWatch, "_get", get)
    watch = ServiceWatch(argparse.Namespace(pid=None, store=None, url="http://127.0.0.1:9", key="none"))
    with pytest.raises(GateError, match="never told what it holds"):
        watch.found(1)
    for _ in range(3):
        asyncio.run(watch.sample())
    found = watch.found(1)
    assert (found["requests_that_loaded"], found["requests_where_their_context_was"]) == (2, round(9 / 11, 4))

    async def failing() -> None:
        task = asyncio.create_task(watch.sample())  # fails: no counts are left
        await asyncio.sleep(0.1)
        load.stop(task)

    with pytest.raises(IndexError):
        asyncio.run(failing())
