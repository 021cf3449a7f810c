"""What a step of the CPU engine costs, by the number of rows and of contexts.

    python -m bench.serve_step [--rows 1,2,4,8,16] [--question 16,64] [--threads N] [--contexts 3] [--rounds N]
                               [--model M --dtype bfloat16 --weights int4] [--store DIR] [--json FILE]

Rows belong to as many requests, each of which decodes, or are all part of one request's question. Gate: each request's
tokens and logits are bit-identical among 16 rows and alone. All settings take turns, so that other load on the machine
affects all of them. The calling thread's CPU time is also reported; with one thread, it is all CPU time.
"""

import time
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.records import called
from bench.timing import finish, gate, options_parser
from csattn.artifact import Artifact, open_artifact
from csattn.config import SearchConfig, preset
from csattn.cpus import available_cpus
from csattn.models import LoadedModel, load_model
from csattn.models.prompt import context_ids
from csattn.models.weight_sizes import device_bytes
from index_build.pipeline import build_artifact
from workers.engine.cpu.engine import CpuEngine
from workers.serving.step_engine import StepRow

TEXT = Path(__file__).parent / "texts" / "novel.txt"
CONTEXT_LEN = 4096
STARTS = (0, 2700, 5400)  # of the contexts in the text
CONFIG = SearchConfig(keep=0.05, lookahead=1)
WARM_UP = 3
TAIL_CAPACITY = 256


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--rows", default="1,2,4,8,16")
    parser.add_argument(
        "--question",
        default="16,64",
        help="rows of a step that all belong to one request's question; either its last row or all of them give logits",
    )
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument("--contexts", type=int, default=len(STARTS))
    parser.add_argument("--model", help="model directory, .gguf file or hub id [default: the demo model]")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--weights", help="format that linear layers are rounded to: int4 or fp8")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--store", type=Path, default=Path("~/.cache/csattn/bench").expanduser())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    loaded = load_model(args.model, dtype=args.dtype, weights=args.weights)
    artifacts = _artifacts(loaded, args.store, args.contexts)
    counts = [int(count) for count in args.rows.split(",")]
    of_questions = [int(count) for count in args.question.split(",") if count]
    settings = [_Setting(num_contexts, num_rows) for num_contexts in (1, len(artifacts)) for num_rows in counts]
    settings += [
        _Setting(1, num_rows, is_question=True, all_ask=all_ask)
        for num_rows in of_questions
        for all_ask in (False, True)
    ]
    max_requests, most = sum(setting.max_requests for setting in settings), max(*counts, *of_questions)
    with CpuEngine(
        loaded, max_rows=most, max_requests=max_requests, tail_capacity=TAIL_CAPACITY, num_threads=args.threads
    ) as engine:
        for context_id, artifact in enumerate(artifacts):
            engine.add_context(context_id, artifact)
        _gate(engine, max(counts), len(artifacts))
        steps = _measure(engine, settings, args.rounds)
    for step in steps:
        print(
            f"{step['contexts']} contexts, {step['rows']:2} rows of {step['requests']:2} requests"
            f"{'' if step['all_ask'] else ', the last asks'}: "
            f"{step['p50_ms']:6.1f} ms a step (CPU "
            f"{step['cpu_p50_ms']:.1f}, search "
            f"{step['search_ms']:.1f}, attention {step['attend_ms']:.1f}), {step['tokens_per_s']:6.1f} tokens/s, "
            f"{step.get('times_one_row')} x one row (by CPU time {step.get('times_one_row_by_cpu')})"
        )
    of = {"model": called(loaded.name), "dtype": args.dtype, "weights": args.weights}
    of |= {"weights_bytes": device_bytes(loaded.model)}  # as steps read them, rounded
    finish({"bench": "serve_step", **of, "threads": args.threads, "steps": steps}, args.json)


def _artifacts(loaded: LoadedModel, store: Path, num_contexts: int) -> list[Artifact]:
    ids = context_ids(loaded.tokenizer, TEXT.read_text(), "none")
    config = preset("default")
    parts = [ids[start : start + CONTEXT_LEN] for start in STARTS[:num_contexts]]
    return [open_artifact(build_artifact(loaded, part, config, store).path) for part in parts]


