"""What holding answers to a JSON schema adds to a step: a batch of requests with a schema beside one without, in turns.

    python -m bench.constrained_step [--batch 8] [--tokens 64] [--rounds 6] [--threads N] [--store DIR] [--json FILE]

Greedy and drawn. Time is from token to token as a reader of the backend sees it: engine, masks, drawing and text.
Gate: every request of every round gives all of its tokens, and those with a schema the start of a list.
"""

import argparse
import asyncio
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.timing import finish, gate
from csattn.config import SearchConfig, preset
from csattn.cpus import available_cpus
from csattn.models import load_model
from csattn.models.prompt import context_ids
from index_build.pipeline import build_artifact
from workers.engine.cpu_engine import CpuEngine
from workers.serving.contexts import name_artifact
from workers.serving.local import LocalBackend
from workers.serving.messages import Ask, Done, Sampling
from workers.settings import Settings, StoreSettings

TEXT = Path(__file__).parent / "texts" / "novel.txt"
CONTEXT_LEN = 2048
CONTEXT = "bench-constrained"
WORD = {"type": "string", "minLength": 3, "maxLength": 30}
SCHEMA = {"type": "array", "items": {"anyOf": [WORD, {"type": "integer"}]}, "minItems": 500}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument("--store", type=Path, default=Path("~/.cache/csattn/bench").expanduser())
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    loaded = load_model()
    ids = context_ids(loaded.tokenizer, TEXT.read_text(), "none")[:CONTEXT_LEN]
    artifact_id = build_artifact(loaded, ids, preset("default"), args.store).artifact_id
    name_artifact(args.store, CONTEXT, artifact_id, "float32")
    engine = CpuEngine(loaded, max_rows=16, num_slots=16, tail_capacity=256, num_threads=args.threads)
    settings = Settings(store=StoreSettings(path=args.store), search=SearchConfig(keep=0.05))
    times = asyncio.run(_measure(LocalBackend(engine, loaded, settings), args.batch, args.tokens, args.rounds))
    told: dict[str, Any] = {}
    for drawing in ("greedy", "drawn"):
        free, held = (float(np.median(times[drawing, has_schema])) for has_schema in (False, True))
        told[drawing] = {"free_ms": round(free, 2), "held_ms": round(held, 2), "ratio": round(held / free, 3)}
        print(f"{drawing}: {free:.1f} ms a step without a schema, {held:.1f} with one: {held / free:.3f} x")
    finish({"bench": "constrained_step", "batch": args.batch, **told}, args.json)


async def _measure(
    backend: LocalBackend, batch: int, num_tokens: int, rounds: int
) -> dict[tuple[str, bool], list[float]]:
    """Milliseconds from token to token, of every request, by how it is drawn and whether it has a schema."""
    times: dict[tuple[str, bool], list[float]] = {}
    async with backend:
        for number in range(rounds + 1):  # the first one warms up
            for drawing in ("greedy", "drawn"):
                for has_schema in (False, True):
                    asks = [_ask(i, number, drawing, has_schema, num_tokens) for i in range(batch)]
                    took = await asyncio.gather(*(_token_ms(backend, ask) for ask in asks))
                    if number:
                        times.setdefault((drawing, has_schema), []).extend(took)
    return times


def _ask(index: int, number: int, drawing: str, has_schema: bool, num_tokens: int) -> Ask:
    sampling = Sampling(max_new_tokens=num_tokens, temperature=float(drawing == "drawn"), seed=100 * number + index)
    prompt = f"\n\nChapter {index}. A list of what was seen:\n"
    return Ask(
        request_id=f"{index}", context=CONTEXT, prompt=prompt, sampling=sampling, schema=SCHEMA if has_schema else None
    )


async def _token_ms(backend: LocalBackend, ask: Ask) -> float:
    first_at, text = None, ""
    async with aclosing(backend.generate(ask)) as events:
        async for event in events:
            if isinstance(event, Done):
                gate(event.new_tokens == ask.sampling.max_new_tokens, f"an answer ended early: {text!r}")
                gate(ask.schema is None or text.startswith('["') or text[1:2].isdigit(), f"no list: {text!r}")
                assert first_at is not None
                return (time.perf_counter() - first_at) * 1e3 / (event.new_tokens - 1)
            first_at, text = first_at or time.perf_counter(), text + event.text
    raise AssertionError("events end with Done")


if __name__ == "__main__":
    main()
