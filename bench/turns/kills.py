"""Is anything wrong after a service is killed at random moments of its conversations?

    python -m bench.turns.kills [--kills 100] [--seed 0] [--model DIR] [--longest-s 8] [--json FILE]

Three conversations run at the same time, one of them about a document that becomes a context. The process that decodes
is killed (`kill -9`) at a random time, and another continues with the interrupted turns. Now and then a conversation
begins again with a new salt, for which nothing is kept. Gates: every token of whole and of interrupted answers is that
of a process that was never killed and keeps nothing; no process ends except by its kill; every file with a block's
name is whole.

The processes are forked from one that has loaded the model, so that a hundred of them take minutes.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.timing import end_as_interrupted, finish, gate, options_parser
from bench.turns.service import TEXTS
from csattn.models import LoadedModel, load_model
from offload.block_files import SUFFIX, fault_of
from workers.engine.cpu.engine import CpuEngine
from workers.serving.kept_store import DIRECTORY
from workers.serving.local import LocalBackend
from workers.serving.messages import Ask, Done, Sampling, Turn
from workers.settings import KeptSettings, ModelSettings, Settings, StoreSettings

NUM_TURNS, MAX_TOKENS = 3, 20
LONGEST_S = 8.0
BEGINNINGS = ((0, 300), (900, 560), (4000, 90))  # passages of the text: start, and number of characters
DOCUMENT = 1  # the conversation whose document becomes a context


def ask_of(conversation: int, turn: int, answers: list[str], salt: str) -> Ask:
    text = (TEXTS / "dialogue.txt").read_text()
    start, num = BEGINNINGS[conversation]
    asked = [text[start : start + num], *(f"Then what? Say {number}." for number in range(1, NUM_TURNS))]
    turns = [Turn("user", asked[0])]
    for number in range(turn):
        turns += [Turn("assistant", answers[number]), Turn("user", asked[number + 1])]
    sampling = Sampling(max_new_tokens=MAX_TOKENS)
    return Ask(request_id="kills", context="", turns=tuple(turns), cache_salt=salt, sampling=sampling)


def make_backend(loaded: LoadedModel, model: str | None, store: Path, keeps: bool) -> LocalBackend:
    kept = KeptSettings(context_tokens=500, **({} if keeps else {"memory_bytes": 0}))
    settings = Settings(store=StoreSettings(path=store), model=ModelSettings(name=model), kept=kept)
    engine = CpuEngine(loaded, max_rows=16, max_requests=4, tail_capacity=700, num_threads=1)
    return LocalBackend(engine, loaded, settings)


async def talk(backend: LocalBackend, plan: list[dict[str, Any]], goes_on: bool) -> None:
    """Continue each conversation from its turn in the plan, and report every piece of text as it arrives."""

    async def go_on(number: int, state: dict[str, Any]) -> None:
        turn, salt, answers = state["turn"], state["salt"], state["answers"]
        while True:
            text = ""
            async with aclosing(backend.generate(ask_of(number, turn, answers, salt))) as events:
                async for event in events:
                    text += "" if isinstance(event, Done) else event.text
                    line = {"conversation": number, "turn": turn, "text": text, "whole": isinstance(event, Done)}
                    write_line(line)
            answers = [*answers[:turn], text, *answers[turn + 1 :]]
            turn += 1
            if turn == NUM_TURNS:
                if not goes_on:
                    return
                turn, salt = 0, state["next_salt"]

    async with backend:
        write_line({"begun": os.getpid()})
        await asyncio.gather(*(go_on(number, state) for number, state in enumerate(plan)))


def write_line(event: dict[str, Any]) -> None:
    """Report in one write, so that a line is whole or missing, however the process ends."""
    os.write(1, json.dumps(event).encode() + b"\n")


def serve_lives(model: str | None) -> None:
    """Fork a process for each line of standard input, which has its store and the plan of its conversations."""
    torch.set_num_threads(1)
    loaded = load_model(model, "float32")
    for line in sys.stdin:
        life = json.loads(line)
        if (child := os.fork()) == 0:
            backend = make_backend(loaded, model, Path(life["store"]), life["keeps"])
            asyncio.run(talk(backend, life["plan"], life["keeps"]))
            os._exit(0)
        write_line({"over": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])})


@dataclass
class Kills:
    """The state of the conversations, and counts of their answers."""

    server: "subprocess.Popen[str]"
    rng: np.random.Generator
    finds_context: bool = False
    answers: list[list[str]] = field(default_factory=lambda: [[""] * NUM_TURNS for _ in BEGINNINGS])
    turns: list[int] = field(default_factory=lambda: [0] * len(BEGINNINGS))
    salts: list[str] = field(default_factory=lambda: [""] * len(BEGINNINGS))
    whole: int = 0
    tokens_seen: int = 0

    def live(self, store: Path, dies_after_s: float | None) -> None:
        """Run one process and kill it after dies_after_s; None: let it finish all conversations (the reference)."""
        plan = [
            {"turn": turn, "salt": salt, "answers": answers, "next_salt": self._next_salt(number)}
            for number, (turn, salt, answers) in enumerate(zip(self.turns, self.salts, self.answers, strict=True))
        ]
        assert self.server.stdin is not None and self.server.stdout is not None
        life = {"store": str(store), "keeps": dies_after_s is not None, "plan": plan}
        self.server.stdin.write(json.dumps(life) + "\n")
        self.server.stdin.flush()
        for line in self.server.stdout:
            event = json.loads(line)
            if "over" in event:
                wanted = 0 if dies_after_s is None else -signal.SIGKILL
                gate(event["over"] == wanted, f"a process ended with {event['over']}, not {wanted}")
                return
            if "begun" in event:
                if dies_after_s is not None:
                    kill_later(event["begun"], dies_after_s)
                continue
            self.check_event(event, plan, is_reference=dies_after_s is None)
        raise RuntimeError("the process that forks the others ended")

    def check_event(self, event: dict[str, Any], plan: list[dict[str, Any]], is_reference: bool) -> None:
        number, turn, text = event["conversation"], event["turn"], event["text"]
        if is_reference:
            self.answers[number][turn] = text
            return
        want = self.answers[number][turn]
        right = text == want if event["whole"] else want.startswith(text)
        gate(right, f"conversation {number}, turn {turn}: {text!r} instead of {want!r}")
        self.tokens_seen += 1
        if event["whole"]:
            self.whole += 1
            self.turns[number] = (turn + 1) % NUM_TURNS
            if turn + 1 == NUM_TURNS:
                self.salts[number] = plan[number]["next_salt"]

    def _next_salt(self, number: int) -> str:
        is_plain = self.finds_context and number == DOCUMENT
        return "" if is_plain or self.rng.random() < 0.6 else f"salt {self.rng.integers(2**31)}"


def kill_later(pid: int, seconds: float) -> None:
    threading.Timer(seconds, os.kill, (pid, signal.SIGKILL)).start()


def run(
    num_kills: int, seed: int, model: str | None, longest_s: float = LONGEST_S, finds_context: bool = False
) -> dict[str, Any]:
    """Run the reference and then num_kills processes.

    finds_context: they share the reference's store, and so find the document's context, which takes long to build.
    """
    command = [sys.executable, "-m", "bench.turns.kills", "--lives", *(["--model", model] if model else [])]
    started, num_files, num_half = time.perf_counter(), 0, 0
    rng = np.random.default_rng(seed)
    with (
        tempfile.TemporaryDirectory() as directory,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server,
    ):
        kills, store = Kills(server, rng, finds_context), Path(directory, "store")
        try:
            kills.live(store if finds_context else Path(directory, "reference"), None)
            for _ in range(num_kills):
                kills.live(store, float(rng.uniform(0.0, longest_s)))
                files = list((store / DIRECTORY).glob(f"*{SUFFIX}"))
                faults = [fault for path in files if (fault := fault_of(np.fromfile(path, np.uint8)))]
                gate(not faults, f"a file {faults}")
                num_files = max(num_files, len(files))
                num_half += len(list((store / DIRECTORY).glob("*.partial"))) > 0
        finally:
            server.send_signal(signal.SIGKILL)
    return {
        "kills": num_kills,
        "whole_answers": kills.whole,
        "pieces": kills.tokens_seen,
        "wrong_tokens": 0,
        "files": num_files,
        "damaged_files": 0,
        "kills_within_a_write": num_half,
        "seconds": round(time.perf_counter() - started, 1),
    }


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="model directory [default: the demo model]")
    parser.add_argument(
        "--longest-s", type=float, default=LONGEST_S, help="most seconds that a process lives once it has begun"
    )
    parser.add_argument("--lives", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    end_as_interrupted()
    if options.lives:
        serve_lives(options.model)
        return
    result = run(options.kills, options.seed, options.model, options.longest_s)
    finish({"bench": "turns.kills", "seed": options.seed, **result}, options.json)


if __name__ == "__main__":
    main()
