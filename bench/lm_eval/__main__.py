"""Scores the service by an unmodified lm-eval: RULER's tasks that need no network, by `local-completions`.

    pip install 'lm-eval[ruler,api]' transformers     # in a venv of its own
    python -m bench.lm_eval --lm-eval VENV/bin/python [--model FILE] [--placement device] [--outcomes FILE] ...

For each length and task: full attention, and `default` and exact Top-K (which drops the other rows) at 2 and 5 %. Each
has a service of its own over one store, with the same samples; the first service computes the contexts, and the others
find them. A small model fails some tasks with any attention, so the figure to look at is the difference from full
attention, taken sample by sample, with its standard error. --outcomes saves each run's scores; a later call continues
there.
"""

import argparse
import os
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from multiprocessing.connection import Client
from pathlib import Path
from queue import Queue
from threading import Lock
from typing import Any

import numpy as np
import torch

from bench.lm_eval.outcomes import FULL, TASKS, Outcome, Outcomes, Part, Variant, prefills, table
from bench.records import called
from bench.timing import finish, gate, machine, options_parser
from bench.turns.service import MODEL, serving

NUM_CONCURRENT = 8  # concurrent requests, each with a context of its own
MOST_ANSWERED = 256  # tokens of an answer; RULER's tasks ask for 128 at most
OFFLINE = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")


def variants(placement: str) -> list[Variant]:
    """Return the variants. Exact Top-K reads every key, so it runs on the CPU unless the placement is `device`."""
    at = f"engine.placement={placement}"
    exact = at if placement == "device" else "engine.placement=cpu", "engine.selector=exact", "search.rest=none"
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


class LmEval:
    """An lm-eval process for a task at one length. Several threads may use it at the same time."""

    def __init__(self, task: str, length: int, scratch: Path, options: argparse.Namespace) -> None:
        self._of, self._tokenizer = f"{task}, {length}", str(scratch / "tokenizer")
        self._length = length + MOST_ANSWERED
        self._address, self._log = str(scratch / f"{task}-{length}"), scratch / f"{task}-{length}.log"
        server = str(Path(__file__).with_name("server.py"))
        command = [*options.lm_eval.split(), server, self._address, task, str(length), self._tokenizer]
        environment = {**os.environ, **OFFLINE, "TOKENIZERS_PARALLELISM": "false"}
        if options.lm_eval_path is not None:
            environment["PYTHONPATH"] = options.lm_eval_path
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stderr=log, stdout=log)

    def scores(self, model: str, url: str, samples: tuple[int, ...], until: float | None) -> dict[str, float]:
        """Return the scores by sample. Raises TimeoutError when time.monotonic() exceeds `until`."""
        settings = {
            "model": model, "base_url": url, "tokenizer": self._tokenizer, "tokenizer_backend": "huggingface",
            "max_length": self._length, "num_concurrent": NUM_CONCURRENT, "timeout": 3600, "max_retries": 5,
        }  # fmt: skip
        while not os.path.exists(self._address):
            gate(self._process.poll() is None, f"lm-eval of {self._of} ended: {self._log.read_text()[-2000:]}")
            require_time(until)
            time.sleep(0.1)
        with Client(self._address, "AF_UNIX") as connection:
            connection.send((settings, list(samples)))
            while not connection.poll(0.5):
                require_time(until)
            try:
                scores: dict[str, float] = connection.recv()
            except EOFError:
                gate(False, f"lm-eval's run of {self._of} ended: {self._log.read_text()[-2000:]}")
        return scores

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def require_time(until: float | None) -> None:
    if until is not None and time.monotonic() > until:
        raise TimeoutError("the time for these runs is over")


def judge(part: Part, variant: Variant, lm_eval: LmEval, store: Path, options: argparse.Namespace) -> Outcome:
    """Score some samples by lm-eval, with a service of their own."""
    settings = [*variant.settings, f"build.dtype={options.dtype}", f"engine.max_context_len={max(options.lengths)}"]
    settings += [f"engine.num_contexts={NUM_CONCURRENT}", "limits.request_timeout_s=3600", *options.set]
    with serving(store, *settings, model=options.model) as service:
        since = time.perf_counter()
        scores = lm_eval.scores(service.model, f"{service.url}/v1/completions", part.samples, options.until)
        seconds = time.perf_counter() - since
        tokens = [int(service.metric(f"csattn_{kind}_tokens_total")) for kind in ("prompt", "cached")]
    gate(scores.keys() == set(map(str, part.samples)), f"{part.task}, {variant.name}: scores of {sorted(scores)} came")
    mean = np.mean(list(scores.values()))
    print(f"{part.length} {part.task} {variant.name}: {mean:.3f}, {seconds:.0f} s", flush=True)
    return Outcome(part.task, part.length, variant.name, scores, tokens[0], tokens[1], seconds)


