"""What happens to running answers when a process of the service is killed?

    python -m bench.faults [--kills N] [-- what `csattn serve` takes, such as --set engine.placement=host]

Runs `csattn serve` on Ray, with search workers. In each trial, a few streams are running when one process gets SIGKILL
at a random time: a search worker, the attention worker, or the ingress replica, in turns.
Gate: every stream ends with the right tokens, or with an error event after the first of them; none hangs or breaks off
without an error event; then the service is ready again and answers as before.
"""

import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import openai
import psutil

from bench.timing import end_as_interrupted, finish, gate, machine, options_parser
from tests.workers.service.serving import Service, serving

TEXT = Path(__file__).parent / "texts" / "novel.txt"
QUESTIONS = ("What is it about?", "Who is told of here?", "Tell me a line of it.")
# target -> title of its process
TARGETS = {
    "search worker": "ray::SearchWorker",
    "attention worker": "ray::AttentionActor",
    "ingress replica": "ray::ServeReplica:csattn",
}
HUNG_S = 180.0


@dataclass
class Stream:
    """One streamed answer."""

    text: str = ""
    first_at: float | None = None
    ended_at: float = 0.0
    longest_pause_s: float = 0.0
    error: Exception | None = None

    def outcome(self, wanted: str, killed_at: float) -> str:
        if self.error is None and self.text == wanted:
            return "answered" if self.ended_at > killed_at else "ended before"
        if self.error is None:
            return "wrong"
        if not wanted.startswith(self.text):
            return "wrong"
        # told: an error event or reply of the service; anything else is a broken connection
        return "told" if isinstance(self.error, openai.APIError) and self.error.code == "worker_lost" else "cut off"


@dataclass
class Trial:
    """The effects of one kill. Times are in seconds from the kill."""

    outcomes: list[str]
    end_s: list[float]  # when each stream ended
    pause_s: list[float]  # the longest pause between two pieces of each stream
    ready_s: float
    back_s: float  # until another process has taken its place
    same_answer: bool


@dataclass
class Plan:
    """The questions, and the right answers (`wanted`)."""

    model: str
    questions: Sequence[str]
    num_tokens: int
    wanted: list[str] = field(default_factory=list)


def prepare(service: Service, plan: Plan) -> None:
    """Ask the questions one at a time, and keep the answers as the right ones."""
    for question in plan.questions:
        plan.wanted.append("".join(service.ask(plan.model, question, plan.num_tokens)))


def try_kill(service: Service, plan: Plan, target: str, share: float) -> Trial:
    """Kill a process of the kind `target` when a `share` of all answers' characters has arrived."""
    num_chars = share * sum(map(len, plan.wanted))
    streams = [Stream() for _ in plan.questions]
    with ThreadPoolExecutor(len(streams)) as pool:
        for stream, question in zip(streams, plan.questions, strict=True):
            pool.submit(follow, stream, service, plan, question)
        while sum(len(stream.text) for stream in streams) < num_chars and not all(s.ended_at for s in streams):
            time.sleep(0.001)
        victims = processes(service, target)
        gate(bool(victims), f"the service has no {target}")
        victim = random.choice(sorted(victims))
        killed_at = time.monotonic()
        os.kill(victim, signal.SIGKILL)
    service.wait_until_ready(HUNG_S)
    ready_s = time.monotonic() - killed_at
    while len(processes(service, target) - {victim}) < len(victims):
        gate(time.monotonic() - killed_at < HUNG_S, f"no {target} has come in place of the one that was killed")
        time.sleep(0.01)
    back_s = time.monotonic() - killed_at
    again = ["".join(service.ask(plan.model, question, plan.num_tokens)) for question in plan.questions[:1]]
    return Trial(
        [stream.outcome(wanted, killed_at) for stream, wanted in zip(streams, plan.wanted, strict=True)],
        [stream.ended_at - killed_at for stream in streams],
        [stream.longest_pause_s for stream in streams],
        ready_s,
        back_s,
        again == plan.wanted[:1],
    )


