"""Builds the same list of contexts on Ray with one GPU and with all, and measures the gain.

    python -m bench.build_gpus --shape llama-3.1-8b --layers 16 --contexts 16 --context-len 65536 [--json FILE]

Contexts are passages of a book, with a token for each byte; weights are random. A batch is timed from its start, so its
seconds include starting processes and loading weights. With n GPUs, `between_s` is the time from the n-th finished
artifact to the last. Gate: every artifact verifies, and is built once. Files go to the temporary directory (TMPDIR).
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.build import random_model
from bench.timing import end_as_interrupted, finish, gate, options_parser
from csattn.artifact import verify_artifact
from csattn.build_options import BuildOptions
from index_build.job_list import Job, read_jobs
from index_build.jobs import run_on_ray
from tests.index_build.batches import write_list

TEXT = Path(__file__).parent / "texts" / "novel.txt"


def make_jobs(place: Path, options: argparse.Namespace) -> list[Job]:
    loaded = random_model(options.shape, options.layers, "cuda")
    loaded.model.save_pretrained(place / "model")
    loaded.tokenizer.save_pretrained(place / "model")
    data = TEXT.read_bytes() * (1 + options.context_len * (options.contexts + 1) // TEXT.stat().st_size)
    text = data.decode("ascii", "ignore")
    for number in range(options.contexts):
        start = number * options.context_len
        (place / f"{number}.txt").write_text(text[start : start + options.context_len])
    lines: list[dict[str, Any] | str] = [{"context": f"{number}.txt"} for number in range(options.contexts)]
    return read_jobs(write_list(place, *lines), BuildOptions(model=str(place / "model"), dtype="bfloat16"))


def run(jobs: list[Job], store: Path, num_gpus: int) -> dict[str, Any]:
    """Build the batch on a Ray cluster of its own, and measure it."""
    import ray

    ended_s: list[float] = []
    ray.init(num_gpus=num_gpus, log_to_driver=False, configure_logging=False, include_dashboard=False)
    try:
        started = time.perf_counter()
        report = run_on_ray(
            jobs, store, device="cuda", on_result=lambda *result: ended_s.append(time.perf_counter() - started)
        )
    finally:
        ray.shutdown()
    gate(report.count("built") == len(jobs), f"not all were built: {[result.error for result in report.results]}")
    for result in report.results:
        verify_artifact(store / f"{result.artifact_id}")
    num_bytes = sum(file.stat().st_size for file in store.rglob("*.safetensors"))
    shutil.rmtree(store)
    case = {
        "num_gpus": num_gpus,
        "seconds": round(report.seconds, 2),
        "first_s": round(ended_s[0], 2),
        "between_s": round(ended_s[-1] - ended_s[num_gpus - 1], 2),  # all but the first num_gpus artifacts
        "tokens": sum(result.context_len for result in report.results),
        "bytes": num_bytes,
    }
    print(case, flush=True)
    return case


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, help="layers of the shape to use [default: all]")
    parser.add_argument("--contexts", type=int, default=16)
    parser.add_argument("--context-len", type=int, default=65536)
    options = parser.parse_args()
    end_as_interrupted()
    num_gpus = torch.cuda.device_count()
    gate(num_gpus > 1, f"this machine has {num_gpus} GPU; it takes two to compare")
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        jobs = make_jobs(place, options)
        torch.cuda.empty_cache()
        cases = [run(jobs, place / "store", count) for count in (1, num_gpus)]
    one, all_gpus = cases
    result = {
        "bench": "build_gpus",
        "shape": options.shape,
        "num_layers": options.layers,
        "contexts": options.contexts,
        "context_len": options.context_len,
        "gain": round(one["seconds"] / all_gpus["seconds"], 3),
        "cases": cases,
        "device": torch.cuda.get_device_name(),
    }
    finish(result, options.json)


if __name__ == "__main__":
    main()
