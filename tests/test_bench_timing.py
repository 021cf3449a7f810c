"""What every benchmark's result tells besides its figures."""

import json

import pytest

from bench import timing


@pytest.mark.parametrize("commit", ["0123456789ab", "0123456789ab-dirty", None])
def test_a_result_names_the_commit_that_was_measured(commit, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(timing, "commit", lambda: commit)
    path = tmp_path / "figures" / "result.json"
    timing.finish({"bench": "one", "machine": timing.machine()}, path)
    told = json.loads(path.read_text())
    assert told["machine"]["commit"] == commit and "commit" not in told
    timing.finish({"bench": "two"}, path)
    assert json.loads(path.read_text()) == {"commit": commit, "bench": "two"}
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"commit": commit, "bench": "two"}
