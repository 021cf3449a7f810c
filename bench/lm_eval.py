"""What does lm-eval, unmodified, say of the service? RULER's tasks that need no network, by `local-completions`.

    pip install 'lm-eval[ruler,api]' transformers     # in a venv of its own
    python -m bench.lm_eval --lm-eval VENV/bin/lm_eval [--placement device] [--outcomes FILE] [--json FILE]

For each length and task: full attention, `default` and exact Top-K (the others dropped) at 2 and 5 %, each a service of
its own over one store, with the same samples. The first computes their contexts, the others find them. A small model
fails some tasks whatever attends: what tells is the difference from full attention, sample by sample, with its error.
--outcomes keeps what each run gave, and goes on behind it when it is called again.
"""

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.timing import finish, gate, machine
from bench.turns.service import MODEL, serving

TASKS = "niah_single_1", "niah_multikey_2", "ruler_vt", "ruler_cwe", "ruler_fwe"
FULL = "full attention"
AT_ONCE = 8  # requests, of which each has a context of its own
OFFLINE = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    settings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Some samples of one task."""

    task: str
    length: int
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one variant made of a part."""

    task: str
    length: int
    variant: str
    scores: dict[str, float]  # by sample
    prompt_tokens: int
    cached_tokens: int
    seconds: float  # lm-eval's


def variants(placement: str) -> list[Variant]:
    """Exact Top-K reads every key, in numpy: on the CPU, whatever the others have."""
    at, on_cpu = f"engine.placement={placement}", "engine.placement=cpu"
    exact = on_cpu, "engine.selector=exact", "search.rest=none"
    return [
        Variant(FULL, (at, "engine.selector=full")),
        *(Variant(f"default, {keep:.0%}", (at, f"search.keep={keep}")) for keep in (0.02, 0.05)),
        *(Variant(f"exact Top-K, {keep:.0%}", (*exact, f"search.keep={keep}")) for keep in (0.02, 0.05)),
    ]


def parts(options: argparse.Namespace) -> list[Part]:
    return [
        Part(task, length, tuple(range(first, options.limit, options.parts)))
        for length in options.lengths
        for task in options.tasks
        for first in range(min(options.parts, options.limit))
    ]


def judge(part: Part, variant: Variant, store: Path, scratch: Path, options: argparse.Namespace) -> Outcome:
    """lm-eval's run of some samples against a service of their own."""
    settings = [*variant.settings, f"build.dtype={options.dtype}", f"engine.max_context_len={max(options.lengths)}"]
    settings += [f"engine.num_contexts={AT_ONCE}", "limits.request_timeout_s=3600", *options.set]
    with serving(store, *settings) as service, tempfile.TemporaryDirectory(dir=scratch) as directory:
        since = time.perf_counter()
        run_lm_eval(part, f"{service.url}/v1/completions", Path(directory), scratch / "tokenizer", options)
        seconds = time.perf_counter() - since
        scores = read_scores(part, Path(directory))
        tokens = [int(service.metric(f"csattn_{kind}_tokens_total")) for kind in ("prompt", "cached")]
    gate(scores.keys() == set(map(str, part.samples)), f"{part.task}, {variant.name}: scores of {sorted(scores)} came")
    mean = np.mean(list(scores.values()))
    print(f"{part.length} {part.task} {variant.name}: {mean:.3f}, {seconds:.0f} s", flush=True)
    return Outcome(part.task, part.length, variant.name, scores, tokens[0], tokens[1], seconds)


def run_lm_eval(part: Part, url: str, directory: Path, tokenizer: Path, options: argparse.Namespace) -> None:
    """Writes results and samples below the directory."""
    model = {
        "model": MODEL, "base_url": url, "tokenizer": tokenizer, "tokenizer_backend": "huggingface",
        "max_length": 8192, "num_concurrent": AT_ONCE, "timeout": 3600, "max_retries": 5,
    }  # fmt: skip
    command = [
        *options.lm_eval.split(), "run", "--model", "local-completions", "--tasks", part.task,
        "--model_args", ",".join(f"{name}={value}" for name, value in model.items()),
        "--metadata", json.dumps({"max_seq_lengths": [part.length], "tokenizer": str(tokenizer)}),
        "--samples", json.dumps({part.task: part.samples}), "--log_samples", "--output_path", str(directory),
    ]  # fmt: skip
    environment = {**os.environ, **OFFLINE, "TOKENIZERS_PARALLELISM": "false"}
    if options.lm_eval_path is not None:
        environment["PYTHONPATH"] = options.lm_eval_path
    left_s = None if options.seconds is None else max(0.0, options.started_at + options.seconds - time.monotonic())
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=left_s)
    gate(done.returncode == 0, f"lm-eval ended with {done.returncode}: {done.stderr[-2000:]}")


def read_scores(part: Part, directory: Path) -> dict[str, float]:
    [path] = directory.rglob(f"samples_{part.task}_*.jsonl")
    samples = map(json.loads, path.read_text().splitlines())
    return {str(sample["doc_id"]): float(sample[str(part.length)]) for sample in samples}


