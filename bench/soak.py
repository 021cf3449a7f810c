"""Do many streams at once stay right, and does the service stay as it is? Streams on a few contexts, for a while.

python -m bench.soak --store STORE [--seconds 600] [--streams 16]          a backend in this process
python -m bench.soak --url http://127.0.0.1:8000 --pid PID [...]           a server, and the processes it consists of

First every question is asked alone: that gives the answers that are right, and the rate of one at a time. Then all
streams ask at once. Gate: no error, every answer equal to the one given alone, no word of another context.
"""

import argparse
import asyncio
import contextlib
import os
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.soak_targets import Question, Reply, Target, in_process, over_http
from bench.timing import finish, gate, machine

TEXT = Path(__file__).parent / "texts" / "novel.txt"
PASSWORDS = ("KESTREL-4417", "MARIGOLD-9052", "OBSIDIAN-2738")
ASKED = (
    "What is the password?",
    "Who is told of here, and what happens?",
    "Tell me a line of it.",
    "What is it about?",
)
WARM_SHARE = 0.25  # of the time: memory is looked at after it
SAMPLE_S = 0.5


@dataclass
class Soak:
    """What came of the streams."""

    replies: list[tuple[float, Reply]] = field(default_factory=list)  # when it was asked
    errors: Counter[str] = field(default_factory=Counter)
    num_wrong: int = 0
    num_foreign: int = 0
    memory: list[tuple[float, float, float]] = field(default_factory=list)  # seconds, RSS and unshared MB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a server; without it, a backend in this process is asked")
    parser.add_argument("--key", default=os.environ.get("CSATTN_SERVER_API_KEYS", "none"), help="API key")
    parser.add_argument("--pid", type=int, action="append", help="a process of the server; its children count too")
    parser.add_argument("--model", help="without --url: as csattn build has it")
    parser.add_argument("--store", type=Path, help="without --url: where contexts are kept; else a scratch directory")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--context-chars", type=int, default=8000)
    parser.add_argument("--new-tokens", type=int, default=48, help="of the longest answers")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if len(PASSWORDS) * options.context_chars > (length := len(TEXT.read_text())):
        parser.error(f"--context-chars is {options.context_chars}, the text has {length} for {len(PASSWORDS)} contexts")
    finish(asyncio.run(run(options)), options.json)


