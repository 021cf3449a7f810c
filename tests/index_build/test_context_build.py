"""A build in pieces: the same bytes as in one go, wherever it is interrupted, and nothing done twice."""

from contextlib import suppress
from pathlib import Path

import pytest

from csattn.artifact import verify_artifact
from csattn.models import LoadedModel, load_model
from index_build.batch import plan_job, result_of, run_batch
from index_build.board import BuildProgress
from index_build.context_build import MAX_ATTEMPTS, BuildState, ContextBuild
from index_build.job_list import Job, read_jobs
from index_build.pieces import Piece, perform
from index_build.pipeline import build_plan
from index_build.plan import Plan
from tests.index_build.batches import finished_files, hashes, make_place, write_list

NUM_LAYERS = 3


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    place = make_place(tmp_path_factory.mktemp("pieces"), 1)
    return read_jobs(write_list(place, {"context": "0.txt", "model": "model"}))[0]


@pytest.fixture(scope="module")
def loaded(job: Job) -> LoadedModel:
    return load_model(job.options.model)


@pytest.fixture(scope="module")
def in_one_go(job: Job, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The hash of every file of the store after a build in this process."""
    store = tmp_path_factory.mktemp("in-one-go")
    run_batch([job], store, device="cpu")
    return hashes(store)


class _Cut(Exception):
    """Ends a piece."""


def do(piece: Piece, build: ContextBuild, job: Job, loaded: LoadedModel, cut_at: int = NUM_LAYERS) -> Plan | None:
    """What an executor does for that piece. cut_at: the layer at which it is interrupted."""

    def cut(progress: BuildProgress) -> None:
        if progress.layer_idx == cut_at:
            raise _Cut

    if build.plan is None:
        return plan_job(job, loaded)
    perform(piece, build.plan, build.store, loaded, 2, cut)
    return None


def work(build: ContextBuild, job: Job, loaded: LoadedModel, cut_at: int = NUM_LAYERS) -> list[str]:
    """Do all pieces, up to that layer; return their kinds."""
    kinds = []
    with suppress(_Cut):
        while (piece := build.due()) is not None:
            kinds.append(piece.kind)
            build.start(piece)
            build.settle(piece, do(piece, build, job, loaded, cut_at))
    build.abandon()
    return kinds


def test_interrupted_anywhere_it_makes_the_same_bytes_and_nothing_twice(
    job: Job, loaded: LoadedModel, in_one_go: dict[str, str], tmp_path: Path
) -> None:
    for cut_at in range(NUM_LAYERS):
        store = tmp_path / str(cut_at)
        first, second = ContextBuild(store), ContextBuild(store)
        work(first, job, loaded, cut_at)
        assert first.outcome is None
        before = finished_files(store)
        work(second, job, loaded)
        assert second.outcome == ("resumed" if cut_at else "built")
        assert (second.resumed_at, second.num_built) == (cut_at, NUM_LAYERS - cut_at)
        assert before.items() <= finished_files(store).items()
        assert hashes(store) == in_one_go


def test_a_store_behind_a_url_gets_the_artifact_from_any_worker(
    job: Job, loaded: LoadedModel, in_one_go: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, cache = f"file://{tmp_path}/remote", tmp_path / "cache" / "artifacts"
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path / "cache"))
    first = ContextBuild(url)
    work(first, job, loaded)
    result = result_of(job, first)
    assert (result.outcome, result.path) == ("built", f"{url}/{result.artifact_id}")
    assert hashes(tmp_path / "remote") == hashes(cache) == in_one_go
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path / "elsewhere"))
    second = ContextBuild(url)
    assert work(second, job, loaded) == ["plan"]
    assert second.outcome == "reused"
    assert not (tmp_path / "elsewhere").exists()


def test_pieces_take_over_from_a_build_in_one_go(
    job: Job, loaded: LoadedModel, in_one_go: dict[str, str], tmp_path: Path
) -> None:
    def interrupt(job_idx: int, state: BuildState) -> None:
        if state.where == "layer 2/3 index":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_batch([job], tmp_path, device="cpu", on_progress=interrupt)
    build = ContextBuild(tmp_path)
    assert work(build, job, loaded) == ["plan", "layers"]
    assert (build.outcome, build.num_built) == ("resumed", 2)
    assert hashes(tmp_path) == in_one_go


def test_a_second_builder_waits_and_finds_the_artifact(job: Job, loaded: LoadedModel, tmp_path: Path) -> None:
    first, second = ContextBuild(tmp_path), ContextBuild(tmp_path)
    for build in (first, second):
        piece = build.due()
        assert piece is not None
        build.settle(piece, do(piece, build, job, loaded))
    assert first.due() and not second.due()
    assert second.is_waiting and not first.is_waiting
    work(first, job, loaded)
    assert not second.due()
    assert (first.outcome, second.outcome) == ("built", "reused")
    assert second.artifact_id is not None
    verify_artifact(tmp_path / second.artifact_id)


def test_a_build_in_this_process_waits_for_another_builder(
    job: Job, loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """... which takes it a while, and of which it tells once."""
    plan = plan_job(job, loaded)
    other = ContextBuild(tmp_path, plan)
    assert other.due(), "it has the lock"
    did: list[str] = []

    def look_again(seconds: float) -> None:
        did.append("looks again")
        if len(did) == 4:
            work(other, job, loaded)

    monkeypatch.setattr("index_build.pipeline.time.sleep", look_again)
    report = build_plan(loaded, plan, tmp_path, on_wait=lambda: did.append("waits"))
    assert did == ["waits", *["looks again"] * 3]
    assert report.reused and other.outcome == "built"


def test_a_piece_whose_workers_always_die_fails_its_context(tmp_path: Path) -> None:
    build = ContextBuild(tmp_path)
    for _ in range(MAX_ATTEMPTS):
        assert build.outcome is None
        piece = build.due()
        assert piece is not None
        build.start(piece)
        assert build.due() is None
        build.lose(piece, "power")
    assert build.outcome == "failed"
    assert build.error == f"its worker died {MAX_ATTEMPTS} times, last of power"


def test_a_worker_that_dies_behind_the_last_layer_leaves_a_whole_artifact(
    job: Job, loaded: LoadedModel, in_one_go: dict[str, str], tmp_path: Path
) -> None:
    """... and nothing else is due while it is at work, whatever it has finished."""
    build = ContextBuild(tmp_path, plan_job(job, loaded))
    layers = build.due()
    assert layers is not None and build.needs_model
    build.start(layers)
    do(layers, build, job, loaded)
    assert build.due() is None and build.outcome is None, "it may still be writing"
    build.lose(layers, "a node that left")
    assert build.due() is None
    assert build.outcome == "built" and not build.needs_model
    assert hashes(tmp_path) == in_one_go