def table(outcomes: list[Outcome], names: list[str]) -> list[dict[str, Any]]:
    """Of each length, task and variant: the score, and by how much it differs from full attention's, with errors."""
    scores: dict[tuple[int, str], dict[str, dict[str, float]]] = {}
    for of in outcomes:
        scores.setdefault((of.length, of.task), {}).setdefault(of.variant, {}).update(of.scores)
    cases = []
    for length, task in sorted(scores, key=lambda of: (of[0], TASKS.index(of[1]))):
        by_name = scores[length, task]
        for name in [name for name in names if name in by_name]:
            both = sorted(by_name[name].keys() & by_name[FULL].keys())
            values, full = (np.array([by_name[of][sample] for sample in both]) for of in (name, FULL))
            case = {"length": length, "task": task, "variant": name, "samples": len(both)}
            case |= dict(zip(("score", "stderr"), mean_and_error(values), strict=True))
            case |= dict(zip(("difference", "difference_stderr"), mean_and_error(values - full), strict=True))
            cases.append(case)
    return cases


def mean_and_error(values: NDArray[np.float64]) -> tuple[float, float | None]:
    error = float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None
    return round(float(values.mean()), 4), None if error is None else round(error, 4)


def prefills(outcomes: list[Outcome], names: list[str]) -> list[dict[str, Any]]:
    """Of each variant: tokens that were sent, and those of them that had to be computed."""
    rows = []
    for name in names:
        of = [outcome for outcome in outcomes if outcome.variant == name]
        sent, cached = sum(o.prompt_tokens for o in of), sum(o.cached_tokens for o in of)
        seconds = round(sum(o.seconds for o in of), 1)
        rows.append({"variant": name, "sent_tokens": sent, "computed_tokens": sent - cached, "lm_eval_s": seconds})
    return rows


class Outcomes:
    """What was judged: what a file has of earlier runs, and what is added to both."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._lock = path, Lock()
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self.all = [Outcome(**json.loads(line)) for line in lines]

    def has(self, part: Part, variant: Variant) -> bool:
        of = part.task, part.length, variant.name
        found = [o.scores.keys() for o in self.all if (o.task, o.length, o.variant) == of]
        return set(map(str, part.samples)) in found

    def add(self, outcome: Outcome) -> None:
        with self._lock:
            self.all.append(outcome)
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")


def take_cpus(free: "Queue[list[int]]") -> None:
    """This thread, and the processes that it starts, have CPUs of their own."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, free.get())


def shares_of_cpus(processes: int) -> "Queue[list[int]]":
    free: Queue[list[int]] = Queue()
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    for number in range(processes):
        free.put(cpus[number % len(cpus) :: processes])
    return free


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm-eval", default="lm_eval", help="its command, in whatever environment it has")
    parser.add_argument(
        "--lm-eval-path", help="its PYTHONPATH, if not this one's; a folder `site-packages`, for dill's sake"
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 8192])
    parser.add_argument("--variants", nargs="+", default=[], help="besides full attention; else all: 'default, 2%%'")
    parser.add_argument("--limit", type=int, default=50, help="samples of each task and length")
    parser.add_argument("--parts", type=int, default=1, help="that a task's samples are divided into")
    parser.add_argument("--processes", type=int, default=1, help="parts that are judged at the same time")
    parser.add_argument("--placement", default="cpu", help="of full attention and the default")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE, of the services")
    parser.add_argument("--store", type=Path, help="where a part's contexts are until it is judged; else a scratch one")
    parser.add_argument("--seconds", type=float, help="after which runs are given up")
    parser.add_argument("--outcomes", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(namespace=argparse.Namespace(started_at=time.monotonic()))
    from csattn.models import load_model

    judged = [v for v in variants(options.placement) if not options.variants or v.name in (FULL, *options.variants)]
    outcomes, free = Outcomes(options.outcomes), shares_of_cpus(options.processes)
    with (
        tempfile.TemporaryDirectory() as directory,
        ThreadPoolExecutor(options.processes, initializer=take_cpus, initargs=(free,)) as pool,
    ):
        scratch = Path(directory)
        load_model().tokenizer.save_pretrained(scratch / "tokenizer")

        def is_late() -> bool:
            return options.seconds is not None and time.monotonic() > options.started_at + options.seconds

        def judge_part(part: Part) -> None:
            store = (options.store or scratch) / f"{part.task}-{part.length}-{part.samples[0]}"
            for variant in judged:  # the first leaves its contexts to the others
                if not outcomes.has(part, variant) and not is_late():
                    with suppress(subprocess.TimeoutExpired):
                        outcomes.add(judge(part, variant, store, scratch, options))
            if all(outcomes.has(part, variant) for variant in judged):
                shutil.rmtree(store, ignore_errors=True)

        list(pool.map(judge_part, parts(options)))
    names = [variant.name for variant in variants(options.placement)]
    result = {"bench": "lm_eval", "machine": machine(), "model": MODEL, "placement": options.placement}
    result |= {"dtype": options.dtype, "prefills": prefills(outcomes.all, names), "cases": table(outcomes.all, names)}
    finish(result, options.json)


if __name__ == "__main__":
    main()