async def run(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        store = options.store or Path(scratch)
        opened = over_http(options.url, options.key) if options.url else None
        async with opened or in_process(options.model, store, options.streams) as target:
            result = await measure(target, options)
    return result


async def measure(target: Target, options: argparse.Namespace) -> dict[str, Any]:
    started = time.perf_counter()
    for number, password in enumerate(PASSWORDS):
        await target.build(f"soak-{number}", text_of(number, password, options.context_chars))
    built_s = time.perf_counter() - started
    questions = make_questions(options.new_tokens)
    started = time.perf_counter()
    alone = {question: await target.ask(question) for question in questions}
    alone_s = time.perf_counter() - started
    alone_rate = sum(reply.num_tokens for reply in alone.values()) / alone_s
    print(f"one at a time: {alone_rate:.1f} tokens/s; now {options.streams} streams", flush=True)
    soak, soaked_s = await run_streams(target, alone, options)
    gate(not soak.errors, f"requests failed: {dict(soak.errors)}")
    gate(not soak.num_wrong, f"{soak.num_wrong} of {len(soak.replies)} answers differ from those given alone")
    gate(not soak.num_foreign, f"{soak.num_foreign} answers tell of another context")
    rate = sum(reply.num_tokens for _, reply in soak.replies) / soaked_s
    return {
        "target": options.url or "in process",
        "model": options.model or ("the server's" if options.url else "demo"),
        "streams": options.streams,
        "contexts": len(PASSWORDS),
        "context_chars": options.context_chars,
        "seconds": round(soaked_s, 1),
        "build_s": round(built_s, 1),
        "requests": len(soak.replies),
        "errors": 0,
        "wrong_answers": 0,
        "foreign_words": 0,
        "tokens_per_s": round(rate, 1),
        "tokens_per_s_one_at_a_time": round(alone_rate, 1),
        "times_one_at_a_time": round(rate / alone_rate, 2),
        **latencies(soak, options.streams),
        **memory_of(soak),
        "machine": machine(),
    }


async def run_streams(target: Target, alone: dict[Question, Reply], options: argparse.Namespace) -> tuple[Soak, float]:
    soak, questions = Soak(), list(alone)
    started = time.perf_counter()
    ends_at = started + options.seconds

    async def stream(number: int) -> None:
        rng = np.random.default_rng(number)
        while time.perf_counter() < ends_at:
            question = questions[int(rng.integers(len(questions)))]
            asked_at = time.perf_counter()
            try:
                reply = await target.ask(question)
            except Exception as error:  # whatever a client may meet is what is counted here
                soak.errors[f"{type(error).__name__}: {str(error)[:200]}"] += 1
                continue
            soak.replies.append((asked_at, reply))
            soak.num_wrong += reply.text != alone[question].text
            foreign = [word for i, word in enumerate(PASSWORDS) if question.context != f"soak-{i}"]
            soak.num_foreign += any(word in reply.text for word in foreign)

    watching = asyncio.create_task(watch_memory(soak, options.pid or [os.getpid()], started))
    await asyncio.gather(*map(stream, range(options.streams)))
    watching.cancel()
    return soak, time.perf_counter() - started


async def watch_memory(soak: Soak, pids: list[int], started: float) -> None:
    processes = [process for pid in pids for process in [psutil.Process(pid), *psutil.Process(pid).children(True)]]
    while True:
        rss = unshared = 0.0
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                info = process.memory_info()
                rss += info.rss / 1e6
                unshared += (info.rss - getattr(info, "shared", 0)) / 1e6
        soak.memory.append((time.perf_counter() - started, rss, unshared))
        await asyncio.sleep(SAMPLE_S)


def text_of(number: int, password: str, num_chars: int) -> str:
    """A stretch of the novel with the context's password in its midst."""
    text = TEXT.read_text()[number * num_chars : (number + 1) * num_chars]
    half = text.find(" ", len(text) // 2)
    return f"{text[:half]}\n\nThe password is {password}. Whoever asks may have it.\n\n{text[half:]}"


def make_questions(new_tokens: int) -> list[Question]:
    """Every question of every context; half of them drawn with a seed."""
    questions = []
    for number in range(len(PASSWORDS)):
        for at, text in enumerate(ASKED):
            length = max(1, new_tokens * (at + 1) // len(ASKED))
            questions.append(Question(f"soak-{number}", text, length, 0.8 * (at % 2), seed=at))
    return questions


def latencies(soak: Soak, num_streams: int) -> dict[str, float]:
    """TTFT and TPOT in ms. The streams' first requests, which all come at once, are left out."""
    settled = soak.replies[num_streams:]
    gate(len(settled) > 0, "no stream came to its second answer; give more --seconds")
    ttft = [1e3 * (reply.first_at - asked_at) for asked_at, reply in settled]
    tpot = [1e3 * (r.ended_at - r.first_at) / (r.num_tokens - 1) for _, r in settled if r.num_tokens > 1]
    named = {"ttft": ttft, "tpot": tpot or [0.0]}
    return {
        f"{name}_p{share}_ms": round(float(np.percentile(values, share)), 1)
        for name, values in named.items()
        for share in (50, 99)
    }


def memory_of(soak: Soak) -> dict[str, float]:
    """MB, and how fast they grow once it is warm: a line through the samples."""
    seconds, rss, unshared = np.array(soak.memory).T
    warm = seconds >= WARM_SHARE * seconds[-1]
    minutes = seconds[warm] / 60
    slopes = [float(np.polyfit(minutes, values[warm], 1)[0]) if warm.sum() > 2 else 0.0 for values in (rss, unshared)]
    return {
        "rss_mb": round(float(rss[-1]), 1),
        "rss_mb_per_min": round(slopes[0], 3),
        "unshared_mb_per_min": round(slopes[1], 3),
    }


if __name__ == "__main__":
    main()
