"""How does a service cope with many conversations? Replays a seeded trace of them by OpenAI's client.

python -m bench.load --url http://127.0.0.1:8000 [--pid PID] [--contexts 8] [--context-chars 8000] [--sessions 40]
                     [--per-minute 30] [--turns 4] [--think-s 3] [--answer-tokens 32] [--zipf 1.1] [--selector full]
                     [--named] [--clients 16] [--for-s 600] [--alone-first]
python -m bench.load --store DIR ... -- [what `csattn serve` takes, such as --local --set engine.context_bytes=N]

Sessions begin at random times. Each is about one of the contexts (most sessions are about a few of them: Zipf), and has
a random number of turns, with time to think between them. As chat programs do, each turn sends the whole conversation:
the document as the system message, and as `model` the model without a context. With --named, the documents are contexts
that were registered before and are named in `model`. With --alone-first, all first questions are asked one by one
before the trace begins. Gate: no request fails; conversations that are equal so far get the same answer, in any session
and at any time; and in every sample, the contexts that the service holds stay within its budget.
"""

import argparse
import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.service_watch import ServiceWatch
from bench.timing import end_as_interrupted, finish, gate, machine, percentiles_ms
from tests.workers.service.serving import Service, serving

TEXTS = Path(__file__).parent / "texts"
QUESTIONS = (
    "What is it about?",
    "Who is told of?",
    "Where does it happen?",
    "Tell me a line of it.",
    "And then?",
    "Say that in fewer words.",
)
FEW_QUESTIONS = 3  # a session's first question is one of these, so that sessions have conversations in common
TIMEOUT_S = 1800.0  # of a client that waits for its context
RETRY_S = 0.5  # until a turn whose worker was lost is sent again


@dataclass(frozen=True, slots=True)
class Session:
    """A planned conversation."""

    begins_s: float
    context: int
    questions: tuple[str, ...]
    think_s: tuple[float, ...]  # pause before each question


@dataclass(frozen=True, slots=True)
class TurnResult:
    """The result of one turn; times are in seconds from sending it."""

    turn: int
    first_s: float
    whole_s: float
    ended_at: float  # perf_counter's
    new_tokens: int
    prompt_tokens: int
    cached_tokens: int
    num_lost: int = 0  # its answers that ended with an error event because the worker was lost
    differs: bool = False  # from an earlier answer in the same conversation


Answers = dict[tuple[int, tuple[str, ...]], str]  # (context, questions so far) -> answer


def make_trace(options: argparse.Namespace) -> list[Session]:
    rng = np.random.default_rng(options.seed)
    shares = 1.0 / np.arange(1, options.contexts + 1) ** options.zipf
    begins = np.cumsum(rng.exponential(60.0 / options.per_minute, options.sessions))
    sessions = []
    for begins_s in begins:
        turns = int(min(rng.geometric(1.0 / options.turns), 3 * options.turns))
        question_ids = [int(rng.integers(FEW_QUESTIONS)), *rng.integers(len(QUESTIONS), size=turns - 1)]
        think = rng.exponential(options.think_s, turns)
        think[0] = 0.0
        context = int(rng.choice(options.contexts, p=shares / shares.sum()))
        sessions.append(Session(float(begins_s), context, tuple(QUESTIONS[i] for i in question_ids), tuple(think)))
    return sessions


def first_questions(options: argparse.Namespace) -> list[Session]:
    """Return sessions of one turn that ask every possible first question about every context."""
    pairs = [(context, question) for question in QUESTIONS[:FEW_QUESTIONS] for context in range(options.contexts)]
    return [Session(0.05 * i, context, (question,), (0.0,)) for i, (context, question) in enumerate(pairs)]


