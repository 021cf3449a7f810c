"""A build interrupted at any layer makes the same bytes as an uninterrupted one, and repeats no work."""

from pathlib import Path

import pytest

from csattn.artifact import verify_artifact
from csattn.artifact.lock import BuildLock
from csattn.artifact.writer import ArtifactWriter
from csattn.models import LoadedModel, load_model
from index_build.batch import plan_job, run_batch
from index_build.board import BuildProgress
from index_build.job_list import Job, read_jobs
from index_build.pipeline import BuildReport, build_plan
from tests.index_build.batches import finished_files, hashes, make_place, write_list

NUM_LAYERS = 3


class _Cut(Exception):
    """Ends a build."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    place = make_place(tmp_path_factory.mktemp("interrupted"), 1)
    return read_jobs(write_list(place, {"context": "0.txt", "model": "model"}))[0]


@pytest.fixture(scope="module")
def loaded(job: Job) -> LoadedModel:
    return load_model(job.options.model)


@pytest.fixture(scope="module")
def uninterrupted_hashes(job: Job, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The hash of every file of the store after an uninterrupted build in this process."""
    store = tmp_path_factory.mktemp("in-one-go")
    run_batch([job], store, device="cpu")
    return hashes(store)


def build(job: Job, loaded: LoadedModel, store: Path | str, cut_at: int = NUM_LAYERS) -> BuildReport:
    def cut(progress: BuildProgress) -> None:
        if progress.layer_idx == cut_at:
            raise _Cut

    return build_plan(loaded, plan_job(job, loaded), store, on_progress=cut)


@pytest.mark.parametrize("cut_at", range(NUM_LAYERS))
def test_a_build_interrupted_at_any_layer_makes_the_same_bytes_and_repeats_no_work(
    job: Job, loaded: LoadedModel, uninterrupted_hashes: dict[str, str], tmp_path: Path, cut_at: int
) -> None:
    with pytest.raises(_Cut):
        build(job, loaded, tmp_path, cut_at)
    before = finished_files(tmp_path)
    report = build(job, loaded, tmp_path)
    assert (report.outcome, report.resumed_at) == ("resumed" if cut_at else "built", cut_at)
    assert before.items() <= finished_files(tmp_path).items()
    assert hashes(tmp_path) == uninterrupted_hashes


def test_a_build_uploads_its_artifact_to_a_store_at_a_url(
    job: Job, loaded: LoadedModel, uninterrupted_hashes: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, cache = f"file://{tmp_path}/remote", tmp_path / "cache" / "artifacts"
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path / "cache"))
    report = build(job, loaded, url)
    assert (report.outcome, report.place) == ("built", f"{url}/{report.artifact_id}")
    assert hashes(tmp_path / "remote") == hashes(cache) == uninterrupted_hashes
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path / "elsewhere"))
    assert build(job, loaded, url).outcome == "reused"
    assert not (tmp_path / "elsewhere").exists()


def test_a_second_builder_waits_and_finds_the_artifact(
    job: Job, loaded: LoadedModel, uninterrupted_hashes: dict[str, str], tmp_path: Path
) -> None:
    """It reports once that it waits."""
    plan, calls = plan_job(job, loaded), []
    lock = BuildLock(tmp_path / f".building-{plan.spec.artifact_id}.lock").acquire()

    def build_it() -> None:
        calls.append("waits")
        lock.release()
        build_plan(loaded, plan, tmp_path)

    report = build_plan(loaded, plan, tmp_path, on_wait=build_it)
    assert report.reused and calls == ["waits"]
    verify_artifact(report.path)
    assert hashes(tmp_path) == uninterrupted_hashes


def test_a_build_interrupted_after_its_last_layer_is_completed_without_recomputation(
    job: Job, loaded: LoadedModel, uninterrupted_hashes: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*_: object) -> None:
        raise _Cut

    with monkeypatch.context() as patch:
        patch.setattr(ArtifactWriter, "finish", end)
        with pytest.raises(_Cut):
            build(job, loaded, tmp_path)
    report = build(job, loaded, tmp_path, cut_at=0)
    assert (report.outcome, report.resumed_at) == ("resumed", NUM_LAYERS)
    assert hashes(tmp_path) == uninterrupted_hashes
