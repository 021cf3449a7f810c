"""`bench.overload` divides the number of answers by the time in which they arrived."""

import argparse
import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from bench import overload
from bench.timing import GateError

ASKED = argparse.Namespace(seconds=0.15, seed=0)


def measured(monkeypatch: pytest.MonkeyPatch, text: str) -> dict[str, Any]:
    class Client:
        def __init__(self, *_: Any) -> None: ...

        async def ask(self) -> overload.Reply:
            await asyncio.sleep(0.1)
            return overload.Reply(200, 0.1, 0.1, None, text)

    monkeypatch.setattr(overload, "Client", Client)
    monkeypatch.setattr(overload, "RUNNING", 2)
    return asyncio.run(overload.measure(SimpleNamespace(url=""), "m", ASKED))  # type: ignore[arg-type]


def test_the_rate_is_over_the_time_until_the_last_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = measured(monkeypatch, "a word")
    assert figures["full"]["num"] == 4 and figures["requests_per_s"] <= 20  # two clients, two answers each, 0.2 s
    assert "p99_ms" not in figures["alone"] and figures["alone"]["num"] == 3


def test_answers_without_text_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GateError, match="status 200 and no text"):
        measured(monkeypatch, "")


def test_a_service_that_admits_no_request_gives_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*_: Any) -> list[overload.Reply]:
        return [overload.Reply(429, 0.1, 0.1, "1", "")] * 3

    monkeypatch.setattr(overload, "open_loop", refused)
    with pytest.raises(GateError, match="none of 3 requests was admitted"):
        measured(monkeypatch, "a word")