def follow(stream: Stream, service: Service, plan: Plan, question: str) -> None:
    last = time.monotonic()
    try:
        for piece in service.ask(plan.model, question, plan.num_tokens):
            now = time.monotonic()
            if stream.first_at is not None:
                stream.longest_pause_s = max(stream.longest_pause_s, now - last)
            stream.first_at, last = stream.first_at or now, now
            stream.text += piece
    except Exception as error:
        stream.error = error
    finally:
        stream.ended_at = time.monotonic()


def processes(service: Service, target: str) -> set[int]:
    """Return the ids of the service's processes of that kind."""
    found = set()
    for process in psutil.Process(service.process.pid).children(recursive=True):
        try:
            title = process.cmdline()
            if title and title[0].startswith(TARGETS[target]) and process.status() != psutil.STATUS_ZOMBIE:
                found.add(process.pid)
        except psutil.NoSuchProcess:
            continue
    return found


def summary(trials: Sequence[Trial]) -> dict[str, Any]:
    """Summarise the trials of one target."""
    outcomes = Counter(outcome for trial in trials for outcome in trial.outcomes)
    by_end: dict[str, list[float]] = {"answered": [], "told": []}
    for trial in trials:
        for outcome, seconds in zip(trial.outcomes, trial.end_s, strict=True):
            by_end.setdefault(outcome, []).append(seconds)
    return {
        "kills": len(trials),
        "streams": dict(outcomes),
        "same_request_again": sum(trial.same_answer for trial in trials),
        "told_after_s": spread(by_end["told"]),
        "answered_after_s": spread(by_end["answered"]),
        "longest_pause_s": spread([pause for trial in trials for pause in trial.pause_s]),
        "ready_after_s": spread([trial.ready_s for trial in trials]),
        "replaced_after_s": spread([trial.back_s for trial in trials]),
    }


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    return {"p50": round(float(np.median(seconds)), 3), "max": round(max(seconds), 3)}


def require_sound(target: str, trial: Trial) -> None:
    right = {"answered", "told", "ended before"}
    gate(set(trial.outcomes) <= right, f"a killed {target}: streams were {', '.join(trial.outcomes)}")
    gate(trial.same_answer, f"a killed {target}: the same request then had another answer")


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--kills", type=int, default=30, help="kills of each kind of process")
    parser.add_argument("--model", help="model directory, .gguf file or hub id, as csattn serve takes it")
    parser.add_argument("--store", type=Path, help="store that keeps the context [default: a temporary directory]")
    parser.add_argument("--context-chars", type=int, default=8000)
    parser.add_argument("--num-tokens", type=int, default=48)
    parser.add_argument("--search-workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("serve", nargs="*", help="options of `csattn serve`, after --")
    options = parser.parse_args()
    end_as_interrupted()
    random.seed(options.seed)
    with tempfile.TemporaryDirectory() as scratch:
        model = ["--model", options.model] if options.model else []
        searchers = ["--set", f"engine.num_search_workers={options.search_workers}"]
        with serving("--store", str(options.store or scratch), *model, *searchers, *options.serve) as service:
            service.register("faults", TEXT.read_text()[: options.context_chars])
            name = service.get("/v1/contexts/faults").json()["model"]
            plan = Plan(name, QUESTIONS, options.num_tokens)
            prepare(service, plan)
            trials: dict[str, list[Trial]] = {target: [] for target in TARGETS}
            for number in range(options.kills):
                for target in TARGETS:
                    trial = try_kill(service, plan, target, random.uniform(0.0, 0.8))
                    require_sound(target, trial)
                    trials[target].append(trial)
                    print(f"{number + 1}/{options.kills} {target}: {trial}", flush=True)
    result = {target: summary(of_target) for target, of_target in trials.items()}
    header = {"bench": "faults", "machine": machine(), "model": options.model or "smollm2-135m", "serve": options.serve}
    header |= {"search_workers": options.search_workers, "seed": options.seed}
    finish({**header, **result}, options.json)


if __name__ == "__main__":
    main()
