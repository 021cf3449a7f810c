"""A batch on a Ray cluster of this machine, where builders fail, a node is lost, or jobs share a context."""

import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from csattn.artifact import scan_store, verify_artifact
from csattn.errors import ArtifactError, ConfigError
from index_build.batch import run_batch
from index_build.job_list import read_jobs
from index_build.jobs import run_on_ray
from index_build.needs import TaskNeeds, choose_needs
from index_build.tasks import Builder
from tests.index_build import mishaps
from tests.index_build.batches import finished_files, hashes, make_place, write_list

CPU_NODE, BIG_NODE, GPU_NODE = {"CPU": 4.0}, {"CPU": 64.0}, {"CPU": 16.0, "GPU": 2.0}


@pytest.mark.parametrize(
    ("nodes", "device", "num_threads", "needs", "room"),
    [
        ([CPU_NODE, BIG_NODE], "auto", None, TaskNeeds("cpu", 4), 17),
        ([BIG_NODE], "auto", None, TaskNeeds("cpu", 8), 8),
        ([CPU_NODE, BIG_NODE], "cpu", 5, TaskNeeds("cpu", 5), 12),
        ([{}, {"CPU": 1.0}], "auto", None, TaskNeeds("cpu", 1), 1),
        ([CPU_NODE, GPU_NODE], "auto", None, TaskNeeds("cuda", 8), 2),
        ([GPU_NODE], "cuda", 16, TaskNeeds("cuda", 16), 2),
        ([{"CPU": 2.0, "GPU": 4.0}], "auto", None, TaskNeeds("cuda", 1), 4),
        ([GPU_NODE], "cpu", None, TaskNeeds("cpu", 8), 2),
    ],
)
def test_choose_needs_fits_builds_to_the_nodes_of_a_cluster(
    nodes, device: str, num_threads: int | None, needs: TaskNeeds, room: int
) -> None:
    assert choose_needs(nodes, device, num_threads) == needs
    assert needs.room(nodes) == room


