"""`bench.faults` and its table count as answered only requests that were in progress when a process was killed."""

import json
from pathlib import Path

import pytest

from bench import fault_table
from bench.faults import Stream


def test_a_stream_that_ended_before_the_kill_does_not_count_as_answered() -> None:
    whole, cut = Stream("all of it", ended_at=5.0), Stream("all", ended_at=5.0)
    assert [whole.outcome("all of it", killed_at) for killed_at in (4.0, 6.0)] == ["answered", "ended before"]
    assert {cut.outcome("all of it", killed_at) for killed_at in (4.0, 6.0)} == {"wrong"}


def test_the_table_separates_streams_that_ended_before_the_kill_and_refuses_faults() -> None:
    told_before = {"streams": {"told": 28, "answered": 2}, "answered_after_s": {"p50": -0.06, "max": -0.048}}
    assert fault_table.outcomes(told_before) == {"told": 28, "ended before": 2}
    after = {"streams": {"answered": 3, "ended before": 1}, "answered_after_s": {"p50": 0.5, "max": 2.0}}
    assert fault_table.outcomes(after) == after["streams"]
    with pytest.raises(ValueError, match="tells of faults"):
        fault_table.require_none(0, 1)


def test_the_table_counts_replies_and_clients_that_left() -> None:
    of_kind = {"no http": {"400": 7, "closed": 2, "left": 3}, "bad key": {"401": 4}}
    told = fault_table.replies({"by_kind": of_kind}, ("no http",))
    assert told == (12, "7 replies with a status; 5 clients left before one")
    assert fault_table.replies({"by_kind": of_kind}, ("no http", "bad key"))[0] == 16


def test_the_table_reads_the_file_of_a_single_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_table, "RESULTS", tmp_path)
    of_target = {"kills": 2, "streams": {"answered": 5, "told": 1}, "answered_after_s": None}
    run = dict.fromkeys(("search worker", "attention worker", "ingress replica"), of_target)
    (tmp_path / "faults-h200.json").write_text(json.dumps(run))
    assert set(fault_table.gpu_kills().values()) == {(2, "5 answers, all right; 1 error events")}
