"""Results of benchmarks record machine, commit and command, and are written whole."""

import json
import signal

import pytest

from bench import timing


@pytest.mark.parametrize("commit", ["0123456789ab", "0123456789ab-dirty", None])
def test_a_result_records_its_machine_commit_and_command(commit, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(timing, "commit", lambda: commit)
    monkeypatch.setattr("sys.orig_argv", ["/usr/bin/python3", "-m", "bench.one", "--texts", "a b"])
    path = tmp_path / "figures" / "result.json"
    timing.finish({"bench": "one"}, path)
    told = json.loads(path.read_text())
    assert told["bench"] == "one" and told["machine"]["commit"] == commit
    assert told["machine"]["command"] == "python -m bench.one --texts 'a b'"
    assert {"cpu", "cpus", "python", "numpy", "torch", "transformers", "csattn"} < set(told["machine"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == told
    timing.finish({"bench": "two", "machine": {"gpu": "mine"}}, path)
    assert json.loads(path.read_text()) == {"bench": "two", "machine": {"gpu": "mine"}}


def test_a_measurement_reports_how_many_times_its_percentiles_are_of() -> None:
    runs = []
    assert timing.measure(lambda: runs.append(0), seconds=0.0, least=7)["num"] == 7 and len(runs) == 8


def test_sigterm_raises_system_exit_in_a_benchmark() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        timing.end_as_interrupted()
        with pytest.raises(SystemExit, match="143"):  # an exception, so `with` and `finally` blocks end in order
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_result_is_written_whole_or_not_at_all(tmp_path, monkeypatch) -> None:
    path = tmp_path / "result.json"
    path.write_text("before")
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        timing.finish({"bench": "one"}, path)
    assert path.read_text() == "before"
