"""How many tokens a second does one device generate for 1 to 32 requests that share one long context?

    python -m bench.concurrency --out FILE [--shape llama-3.1-8b] [--context 65535] [--placements hybrid,host]
        [--preset default] [--streams 1,2,4,8,16,32]

Measures the service's own backend, without HTTP: scheduler and engine, over an artifact that is built here from a model
with random weights. Such a model attends to all rows alike, so the chosen rows change more from step to step than with
any real model. Every request asks its own question and decodes --tokens tokens. `tokens_per_s`: the answers' tokens
over the time from the first request to the last token, including the questions. `decoded_per_s`: from the service's
own times per output token, which exclude first tokens. `device+all`: with `engine.all_where_faster`.
Gate: every request gets all its tokens, and the device's allocated memory does not change.
"""

import argparse
import asyncio
import tempfile
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import torch

from bench.build import byte_ids, random_model
from bench.timing import finish, gate, machine
from csattn.config import SearchConfig
from csattn.models import LoadedModel
from index_build.inputs import make_config
from index_build.pipeline import build_artifact
from workers.service.making import make_engine
from workers.serving.contexts import name_artifact
from workers.serving.local import LocalBackend
from workers.serving.messages import Ask, Done, Sampling
from workers.settings import EngineSettings, LimitSettings, Settings, StoreSettings, default_lookahead

STREAMS = (1, 2, 4, 8, 16, 32)
QUESTION_CHARS = 48
NAME = "shared"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--context", type=int, default=65535)
    parser.add_argument("--placements", default="hybrid,host")
    parser.add_argument("--preset", default="default")
    parser.add_argument("--streams", default=",".join(map(str, STREAMS)))
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    streams = [int(number) for number in arguments.streams.split(",")]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        store = Path(scratch)
        loaded = random_model(arguments.shape, arguments.layers, device)
        build_context(loaded, arguments.context, arguments.preset, store)
        loaded.model.to("cpu")  # where a service loads it: the engine has a copy of its own
        torch.cuda.empty_cache()
        print(f"built after {time.perf_counter() - started:.0f} s", flush=True)
        cases: list[dict[str, Any]] = []
        for placement in arguments.placements.split(","):
            settings = settings_for(store, placement, max(streams))
            for case in asyncio.run(measure(loaded, settings, streams, arguments.tokens)):
                cases.append({"placement": placement, **case})
                print(cases[-1], flush=True)
            torch.cuda.empty_cache()
    num_layers = loaded.geometry.num_layers
    facts = {
        "shape": arguments.shape,
        "layers": num_layers,
        "context_len": arguments.context,
        "preset": arguments.preset,
    }
    finish({"name": "concurrency", "machine": machine(), **facts, "cases": cases}, arguments.out)


def build_context(loaded: LoadedModel, context_len: int, preset_name: str, store: Path) -> None:
    config = make_config(preset_name, {}, loaded.device.type)
    report = build_artifact(loaded, byte_ids(context_len), config, store, notes={"wrapping": "none"})
    name_artifact(store, NAME, report.artifact_id, "bfloat16")


def settings_for(store: Path, place: str, num_streams: int) -> Settings:
    placement: Any
    placement, _, reads = place.partition("+")
    gate(reads in ("", "all"), f"placements are device, hybrid, host and device+all, not {place!r}")
    return Settings(
        store=StoreSettings(path=store),
        limits=LimitSettings(max_concurrent_requests=num_streams, max_queued_requests=num_streams),
        search=SearchConfig(lookahead=default_lookahead(placement)),
        engine=EngineSettings(placement=placement, all_where_faster=reads == "all", tail_capacity=512, num_contexts=1),
    )


async def measure(loaded: LoadedModel, settings: Settings, streams: list[int], num_tokens: int) -> list[dict[str, Any]]:
    """Measure every number of streams, all on one engine."""
    engine = make_engine(settings, loaded, None)
    cases = []
    async with LocalBackend(engine, loaded, settings) as backend:
        started = time.perf_counter()
        await ask(backend, 0, 2)
        load_s = time.perf_counter() - started
        for num_streams in streams:
            device_bytes, before = memory_bytes(), await sums(backend)
            started = time.perf_counter()
            counts = await asyncio.gather(*(ask(backend, number, num_tokens) for number in range(num_streams)))
            wall_s = time.perf_counter() - started
            gate(all(count == num_tokens for count in counts), f"tokens are missing: {counts}")
            gate(memory_bytes() == device_bytes, "the device's memory has changed")
            sum_of = {name: value - before[name] for name, value in (await sums(backend)).items()}
            lookups = sum_of["csattn_slot_lookups_total"]
            cases.append(
                {
                    "streams": num_streams,
                    "tokens_per_s": round(num_streams * num_tokens / wall_s, 1),
                    "decoded_per_s": round(num_streams**2 / sum_of["csattn_tpot_seconds_sum"], 1),
                    "first_token_s": round(sum_of["csattn_ttft_seconds_sum"] / num_streams, 3),
                    "device_bytes": device_bytes,
                    "slot_hit_rate": round(sum_of["csattn_slot_hits_total"] / lookups, 3) if lookups else None,
                    "load_s": round(load_s, 1),
                }
            )
    return cases


async def sums(backend: LocalBackend) -> dict[str, float]:
    """Return the service's metrics by their Prometheus names."""
    return {sample.name: sample.value for metric in await backend.metrics() for sample in metric.samples}


async def ask(backend: LocalBackend, number: int, num_tokens: int) -> int:
    """Ask a question and return the number of tokens of the answer."""
    question = f"{number:04d} " * (QUESTION_CHARS // 5)
    asked = Ask(request_id=str(number), context=NAME, prompt=question, sampling=Sampling(max_new_tokens=num_tokens))
    async with aclosing(backend.generate(asked)) as events:
        async for event in events:
            if isinstance(event, Done):
                return event.new_tokens
    return 0


def memory_bytes() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


if __name__ == "__main__":
    main()