def context_text(number: int, num_chars: int) -> str:
    """Return a passage of the texts in bench/texts; after their end they begin again, shifted."""
    whole = "\n\n".join(path.read_text() for path in sorted(TEXTS.glob("*.txt")))
    at = number * num_chars + number * num_chars // len(whole) * 997
    return f"Document {number}.\n\n" + (whole[at % len(whole) :] + whole * (1 + num_chars // len(whole)))[:num_chars]


async def replay(
    client: Any, model: str, trace: Sequence[Session], options: argparse.Namespace, answers: Answers | None = None
) -> list[TurnResult]:
    """Run all sessions concurrently, or with --for-s those that begin in time. Raises what the client raises.

    answers: known answers; new ones are added.
    """
    results: list[TurnResult] = []
    known: Answers = {} if answers is None else answers
    started, clients = time.perf_counter(), asyncio.Semaphore(options.clients or len(trace) or 1)

    async def run_session(session: Session) -> None:
        await asyncio.sleep(max(0.0, session.begins_s - (time.perf_counter() - started)))
        async with clients:
            if options.for_s is None or time.perf_counter() - started < options.for_s:
                await converse(session)

    async def converse(session: Session) -> None:
        messages = [] if options.named else [document(session.context, options)]
        of_context = f"{model}@{context_name(session.context)}" if options.named else model
        for turn, (question, think_s) in enumerate(zip(session.questions, session.think_s, strict=True)):
            await asyncio.sleep(think_s)
            messages.append({"role": "user", "content": question})
            answer, of_turn = await ask_until_answered(client, of_context, messages, turn, options)
            messages.append({"role": "assistant", "content": answer})
            before = known.setdefault((session.context, session.questions[: turn + 1]), answer)
            if answer != before:
                print(f"two answers to {question!r} about document {session.context}: {before!r}, {answer!r}")
            results.append(replace(of_turn, differs=answer != before))

    async with asyncio.TaskGroup() as group:
        for session in trace:
            group.create_task(run_session(session))
    return results


def document(number: int, options: argparse.Namespace) -> dict[str, str]:
    return {"role": "system", "content": context_text(number, options.context_chars)}


def context_name(number: int) -> str:
    return f"load-{number}"


async def ask_until_answered(
    client: Any, model: str, messages: list[dict[str, str]], turn: int, options: argparse.Namespace
) -> tuple[str, TurnResult]:
    """Ask until there is an answer. With options.may_lose, a turn is sent again if its stream ends as `worker_lost`.

    Raises GateError for any other failure, and if an interrupted answer is no beginning of the final one.
    """
    from openai import APIError

    begun: list[str] = []
    while True:
        text: list[str] = []
        try:
            result = await ask(client, model, messages, turn, options, text)
        except APIError as error:
            gate(options.may_lose and error.code == "worker_lost", f"a request failed: {error!r}")
            begun.append("".join(text))
            await asyncio.sleep(RETRY_S)
            continue
        answer = "".join(text)
        gate(all(map(answer.startswith, begun)), f"{begun} were not how the answer {answer!r} begins")
        return answer, replace(result, num_lost=len(begun))


async def ask(
    client: Any,
    model: str,
    messages: list[dict[str, str]],
    turn: int,
    options: argparse.Namespace,
    text: list[str],  # gets the answer's pieces as they arrive
) -> TurnResult:
    sent = time.perf_counter()
    first_s, usage = 0.0, None
    stream = await client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=options.answer_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={} if options.selector is None else {"selector": options.selector},
    )
    async for chunk in stream:
        first_s = first_s or time.perf_counter() - sent
        if chunk.choices:
            text.append(chunk.choices[0].delta.content or "")
        usage = chunk.usage or usage
    assert usage is not None
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    ended_at = time.perf_counter()
    return TurnResult(
        turn, first_s, ended_at - sent, ended_at, usage.completion_tokens, usage.prompt_tokens, cached or 0
    )


async def run(options: argparse.Namespace) -> dict[str, Any]:
    from openai import AsyncOpenAI

    trace = make_trace(options)
    base = f"{options.url.rstrip('/')}/v1"
    async with AsyncOpenAI(base_url=base, api_key=options.key, max_retries=20, timeout=TIMEOUT_S) as client:
        model = options.model or await model_name(client)
        answers = Answers()
        if options.alone_first:
            one_by_one = argparse.Namespace(**{**vars(options), "clients": 1, "for_s": None})
            await replay(client, model, first_questions(options), one_by_one, answers)
        watch = ServiceWatch(options)
        await watch.sample()
        watching = asyncio.create_task(watch.run())
        started = time.perf_counter()
        try:
            results = await replay(client, model, trace, options, answers)
        finally:
            ended = time.perf_counter()
            stop(watching)
    return {
        **trace_report(results, trace, started, ended, options),
        **watch.found(sum(of.new_tokens for of in results)),
    }


def stop(task: asyncio.Task[None]) -> None:
    """Cancel a task that runs until it is stopped. If it has failed, raise its error: it did not watch to the end."""
    if task.done():
        task.result()
    task.cancel()


def trace_report(
    results: Sequence[TurnResult], trace: Sequence[Session], started: float, ended: float, options: argparse.Namespace
) -> dict[str, Any]:
    """Return a trace's figures.

    With --for-s, tokens a second count only answers that ended before it: afterwards, fewer and fewer clients remain.
    """
    until = ended if options.for_s is None else min(ended, started + options.for_s)
    new_tokens = sum(of.new_tokens for of in results if of.ended_at <= until)
    prompt_tokens = sum(of.prompt_tokens for of in results)
    first, later = ([of.first_s for of in results if (of.turn == 0) == is_first] for is_first in (True, False))
    each = [(of.whole_s - of.first_s) / (of.new_tokens - 1) for of in results if of.new_tokens > 1]
    num_turns = sum(len(session.questions) for session in trace)
    gate(
        options.for_s is not None or len(results) == num_turns,
        f"{len(results)} of {num_turns} turns were answered",
    )
    return {
        "trace": {
            name: getattr(options, name)
            for name in (
                "contexts",
                "context_chars",
                "sessions",
                "per_minute",
                "clients",
                "for_s",
                "turns",
                "think_s",
                "answer_tokens",
                "zipf",
                "seed",
            )
        },
        "selector": options.selector or "the service's",
        "turns": len(results),
        "failed": 0,
        "different_answers": sum(of.differs for of in results),
        "lost_and_asked_again": sum(of.num_lost for of in results),
        "seconds": round(ended - started, 1),
        "tokens_per_s": round(new_tokens / (until - started), 2),
        "prompt_tokens": prompt_tokens,
        "prefilled_tokens": prompt_tokens - sum(of.cached_tokens for of in results),
        **quantiles("first_turn_ttft", first),
        **quantiles("later_turn_ttft", later),
        **quantiles("tpot", each),
        "machine": machine(),
    }


async def model_name(client: Any) -> str:
    """Return the name of the service's model, without a context."""
    [model, *_] = [model.id async for model in client.models.list()] or [""]
    gate(bool(model), "the service lists no model by which to learn its name; give it with --model")
    return str(model).partition("@")[0]


def quantiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    return {f"{name}_{what}": value for what, value in percentiles_ms(seconds).items()}


def serve_and_run(options: argparse.Namespace) -> dict[str, Any]:
    """Run with a service of its own; contexts that its store already has are not built again."""
    with serving("--store", str(options.store), *options.serve) as service:
        options.url, options.pid = service.url, [service.process.pid]
        if options.named:
            register(service, options)
        return {"bench": "load", "serve": options.serve, **asyncio.run(run(options))}


def register(service: Service, options: argparse.Namespace) -> None:
    """Register the trace's documents as contexts, and wait until they are ready."""
    for number in range(options.contexts):
        service.register(context_name(number), context_text(number, options.context_chars))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--url", help="address of a running server")
    parser.add_argument("--key", default=os.environ.get("CSATTN_SERVER_API_KEYS", "none"), help="API key")
    parser.add_argument("--model", help="name of the model; not needed if the server lists only one")
    parser.add_argument(
        "--pid",
        type=int,
        action="append",
        help="process of the server whose memory and reads are reported, with its children; may be repeated",
    )
    parser.add_argument(
        "--store", type=Path, help="store of a service that is started for this run with the options after --"
    )
    parser.add_argument(
        "--alone-first",
        action="store_true",
        help="first send requests alone; the answers must be the same among others",
    )
    parser.add_argument("--named", action="store_true", help="register documents as contexts, and request them by name")
    parser.add_argument("serve", nargs="*", help="options of `csattn serve`, after --")
    options = parser.parse_args()
    end_as_interrupted()
    if (options.url is None) == (options.store is None):
        parser.error("give --url, or --store and what `csattn serve` takes")
    if options.url and options.named:
        parser.error("--named wants a service of its own: --store")
    finish_load(asyncio.run(run(options)) if options.url else serve_and_run(options), options.json)


def finish_load(result: dict[str, Any], json_path: Path | None) -> None:
    """Save the result in any case, then raise GateError if an answer differs."""
    finish(result, json_path)
    gate(not result["different_answers"], f"{result['different_answers']} of {result['turns']} answers differ")


def add_options(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add the options of the trace."""
    parser.add_argument("--contexts", type=int, default=8)
    parser.add_argument("--context-chars", type=int, default=8000)
    parser.add_argument("--sessions", type=int, default=40)
    parser.add_argument("--per-minute", type=float, default=30.0, help="sessions that begin per minute")
    parser.add_argument("--clients", type=int, help="most sessions at the same time; others begin later")
    parser.add_argument(
        "--for-s", type=float, help="time in seconds after which no session begins [default: all begin]"
    )
    parser.add_argument("--turns", type=float, default=4, help="average turns of a session")
    parser.add_argument("--think-s", type=float, default=3.0, help="average seconds before a turn")
    parser.add_argument("--answer-tokens", type=int, default=32)
    parser.add_argument("--zipf", type=float, default=1.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--selector", help="selector of all requests [default: the service's]")
    parser.add_argument("--json", type=Path)
    parser.set_defaults(may_lose=False, **defaults)


if __name__ == "__main__":
    main()