@pytest.mark.parametrize(
    ("device", "num_threads", "words"),
    [
        ("cuda", None, "the cluster has none"),
        ("auto", 5, "no node of the cluster has 5 CPU"),
        ("auto", 0, "at least 1"),
        ("auto", 10**6, "--threads must be at most 4096, got 1000000; one for each CPU is enough"),
    ],
)
def test_resources_that_no_node_offers_are_refused(device: str, num_threads: int | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        choose_needs([CPU_NODE], device, num_threads)


def test_a_missing_ray_is_reported_with_the_command_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'csattn\[serve\]'"):
        run_on_ray([], tmp_path)


def test_a_sigterm_while_ray_starts_raises_system_exit_and_shuts_ray_down(tmp_path: Path, monkeypatch) -> None:
    """It raises SystemExit, which a caller may catch."""
    done: list[str] = []
    ray = ModuleType("ray")
    ray.is_initialized = lambda: False
    ray.init = lambda **_: sys.exit(signal.SIGTERM)
    ray.shutdown = lambda: done.append("shutdown")
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(SystemExit) as ended:
        run_on_ray([], tmp_path, "local")
    assert ended.value.code == 143 and done == ["shutdown"]


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[tuple[Any, Any]]:
    """A cluster of two nodes of one CPU each, and the node that may be removed. This process is connected to it.

    Ray counts one GPU in each node.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # read when ray is imported
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray = pytest.importorskip("ray", reason="the package ray is not installed; pip install 'csattn[serve]'")
        from ray.cluster_utils import Cluster

        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 1, "include_dashboard": False}
        )
        node = cluster.add_node(num_cpus=1, num_gpus=1)
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        yield cluster, node
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, as the tasks do: sums of floats depend on how threads divide them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_three_builders_of_one_context_make_one_artifact(two_nodes: Any, tmp_path: Path, monkeypatch) -> None:
    """The first builder that indexes its last layer is killed."""
    monkeypatch.setattr("index_build.jobs.Builder", mishaps.DiesOnce)
    place, store = make_place(tmp_path / "place", 1), tmp_path / "store"
    jobs = read_jobs(write_list(place, *[{"context": "0.txt", "model": "model"}] * 3))
    lines: list[int] = []
    report = run_on_ray(
        jobs, store, device="cpu", num_threads=1, on_result=lambda job_idx, result: lines.append(result.job.line)
    )
    assert sorted(result.outcome for result in report.results) == sorted(["resumed"] + ["reused"] * 2)
    assert sum(result.attempts for result in report.results) == 3 + 1
    assert [result.num_built for result in report.results if result.outcome == "resumed"] == [1]
    assert sorted(lines) == list(range(1, 4))
    assert [entry.name for entry in store.iterdir()] == [report.results[0].artifact_id]
    run_batch(jobs[:1], tmp_path / "in-one-go", device="cpu")
    assert hashes(store) == hashes(tmp_path / "in-one-go")


def test_each_gpu_keeps_one_builder_process_that_is_replaced_if_it_fails(
    two_nodes: Any, tmp_path: Path, monkeypatch
) -> None:
    """If it is killed or fails, another one replaces it."""
    monkeypatch.setattr("index_build.jobs.Builder", mishaps.BuilderOnCpu)
    place, store = make_place(tmp_path / "place", 6), tmp_path / "store"
    (place / "5.txt").rename(place / "breaks.txt")
    names = [*"01", "breaks", *"23"]
    lines: list[dict[str, Any] | str] = [{"context": f"{name}.txt", "model": "model"} for name in names]
    lines.append({"context": "4.txt", "model": "model", "preset": "lists", "num_centroids": 16})
    jobs = read_jobs(write_list(place, *lines))
    report = run_on_ray(jobs, store, num_threads=1)
    errors = [result.error for result in report.results]
    assert errors == [None, None, "RuntimeError: CUDA error", None, None, None]
    assert sum(result.attempts for result in report.results) == 6 + 1
    did = [line.split() for line in (tmp_path / "did").read_text().splitlines()]
    assert 2 <= len({process for process, _ in did}) <= 4
    assert sorted(name for _, name in did) == [*"01234", "breaks"]
    [broken] = (number for number, (_, name) in enumerate(did) if name == "breaks")
    assert did[broken][0] not in {process for process, _ in did[broken + 1 :]}
    del jobs[2]
    run_batch(jobs, tmp_path / "in-one-go", device="cpu")
    assert hashes(store) == hashes(tmp_path / "in-one-go")


def test_a_job_fails_if_builder_processes_keep_dying_as_they_start(two_nodes: Any, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("index_build.jobs.Builder", mishaps.BuilderThatDies)
    monkeypatch.setattr("index_build.jobs._MAX_LOST", 2)
    place = make_place(tmp_path / "place", 1)
    report = run_on_ray(read_jobs(write_list(place, {"context": "0.txt", "model": "model"})), tmp_path / "store")
    assert "die as they start" in (report.results[0].error or "")


def test_a_job_fails_if_its_workers_keep_dying(two_nodes: Any, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("index_build.jobs.Builder", mishaps.DiesOverEach)
    monkeypatch.setattr("index_build.jobs.MAX_ATTEMPTS", 2)
    place = make_place(tmp_path / "place", 1)
    jobs = read_jobs(write_list(place, {"context": "0.txt", "model": "model"}))
    [result] = run_on_ray(jobs, tmp_path / "store", device="cpu", num_threads=1).results
    assert "its worker died 2 times" in (result.error or "") and result.attempts == 2


def test_a_lost_node_loses_no_finished_work(two_nodes: Any, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("index_build.jobs.Builder", mishaps.HangsOnTheLostNode)
    cluster, node = two_nodes
    place, store = make_place(tmp_path / "place", 6), tmp_path / "store"
    jobs = read_jobs(write_list(place, *({"context": f"{number}.txt", "model": "model"} for number in range(6))))
    run_batch(jobs[:1], store, device="cpu")
    (tmp_path / "lost-node").write_text(node.node_id)
    finished: dict[str, int] = {}

    def remove_node_during_build() -> None:
        mishaps.wait_for(tmp_path / "hangs")
        finished.update(finished_files(store))
        cluster.remove_node(node, allow_graceful=False)

    remover = threading.Thread(target=remove_node_during_build)
    remover.start()
    report = run_on_ray(jobs, store, device="cpu", num_threads=1)
    remover.join()
    assert sorted(result.outcome for result in report.results) == ["built"] * 4 + ["resumed", "reused"]
    assert max(result.attempts for result in report.results) == 2
    assert sum(result.num_built for result in report.results) == 4 * 3 + 1
    assert len(finished) > 3 * 2
    assert finished.items() <= finished_files(store).items(), "something was made twice"
    for summary in scan_store(store)[0]:
        verify_artifact(summary.path)
    assert {result.artifact_id for result in report.results} == {
        summary.artifact_id for summary in scan_store(store)[0]
    }
    assert len(scan_store(store)[0]) == len(list(store.iterdir())) == 6


def test_builds_on_a_cluster_are_uploaded_to_a_store_at_a_url(two_nodes: Any, tmp_path: Path, monkeypatch) -> None:
    """A worker that cannot see the directory of the build raises an error."""
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path / "cache"))
    place, url = make_place(tmp_path / "place", 1), f"file://{tmp_path}/remote"
    jobs = read_jobs(write_list(place, *[{"context": "0.txt", "model": "model"}] * 2))
    report = run_on_ray(jobs, url, device="cpu", num_threads=1)
    assert sorted(result.outcome for result in report.results) == ["built", "reused"]
    assert {result.path for result in report.results} == {f"{url}/{report.results[0].artifact_id}"}
    assert hashes(tmp_path / "remote") == hashes(tmp_path / "cache" / "artifacts")
    [again] = run_on_ray(jobs[:1], url, device="cpu", num_threads=1).results
    assert (again.outcome, again.num_built) == ("reused", 0)
    with pytest.raises(ArtifactError, match="is not there on this node; give a store that every node sees"):
        Builder().run_job(jobs[0], tmp_path, tmp_path / "elsewhere" / "marker", "cpu", 1, 0, False, None)


def test_an_unreachable_cluster_is_refused_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="the package ray is not installed; pip install 'csattn[serve]'")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=r"cannot reach a Ray cluster at '127.0.0.1:1'"):
        run_on_ray([], tmp_path, "127.0.0.1:1")
