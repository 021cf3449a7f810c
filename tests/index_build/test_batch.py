"""A batch of contexts: checked as a whole, each model loaded once, nothing built twice, failures stop no other job."""

import errno
import json
import os
import signal
import sys
from contextlib import suppress
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import index_build.batch
from csattn.artifact import scan_store, verify_artifact
from csattn.artifact.lock import BuildLock
from csattn.build_options import BuildOptions
from csattn.errors import ConfigError
from csattn.models import load_model
from index_build.batch import BatchReport, JobResult, plan_job, run_batch
from index_build.board import BuildState
from index_build.job_list import Job, read_jobs
from offload.errors import MemoryPlanError
from tests.index_build.batches import make_place, write_list
from workers.cli import main
from workers.cli.batching import BatchDisplay, BatchTotals, JsonBatchProgress


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("batch"), 3)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The models that were loaded."""
    names: list[str | None] = []
    load = index_build.batch.load_model

    def noted(name, *rest, **options):
        names.append(name)
        return load(name, *rest, **options)

    monkeypatch.setattr(index_build.batch, "load_model", noted)
    return names


def outcomes(report: BatchReport) -> list[str]:
    return [result.outcome for result in report.results]


def test_a_lines_options_override_the_command_line(place: Path) -> None:
    file = write_list(
        place, {"context": "0.txt"}, "", {"context": "1.txt", "model": "model", "list_len": 1, "preset": "paper"}
    )
    defaults = BuildOptions(dtype="bfloat16", model="owner/name")
    first, second = read_jobs(file, defaults)
    assert (first.line, first.context, first.options) == (1, place / "0.txt", defaults)
    assert (second.line, second.context_bytes) == (3, len((place / "1.txt").read_bytes()))
    assert second.options == BuildOptions(dtype="bfloat16", model=str(place / "model"), list_len=1, preset="paper")


BAD_LINES = {
    "{": "not JSON",
    "[" * 5000: "not JSON",
    "[1]": "expected an object",
    '{"model": "x"}': '"context" must be',
    '{"context": 7}': "got 7",
    '{"context": "absent.txt"}': "No such file",
    '{"context": "empty.txt"}': "holds no text",
    '{"context": "0.txt", "presett": "paper"}': "unknown option 'presett'",
    '{"contxt": "0.txt"}': "unknown option 'contxt'; known are context",
    '{"context": "0.txt", "preset": "best"}': "unknown preset 'best'",
    '{"context": "0.txt", "dtype": "int3"}': "dtype must be one of",
    '{"context": "0.txt", "num_fine": 0}': "num_fine must be at least 1",
    '{"context": "0.txt", "num_fine": true}': '"num_fine" must be a whole number',
    '{"context": "0.txt", "list_len": "1"}': '"list_len" must be a number',
    '{"context": "0.txt", "list_len": 0.5}': "--list-len has no meaning for the preset 'default'",
    '{"context": "0.txt", "chat": 1}': '"chat" must be true or false',
    '{"context": "0.txt", "preset": "lists", "kmeans": "best"}': "kmeans must be one of",
    '{"context": "0.txt", "model": "./absent"}': "there is no model at",
    '{"context": "0.txt", "context": "1.txt"}': "a name appears twice",
    '{"context": "0.txt\\u0000"}': '"context" has characters that cannot be in it',
    '{"context": "0.txt", "model": "\\ud800"}': '"model" has characters that cannot be in it',
    '{"context": "~no-such-user/0.txt"}': "No such file",
    '{"context": "0.txt", "model": "~no-such-user/model"}': "there is no model at",
    '{"context": "/dev/null"}': "is a pipe or a device",
}


def test_all_invalid_lines_of_a_list_are_reported_together(place: Path) -> None:
    (place / "empty.txt").write_text(" \n")
    with pytest.raises(ConfigError) as refusal:
        read_jobs(write_list(place, {"context": "0.txt"}, *BAD_LINES))
    title, *faults = str(refusal.value).splitlines()
    assert f"{len(BAD_LINES)} lines to correct; nothing was built" in title
    assert len(faults) == len(BAD_LINES)
    for number, (fault, words) in enumerate(zip(faults, BAD_LINES.values(), strict=True), start=2):
        assert fault.startswith(f"  line {number}: ")
        assert words in fault


def test_unicode_line_separators_do_not_end_a_line_of_a_list(place: Path) -> None:
    name = "0\u2028\x85.txt"
    (place / name).write_text("a text")
    (place / "jobs.jsonl").write_bytes(f'\ufeff{{"context": "{name}"}}\r\n\r{{"context": "0.txt"}}\r'.encode())
    assert [(job.line, job.context.name) for job in read_jobs(place / "jobs.jsonl")] == [(1, name), (3, "0.txt")]


def test_paths_in_a_list_from_stdin_or_a_descriptor_are_relative_to_the_current_directory(
    place: Path, monkeypatch
) -> None:
    monkeypatch.chdir(place)
    line = b'{"context": "0.txt"}\n'
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(line)))
    reader, writer = os.pipe()
    os.write(writer, line)
    os.close(writer)
    (place / "jobs").mkdir()
    file = os.open(write_list(place / "jobs", {"context": "0.txt"}), os.O_RDONLY)
    for source in ("-", f"/dev/fd/{reader}", f"/dev/fd/{file}"):
        assert [job.context for job in read_jobs(Path(source))] == [place / "0.txt"]
    os.close(reader)
    os.close(file)


def test_a_list_without_jobs_is_refused(place: Path) -> None:
    with pytest.raises(ConfigError, match="holds no jobs"):
        read_jobs(write_list(place, ""))
    with pytest.raises(ConfigError, match="No such file"):
        read_jobs(place / "absent.jsonl")


def test_each_job_is_built_once_and_a_failed_job_stops_no_other(
    place: Path, tmp_path: Path, loads: list[str | None]
) -> None:
    (place / "short.txt").write_text("hello")
    file = write_list(
        place,
        {"context": "0.txt", "model": "model"},
        {"context": "0.txt", "model": "hub/absent"},
        {"context": "short.txt", "model": "model"},
        {"context": "1.txt", "model": "model", "preset": "lists"},
        {"context": "0.txt", "model": "model"},
    )
    events: list[tuple[int, BuildState | JobResult]] = []

    def note(job_idx: int, news: BuildState | JobResult) -> None:
        events.append((job_idx, news))

    report = run_batch(read_jobs(file), tmp_path, device="cpu", on_progress=note, on_result=note)
    assert outcomes(report) == ["built", "failed", "failed", "built", "reused"]
    assert "hub/absent could not be loaded" in str(report.results[1].error)
    assert "an index needs at least" in str(report.results[2].error)
    assert loads == [str(place / "model"), "hub/absent"], "a model is loaded once, whatever the order"
    results = [(job_idx, news) for job_idx, news in events if isinstance(news, JobResult)]
    assert results == [(job_idx, report.results[job_idx]) for job_idx in (0, 2, 3, 4, 1)]
    shares = [news.share for job_idx, news in events if job_idx == 3 and isinstance(news, BuildState)]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    for summary in scan_store(tmp_path)[0]:
        verify_artifact(summary.path)
    assert {result.path for result in report.results if result.path} == {s.path for s in scan_store(tmp_path)[0]}
    assert report.to_json()["failed"] == 2
    again = run_batch(read_jobs(file), tmp_path, device="cpu")
    assert outcomes(again) == ["reused", "failed", "failed", "reused", "reused"]


def test_a_context_that_another_process_builds_is_deferred(place: Path, tmp_path: Path, monkeypatch) -> None:
    planned = Mock(side_effect=plan_job)
    monkeypatch.setattr(index_build.batch, "plan_job", planned)
    jobs = read_jobs(write_list(place, *({"context": f"{number}.txt", "model": "model"} for number in range(3))))
    first = plan_job(jobs[0], load_model(str(place / "model"))).spec.artifact_id
    lock = BuildLock(tmp_path / f".building-{first}.lock").acquire()
    order: list[int] = []

    def release_lock(job_idx: int, state: BuildState) -> None:
        if "waiting" in state.where:
            lock.release()

    report = run_batch(
        jobs, tmp_path, on_progress=release_lock, on_result=lambda job_idx, result: order.append(job_idx)
    )
    assert order == [1, 2, 0] and outcomes(report) == ["built"] * 3
    assert planned.call_count == 3, "a text is not tokenised anew when it is looked at again"


def test_an_interrupted_batch_resumes_at_the_layer_where_it_stopped(place: Path, tmp_path: Path) -> None:
    jobs = read_jobs(write_list(place, *({"context": f"{number}.txt", "model": "model"} for number in range(3))))

    def interrupt(job_idx: int, state: BuildState) -> None:
        if (job_idx, state.where) == (1, "layer 3/3 index"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_batch(jobs, tmp_path, device="cpu", on_progress=interrupt)
    states: dict[int, BuildState] = {}
    report = run_batch(jobs, tmp_path, device="cpu", on_progress=states.__setitem__)
    assert outcomes(report) == ["reused", "resumed", "built"]
    assert states[1].first_share == pytest.approx(2 / 3)
    assert [result.tokens_per_s is None for result in report.results] == [True, True, False]


def job(line: int, context_bytes: int) -> Job:
    return Job(line=line, context=Path(f"{line}.txt"), context_bytes=context_bytes, options=BuildOptions())


def test_the_estimate_of_time_left_ignores_reused_work() -> None:
    jobs = [job(1, 100), job(2, 100), job(3, 200)]
    totals = BatchTotals(jobs, now_s=0.0)
    assert totals.totals(0.0).left_s is None
    totals.finish(0, JobResult(jobs[0], "reused", 0.0, context_len=50))
    assert totals.totals(10.0).left_s is None
    # resumed at a half and at three quarters after 10 s, which built 50 of 200 bytes, or 25 of 100 tokens
    totals.update(2, BuildState(100, 0.5, 0.75, ""))
    now = totals.totals(10.0)
    assert now.share == pytest.approx(250 / 400)
    assert now.tokens_per_s == pytest.approx(2.5)
    assert now.left_s == pytest.approx(10 * 150 / 50)
    totals.finish(1, JobResult(jobs[1], "failed", 0.0, error="no"))
    totals.finish(2, JobResult(jobs[2], "resumed", 20.0, context_len=100))
    end = totals.totals(20.0)
    assert (end.num_finished, end.share, end.left_s) == (3, 1.0, 0.0)
    assert end.tokens_per_s == pytest.approx(2.5)


def test_totals_are_not_recomputed_for_small_progress_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    events, totals = JsonBatchProgress([job(1, 100), job(2, 100)]), Mock(wraps=BatchTotals([job(1, 100)], 0.0).totals)
    monkeypatch.setattr(BatchTotals, "totals", totals)
    events.on_progress(0, BuildState(50, 0.0, 0.019, ""))
    totals.assert_not_called()
    events.on_progress(0, BuildState(50, 0.0, 0.021, ""))
    totals.assert_called_once()


def test_the_build_command_exits_with_1_and_a_report_when_a_job_failed(
    place: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    (place / "short.txt").write_text("hello")
    file = write_list(place, {"context": "short.txt"}, {"context": "0.txt"})
    options = ["--jobs", file, "--model", place / "model", "--store", tmp_path, "--device", "cpu", "--json"]
    monkeypatch.setattr(sys, "argv", ["csattn", "build", *map(str, options)])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    assert ended.value.code == 1
    report = json.loads(printed.out)
    assert [(entry["line"], entry["outcome"]) for entry in report["jobs"]] == [(1, "failed"), (2, "built")]
    assert (report["built"], report["failed"]) == (1, 1)
    assert "0.txt built in" in printed.err


def test_json_progress_reports_each_jobs_result_and_no_sync_skips_fsync(
    place: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    """A model that does not fit in memory fails only its own jobs."""

    def require_room(model: str, dtype: str, weights: str | None) -> None:
        if (dtype, weights) == ("float32", "fp8"):
            raise MemoryPlanError("there is no room")

    monkeypatch.setattr("workers.cli.batching.require_room_for_weights", require_room)
    monkeypatch.setattr(os, "fsync", lambda _: pytest.fail("waits for a disk"))
    file = write_list(place, {"context": "0.txt", "weights": "fp8"}, {"context": "1.txt", "dtype": "bfloat16"})
    options = ["--jobs", file, "--model", place / "model", "--store", tmp_path, "--device", "cpu", "--no-sync"]
    monkeypatch.setattr(sys, "argv", ["csattn", "build", *map(str, options), "--progress", "json", "--json"])
    with pytest.raises(SystemExit):
        main()
    printed = capsys.readouterr()
    events = [json.loads(line) for line in printed.err.splitlines()]
    assert [one["progress"] for one in events] == sorted(one["progress"] for one in events)
    assert (events[-1]["progress"], events[-1]["finished"], events[-1]["contexts"]) == (1.0, 2, 2) and len(events) > 4
    jobs = json.loads(printed.out)["jobs"]
    assert [one["job"] for one in events if "job" in one] == jobs
    assert [job["outcome"] for job in jobs] == ["failed", "built"] and "there is no room" in jobs[0]["error"]


@pytest.mark.parametrize("progress", ["auto", "json"])
def test_a_log_that_cannot_be_written_stops_no_build(
    place: Path, tmp_path: Path, capsys, monkeypatch, progress: str
) -> None:
    class Full(StringIO):
        def write(self, _: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    options = "--model", place / "model", "--store", tmp_path, "--device", "cpu", "--progress", progress, "--json"
    for source, result in (
        (("--jobs", write_list(place, {"context": "0.txt"})), "built"),
        (("--context", place / "1.txt"), "artifact"),
        (("--context", place / "none"), "error"),
    ):
        monkeypatch.setattr(sys, "argv", ["csattn", "build", *map(str, source + options)])
        with suppress(SystemExit):
            main()
        assert json.loads(capsys.readouterr().out)[result]


def test_sigterm_reports_finished_jobs_and_that_the_build_can_be_resumed(place, tmp_path, capsys, monkeypatch) -> None:
    file = write_list(place, {"context": "0.txt"}, {"context": "1.txt"})
    options = ["--jobs", file, "--model", place / "model", "--store", tmp_path, "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["csattn", "build", *map(str, options)])
    plan = index_build.batch.plan_job

    def plan_until_sigterm(job: Job, *rest: Any) -> Any:
        if job.context.name == "1.txt":
            os.kill(os.getpid(), signal.SIGTERM)
        return plan(job, *rest)

    monkeypatch.setattr(index_build.batch, "plan_job", plan_until_sigterm)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("nobody took the signal"))
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        signal.signal(signal.SIGTERM, before)
    printed = capsys.readouterr()
    assert (
        ended.value.code == 143
        and "interrupted; a build continues where it stopped when it is run again" in printed.err
    )
    assert "0.txt" in printed.out and "1.txt" not in printed.out and "1 built; " in printed.out


def test_progress_lines_without_a_terminal_show_rate_and_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    jobs, clock = [job(1, 100), job(2, 100)], [0.0]
    with BatchDisplay(jobs, lambda: clock[0]) as display:
        display.on_progress(0, BuildState(50, 0.0, 0.0, "layer 1/2 prefill"))
        clock[0] = 20.0
        display.on_progress(0, BuildState(50, 0.0, 0.5, "layer 2/2 prefill"))
        clock[0] = 40.0
        display.on_result(0, JobResult(jobs[0], "built", 40.0, context_len=50))
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "1.txt layer 2/2 prefill (0/2 contexts, 25 %, 1 tokens/s, 60 s left)",
        "1.txt built in 40.0 s (1/2 contexts, 50 %, 1 tokens/s, 40 s left)",
    ]


def test_the_commands_accept_a_url_as_store(place: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    """A second machine, with a cache of its own, answers from the artifact that the first has built."""
    url = f"file://{tmp_path}/remote"

    def run(*options: object) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["csattn", *map(str, options), "--json"])
        with suppress(SystemExit):
            main()
        printed: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert "error" not in printed, printed
        return printed

    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path / "first"))
    build = ("build", "--context", place / "0.txt", "--model", place / "model", "--device", "cpu", "--store", url)
    built = run(*build)
    assert (built["path"], built["reused"]) == (f"{url}/{built['artifact']}", False)
    jobs = write_list(place, {"context": "0.txt", "model": "model"}, {"context": "1.txt", "model": "model"})
    report = run("build", "--jobs", jobs, "--device", "cpu", "--store", url)
    assert [(one["outcome"], one["path"].startswith(url)) for one in report["jobs"]] == [
        ("reused", True),
        ("built", True),
    ]
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path / "second"))
    assert run(*build)["reused"]
    assert not (tmp_path / "second").exists(), "nothing was built or downloaded"
    assert {one["path"] for one in run("ls", "--store", url)["artifacts"]} == {one["path"] for one in report["jobs"]}
    assert run("inspect", built["path"])["context_len"] == built["context_len"]
    assert run("verify", f"{url}/{built['artifact'][:6]}")["intact"]
    assert not (tmp_path / "second").exists()
    answer = run("generate", built["path"], "--prompt", "x", "--max-new-tokens", 2, "--selector", "exact")
    assert answer["text"] == run("generate", tmp_path / "remote" / built["artifact"], "--prompt", "x",
                                 "--max-new-tokens", 2, "--selector", "exact")["text"]  # fmt: skip
    assert len(list((tmp_path / "second" / "artifacts").iterdir())) == 1
    assert len(run("gc", "--store", url, "--cache-bytes", 0)["removed_copies"]) == 1
    assert not list((tmp_path / "second" / "artifacts").iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "error: build takes --context FILE, --tokens FILE or --jobs FILE"),
        (["--context", "a", "--jobs", "b"], "error: build takes --context FILE, --tokens FILE or --jobs FILE"),
        (["--context", "a", "--ray", "auto"], "error: --ray builds the contexts of a list"),
        (["--jobs", "a", "--ray", "auto", "--no-sync"], "error: --no-sync is for builds in this process"),
    ],
)
def test_contradictory_build_options_are_refused(options: list[str], words: str, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["csattn", "build", *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
