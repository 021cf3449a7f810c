"""What a JSON schema adds to a step's time: batches of requests with a schema and without, in turns.

    python -m bench.constrained_step [--batch 8] [--tokens 64] [--rounds 6] [--json FILE]
    python -m bench.constrained_step --model llama-3.1-8b --placement hybrid

Tokens are greedy and sampled. Times are between tokens as a reader of the backend receives them, from when all requests
of the batch have begun: engine, masks, sampling and text. A model given by its shape has random weights and the demo
model's tokenizer. Gate: every request of every round gets all of its tokens, and answers with a schema begin a list.
"""

import asyncio
import tempfile
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.served_model import saved_model
from bench.timing import finish, gate, options_parser
from csattn.config import preset
from csattn.models import load_model
from csattn.models.prompt import context_ids
from index_build.pipeline import build_artifact
from workers.searchers.process import ChildProcess
from workers.service.making import make_backend
from workers.serving.contexts import name_artifact
from workers.serving.local import LocalBackend
from workers.serving.messages import Ask, Done, Sampling
from workers.settings import Settings, load_settings

TEXT = Path(__file__).parent / "texts" / "novel.txt"
CONTEXT_LEN = 2048
CONTEXT = "bench-constrained"
WORD = {"type": "string", "minLength": 3, "maxLength": 30}
SCHEMA = {"type": "array", "items": {"anyOf": [WORD, {"type": "integer"}]}, "minItems": 500}
LIST_BEGINS = {f"[{character}" for character in '"-0123456789'}


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--model", default="demo", help="demo, or a model shape with random weights")
    parser.add_argument("--placement", default="cpu")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        settings = _settings(args.model, args.placement, args.batch, Path(directory))
        backend = make_backend(settings, ChildProcess)
        times = asyncio.run(_measure(backend, args.batch, args.tokens, args.rounds))
    device = "cpu" if args.placement == "cpu" else torch.cuda.get_device_name()
    timings: dict[str, Any] = {"model": args.model, "placement": args.placement, "device": device}
    for drawing in ("greedy", "drawn"):
        free, held = (float(np.median(times[drawing, has_schema])) for has_schema in (False, True))
        timings[drawing] = {"free_ms": round(free, 2), "held_ms": round(held, 2), "ratio": round(held / free, 3)}
        print(f"{drawing}: {free:.1f} ms a step without a schema, {held:.1f} with one: {held / free:.3f} x")
    finish({"bench": "constrained_step", "batch": args.batch, **timings}, args.json)


def _settings(model: str, placement: str, batch: int, place: Path) -> Settings:
    """Build the context into a store, and return settings for a service over it."""
    path, dtype = saved_model(model, None, place)
    demo = load_model()
    if path is not None:
        demo.tokenizer.save_pretrained(path)
    loaded = demo if path is None else load_model(path, dtype, "cpu" if placement == "cpu" else "cuda")
    ids = context_ids(loaded.tokenizer, TEXT.read_text(), "none")[:CONTEXT_LEN]
    artifact_id = build_artifact(loaded, ids, preset("default"), place).artifact_id
    name_artifact(place, CONTEXT, artifact_id, "float32" if path is None else dtype)
    sets = {"store.path": place, "search.keep": 0.05, "limits.max_concurrent_requests": 2 * batch}
    if path is not None:
        sets |= {"model.name": str(path), "build.dtype": dtype}
    if placement != "cpu":
        sets |= {"engine.placement": placement, "engine.max_context_len": CONTEXT_LEN}
    return load_settings(None, {}, sets).settings


async def _measure(
    backend: LocalBackend, batch: int, num_tokens: int, rounds: int
) -> dict[tuple[str, bool], list[float]]:
    """Return each request's milliseconds per token, by ("greedy" or "drawn", whether it has a schema)."""
    times: dict[tuple[str, bool], list[float]] = {}
    async with backend:
        for number in range(rounds + 1):  # the first one warms up
            for drawing in ("greedy", "drawn"):
                for has_schema in (False, True):
                    asks = [_ask(i, number, drawing, has_schema, num_tokens) for i in range(batch)]
                    answers = await asyncio.gather(*(_tokens_at(backend, ask) for ask in asks))
                    if number:
                        times.setdefault((drawing, has_schema), []).extend(_token_ms(answers))
    return times


def _ask(index: int, number: int, drawing: str, has_schema: bool, num_tokens: int) -> Ask:
    temperature, seed = float(drawing == "drawn"), 100 * number + index
    sampling = Sampling(max_new_tokens=num_tokens, temperature=temperature, seed=seed, ignore_eos=True)
    prompt = f"\n\nChapter {index}. A list of what was seen:\n"
    return Ask(
        request_id=f"{index}",
        context=CONTEXT,
        prompt=prompt,
        sampling=sampling,
        schema=SCHEMA if has_schema else None,
        reports_usage=True,
    )


def _token_ms(answers: list[list[tuple[float, int]]]) -> list[float]:
    """Return each answer's milliseconds per token, from when all have begun. answers: of `_tokens_at`."""
    all_begun = max(pieces[0][0] for pieces in answers)
    took = []
    for pieces in answers:
        (begun, num_before), *_, (ended, num_tokens) = [piece for piece in pieces if piece[0] >= all_begun]
        took.append((ended - begun) * 1e3 / (num_tokens - num_before))
    return took


async def _tokens_at(backend: LocalBackend, ask: Ask) -> list[tuple[float, int]]:
    """Return, for each piece of an answer, when it came, and how many tokens there were by then."""
    came, text = list[tuple[float, int]](), ""
    async with aclosing(backend.generate(ask)) as events:
        async for event in events:
            if isinstance(event, Done):
                gate(event.new_tokens == ask.sampling.max_new_tokens, f"an answer ended early: {text!r}")
                gate(ask.schema is None or text[:2] in LIST_BEGINS, f"no list: {text!r}")
                return came
            assert event.usage is not None
            came.append((time.perf_counter(), event.usage.new_tokens))
            text += event.text
    raise AssertionError("events end with Done")


if __name__ == "__main__":
    main()