def _gate(engine: CpuEngine, num_rows: int, num_contexts: int) -> None:
    together = _run(engine, list(range(num_rows)), num_contexts, 6)
    for request in {0, num_rows // 2, num_rows - 1}:
        token_ids, logits = together[request]
        alone_ids, alone_logits = _run(engine, [request], num_contexts, 6)[request]
        gate(token_ids == alone_ids, f"request {request} said {token_ids} among others and {alone_ids} alone")
        gate(bool((logits == alone_logits).all()), f"request {request} had other logits among others than alone")


def _run(engine: CpuEngine, requests: list[int], num_contexts: int, num_steps: int) -> dict[int, tuple[list[int], Any]]:
    """Run requests together for some steps; return each one's tokens and last logits.

    A request's number is its slot, and its first token is 1000 more.
    """
    for request in requests:
        engine.open(request, request % num_contexts, CONFIG, "csattn")
    token_ids = {request: [1000 + request] for request in requests}
    for _ in range(num_steps):
        result = engine.step([StepRow(request, token_ids[request][-1]) for request in requests], want_logits=True)
        for row, request in enumerate(requests):
            token_ids[request].append(int(result.next_ids[row]))
    assert result.logits is not None
    logits = {request: result.logits[row].copy() for row, request in enumerate(requests)}
    for request in requests:
        engine.close_request(request)
    return {request: (token_ids[request], logits[request]) for request in requests}


@dataclass(frozen=True, slots=True)
class _Setting:
    num_contexts: int
    num_rows: int
    is_question: bool = False
    all_ask: bool = True  # whether all rows want a next token, or only the last one

    @property
    def max_requests(self) -> int:
        return 1 if self.is_question else self.num_rows


def _measure(engine: CpuEngine, settings: list[_Setting], rounds: int) -> list[dict[str, Any]]:
    """Measure all settings in turns."""
    steppers, first_request_slot = [], 0
    for setting in settings:
        steppers.append(_Stepper(engine, first_request_slot, setting))
        first_request_slot += setting.max_requests
    for number in range(WARM_UP + rounds):
        for stepper in steppers:
            stepper.step(counts=number >= WARM_UP)
    steps = [stepper.to_json() for stepper in steppers]
    for step in steps:
        for one in steps:
            if one["contexts"] == step["contexts"] and one["rows"] == one["requests"] == 1:
                step["times_one_row"] = round(step["rows"] * one["p50_ms"] / step["p50_ms"], 2)
                step["times_one_row_by_cpu"] = round(step["rows"] * one["cpu_p50_ms"] / step["cpu_p50_ms"], 2)
    return steps


class _Stepper:
    """The requests of one setting, and the times of their steps."""

    def __init__(self, engine: CpuEngine, first_request_slot: int, setting: _Setting) -> None:
        self._engine, self._setting = engine, setting
        self._request_slots = range(first_request_slot, first_request_slot + setting.max_requests)
        self._rows = [
            StepRow(request_slot, 1000 + row, wants_token=setting.all_ask or row + 1 == setting.num_rows)
            for row, request_slot in enumerate(islice(cycle(self._request_slots), setting.num_rows))
        ]
        self._num_fed = 0  # of each request
        self._times_ms: list[float] = []
        self._cpu_ms: list[float] = []
        self._search_s = self._attend_s = 0.0
        self._open()

    def _open(self) -> None:
        for number, request_slot in enumerate(self._request_slots):
            self._engine.open(request_slot, number % self._setting.num_contexts, CONFIG, "csattn")

    def step(self, counts: bool) -> None:
        more = len(self._rows) // len(self._request_slots)
        if self._num_fed + more > TAIL_CAPACITY:
            for request_slot in self._request_slots:
                self._engine.close_request(request_slot)
            self._num_fed = 0
            self._open()
        self._num_fed += more
        before, started, cpu_started = self._engine.counts(), time.perf_counter(), time.thread_time()
        result = self._engine.step(self._rows)
        ended, cpu_ended, after = time.perf_counter(), time.thread_time(), self._engine.counts()
        if not self._setting.is_question:
            self._rows = [
                StepRow(row.request_slot, int(token_id))
                for row, token_id in zip(self._rows, result.next_ids, strict=True)
            ]
        if counts:
            self._times_ms.append((ended - started) * 1e3)
            self._cpu_ms.append((cpu_ended - cpu_started) * 1e3)
            self._search_s += after.search_s - before.search_s
            self._attend_s += after.attend_s - before.attend_s

    def to_json(self) -> dict[str, Any]:
        p50_ms, num_steps = float(np.median(self._times_ms)), len(self._times_ms)
        return {
            "contexts": self._setting.num_contexts,
            "rows": len(self._rows),
            "requests": len(self._request_slots),
            "all_ask": self._setting.all_ask,
            **_summary(self._times_ms, self._cpu_ms),
            "tokens_per_s": round(len(self._rows) / p50_ms * 1e3, 1),
            "search_ms": round(self._search_s / num_steps * 1e3, 3),
            "attend_ms": round(self._attend_s / num_steps * 1e3, 3),
        }


def _summary(times_ms: list[float], cpu_ms: list[float]) -> dict[str, float]:
    """Summarise the times; cpu_p50_ms is the calling thread's."""
    return {
        "p50_ms": round(float(np.median(times_ms)), 3),
        "min_ms": round(min(times_ms), 3),
        "cpu_p50_ms": round(float(np.median(cpu_ms)), 3),
    }


if __name__ == "__main__":
    main()
