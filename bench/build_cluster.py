"""A batch of contexts on a cluster of two nodes, one of which is lost half-way; then eight builders of one context.

    python -m bench.build_cluster [--contexts 20] [--tokens 2000] [--heads 1] [--model DIR | --demo] [--json FILE]

Gate: every artifact verifies and has the bytes of a build in one process; no file that was finished when the node was
lost is made again; eight builders make one artifact. The nodes are processes of this machine with a CPU each, and the
model is a small random one unless another is named: what is measured is what a loss costs, not how fast a cluster is.
"""

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.timing import finish, gate, machine
from csattn.artifact import list_store, verify_artifact
from csattn.build_options import BuildOptions
from index_build.batch import BatchReport, run_batch
from index_build.job_list import Job, read_jobs
from index_build.jobs import run_on_ray
from tests.index_build.batches import finished_files, hashes, write_list
from tests.tiny import byte_tokenizer, make_model

TEXT = Path(__file__).parent / "texts" / "novel.txt"
_POLL_S = 0.02


def make_jobs(place: Path, model: str | None, num_contexts: int, num_tokens: int) -> list[Job]:
    """Contexts of different text and about that many tokens; the random model's tokens are bytes."""
    if model is None:
        sizes = {"num_hidden_layers": 8, "hidden_size": 128, "max_position_embeddings": 65536}
        make_model("llama", **sizes).save_pretrained(place / "model")
        byte_tokenizer().save_pretrained(place / "model")
        model = str(place / "model")
    text = TEXT.read_text()
    num_chars = num_tokens * (1 if (place / "model").exists() else 4)
    text *= 1 + num_chars * (num_contexts + 1) // len(text)
    for number in range(num_contexts):
        (place / f"{number}.txt").write_text(f"{number}. {text[number * num_chars : (number + 1) * num_chars]}")
    lines: list[dict[str, Any] | str] = [{"context": f"{number}.txt"} for number in range(num_contexts)]
    return read_jobs(write_list(place, *lines), BuildOptions(model=None if model == "demo" else model))


@contextmanager
def cluster_of(num_nodes: int, **of_node: int) -> Iterator[Any]:
    """A cluster of nodes on this machine. of_node: as Ray takes it, such as num_cpus."""
    os.environ.update({"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"})
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**of_node, "include_dashboard": False})
    try:
        for _ in range(num_nodes - 1):
            cluster.add_node(**of_node)
        yield cluster
    finally:
        cluster.shutdown()


@contextmanager
def two_nodes() -> Iterator[tuple[Any, Any]]:
    """A cluster, and the node of it that may be lost; this process is connected."""
    with cluster_of(2, num_cpus=1) as cluster:
        import ray

        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        try:
            yield cluster, *cluster.worker_nodes
        finally:
            ray.shutdown()


def lose_a_node(jobs: list[Job], store: Path, cluster: Any, node: Any) -> dict[str, Any]:
    """Build all jobs, and remove the node when half of them are in the store."""
    before: dict[str, int] = {}
    lost_s = 0.0
    ended = threading.Event()

    def remove() -> None:
        nonlocal lost_s
        while len(list_store(store)) < len(jobs) // 2:
            if ended.wait(_POLL_S):
                return
        before.update(finished_files(store))
        lost_s = time.perf_counter() - started
        cluster.remove_node(node, allow_graceful=False)

    started = time.perf_counter()
    remover = threading.Thread(target=remove, daemon=True)
    remover.start()
    try:
        report = run_on_ray(jobs, store, num_threads=1)
    finally:
        ended.set()
        remover.join()
    after = finished_files(store)

    gate(report.count("built") == len(jobs), f"not all were built: {[result.error for result in report.results]}")
    gate(lost_s > 0, "the batch ended before the node was lost")
    made_again = [name for name, inode in before.items() if after.get(name) != inode]
    gate(not made_again, f"made again after the node was lost: {made_again[:3]}")
    return {
        "seconds": round(report.seconds, 2),
        "lost_after_s": round(lost_s, 2),
        "files_when_lost": len(before),
        "files_made_again": len(made_again),
        "contexts_with_lost_pieces": sum(result.attempts > 1 for result in report.results),
        **pieces(report),
    }


def pieces(report: BatchReport) -> dict[str, int]:
    return {
        "prefilled_layers": sum(result.prefilled_layers for result in report.results),
        "indexed_layers": sum(result.indexed_layers for result in report.results),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--model", help="a model directory, or demo for the installed SmolLM2 [default: a random one]")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    result: dict[str, Any] = {"bench": "build_cluster", "contexts": given.contexts, "tokens": given.tokens}
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        jobs = make_jobs(place, given.model, given.contexts, given.tokens)
        in_one_go = run_batch(jobs, place / "in-one-go", device="cpu", num_threads=1)
        gate(in_one_go.count("built") == len(jobs), f"one process: {[one.error for one in in_one_go.results]}")
        result["one_process_s"] = round(in_one_go.seconds, 2)
        with two_nodes() as (cluster, node):
            warm = run_on_ray(jobs, place / "undisturbed", num_threads=1)
            gate(warm.count("built") == len(jobs), f"undisturbed: {[one.error for one in warm.results]}")
            result["undisturbed"] = {"seconds": round(warm.seconds, 2), **pieces(warm)}
            result["node_lost"] = lose_a_node(jobs, place / "store", cluster, node)
            eight = run_on_ray([jobs[0]] * 8, place / "eight", num_threads=1)
        wanted = hashes(place / "in-one-go")
        gate(hashes(place / "undisturbed") == wanted, "a cluster's bytes are not those of one process")
        gate(hashes(place / "store") == wanted, "after a loss the bytes are not those of one process")
        for summary in list_store(place / "store"):
            verify_artifact(summary.path)
        gate(len(list((place / "eight").iterdir())) == 1, "eight builders left more than one artifact")
        gate(eight.count("built") == 1 and eight.count("reused") == 7, "eight builders built more than once")
        result["eight_builders"] = {"seconds": round(eight.seconds, 2), "artifacts": 1, **pieces(eight)}
    lost = result["node_lost"]
    print(f"{given.contexts} contexts: one process {result['one_process_s']} s, two nodes {warm.seconds:.1f} s, "
          f"with one lost after {lost['lost_after_s']} s {lost['seconds']} s")  # fmt: skip
    print(f"{lost['files_when_lost']} files were finished by then, {lost['files_made_again']} of them made again")
    finish({**result, "machine": machine()}, given.json)


if __name__ == "__main__":
    main()