def take_cpus(free: "Queue[list[int]]") -> None:
    """Bind this thread, and so the processes that it starts, to CPUs of its own."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, free.get())


def shares_of_cpus(processes: int) -> "Queue[list[int]]":
    free: Queue[list[int]] = Queue()
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    for number in range(processes):
        free.put(cpus[number % len(cpus) :: processes])
    return free


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--lm-eval", required=True, help="Python of the environment that has lm-eval")
    parser.add_argument(
        "--lm-eval-path",
        help="PYTHONPATH of that environment, if it differs; a folder named `site-packages`, which dill requires",
    )
    parser.add_argument("--model", type=Path, help="model directory or .gguf file [default: the demo model]")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 8192])
    parser.add_argument(
        "--variants",
        nargs="+",
        default=[],
        help="variants besides full attention, such as 'default, 2%%' [default: all]",
    )
    parser.add_argument("--limit", type=int, default=50, help="samples of each task and length")
    parser.add_argument("--parts", type=int, default=1, help="number of parts that a task's samples are divided into")
    parser.add_argument("--processes", type=int, default=1, help="parts that are evaluated at the same time")
    parser.add_argument("--placement", default="cpu", help="placement of full attention and of the preset default")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--set", action="append", default=[], help="setting of the services, KEY=VALUE; may be repeated"
    )
    parser.add_argument(
        "--store",
        type=Path,
        help="store that keeps a part's contexts until it is evaluated [default: a temporary directory]",
    )
    parser.add_argument("--seconds", type=float, help="time after which runs are stopped")
    parser.add_argument("--outcomes", type=Path)
    options = parser.parse_args()
    options.until = None if options.seconds is None else time.monotonic() + options.seconds
    from csattn.models import load_model

    judged = [v for v in variants(options.placement) if not options.variants or v.name in (FULL, *options.variants)]
    model = MODEL if options.model is None else called(options.model)
    of = f"{model}, {options.placement}, {', '.join([options.dtype, *options.set])}"
    outcomes, free = Outcomes(options.outcomes, of), shares_of_cpus(options.processes)
    with (
        tempfile.TemporaryDirectory() as directory,
        ExitStack() as stack,
        ThreadPoolExecutor(options.processes, initializer=take_cpus, initargs=(free,)) as pool,
    ):
        scratch, started, starting = Path(directory), dict[tuple[str, int], LmEval](), Lock()
        load_model(options.model, dtype=options.dtype).tokenizer.save_pretrained(scratch / "tokenizer")

        def lm_eval_of(part: Part) -> LmEval:
            with starting:
                of = part.task, part.length
                if of not in started:
                    started[of] = stack.enter_context(closing(LmEval(*of, scratch, options)))
                return started[of]

        def judge_part(part: Part) -> None:
            store = (options.store or scratch) / f"{part.task}-{part.length}-{part.samples[0]}"
            with suppress(TimeoutError):
                for variant in judged:  # the first one stores the contexts that the others use
                    if not outcomes.has(part, variant):
                        require_time(options.until)
                        outcomes.add(judge(part, variant, lm_eval_of(part), store, options))
                shutil.rmtree(store, ignore_errors=True)

        list(pool.map(judge_part, parts(options)))
    names = [variant.name for variant in variants(options.placement)]
    device = "cpu" if options.placement == "cpu" else torch.cuda.get_device_name()
    result: dict[str, Any] = {"bench": "lm_eval", "machine": machine(), "model": model, "device": device}
    result |= {"placement": options.placement, "dtype": options.dtype}
    result |= {"prefills": prefills(outcomes.all, names), "cases": table(outcomes.all, names)}
    finish(result, options.json)


if __name__ == "__main__":
    main()
