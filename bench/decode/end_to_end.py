"""Time whole steps of a model with random weights: csattn in every placement, full attention and other methods."""

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.decode import other_methods, sampled
from bench.decode.gpu_timing import time_replays
from bench.decode.kernel_times import kernel_times, times_by_purpose
from bench.decode.low_bit_rows import FORMATS, low_bit_rows
from bench.decode.options import Options
from bench.decode.other_layers import other_bytes, with_other_layers
from bench.decode.other_steps import by_other_method
from bench.decode.placements import all_rows, placed, schedules, streamed
from bench.decode.prepared import TAIL_LEN, Prepared, full_attention, window_only
from bench.decode.recording import Recording
from bench.decode.steps import RecordedQueries, attention_only, greedy_step
from bench.decode.workload import DTYPE, Workload
from bench.random_weights import FEW, Few, random_weights
from bench.records import Case, Records
from bench.streamed import streamed_bytes
from csattn.errors import ConfigError, CsattnError
from csattn.models.weights import ModelWeights
from workers.model import ModelRunner, StepAttention
from workers.model.devices import Devices

BASELINES: dict[str, Callable[[Workload, Options], Prepared]] = {
    **{"full": full_attention, "all": all_rows, "streamed": streamed, "window": window_only},
    **{name: partial(low_bit_rows, name=name) for name in FORMATS},
}
OTHERS = *BASELINES, *other_methods.INDEXES, *sampled.TABLES  # variants that `of_variant` does not read
WARM_UP_STEPS, SLOW_STEPS = 48, 8  # warm-up steps also fill the slot cache
PROFILED_STEPS = 4


def run_end_to_end(
    results: Records,
    recording: Recording,
    config: Any,  # of the model in transformers, whose shape the options have
    options: Options,
    context_lens: list[int],
    batch_sizes: list[int],
    variants: list[str],  # of `OTHERS`, or as `of_variant` reads them
    placements: list[str],  # of other methods and of what `of_variant` reads
    formats: list[str],  # of weights: "bf16", or one of `FEW`
) -> None:
    """Measure the cases that the results do not hold yet, in the order of the arguments."""
    for name in formats:
        if name not in ("bf16", *FEW):
            raise ConfigError(f"weights are bf16, {', '.join(FEW)}, not {name!r}")
        few = next((few for few in FEW if few == name), None)
        weights = random_weights(config, "cuda", few=few)
        _run_with(weights, few, results, recording, options, context_lens, batch_sizes, variants, placements)
        del weights
        torch.cuda.empty_cache()


def _run_with(
    weights: ModelWeights,
    few: Few | None,
    results: Records,
    recording: Recording,
    options: Options,
    context_lens: list[int],
    batch_sizes: list[int],
    variants: list[str],
    placements: list[str],
) -> None:
    for context_len in context_lens:
        for batch_size in batch_sizes:
            device = torch.device("cuda")
            work = Workload(recording, options.heads, context_len, batch_size, device, options.is_shared)
            for key, prepare in _cases(work, options, variants, placements):
                if few is not None:
                    key["weights"] = few
                if results.has(**key):
                    continue
                started = time.perf_counter()
                try:
                    prepared = prepare()
                    try:
                        case = measure_steps(work, weights, prepared, options)
                    finally:
                        prepared.close()
                        del prepared
                    results.add({**key, "data": work.data, **case, "case_s": round(time.perf_counter() - started, 1)})
                except (CsattnError, torch.OutOfMemoryError) as error:
                    results.add({**key, "refused": str(error).splitlines()[0]})
                gc.collect()  # frees graphs and what they hold
                torch.cuda.empty_cache()
            key = _key(work, options) | ({} if few is None else {"weights": few})
            sampled.add_sampled(results, work, options, variants, key)


def _cases(
    work: Workload, options: Options, variants: list[str], placements: list[str]
) -> Iterator[tuple[Case, Callable[[], Prepared]]]:
    key = _key(work, options)
    codec = {} if options.kv_format is None else {"kv_codec": str(options.kv_format)}
    for variant in variants:
        if variant in sampled.TABLES:
            continue
        of = {**key, **({} if variant in ("full", "window", *FORMATS) else codec), "variant": variant}
        if variant in BASELINES:
            place = "host" if variant == "streamed" else "device"
            yield {**of, "placement": place, "schedule": "none"}, partial(BASELINES[variant], work, options)
            continue
        for placement in placements:
            for schedule, search in schedules(options.search, placement):
                if not schedule.startswith(tuple(options.schedules)):
                    continue
                named: Case = {**of, "placement": placement, "schedule": schedule}
                named["keep"] = options.search.keep
                if options.slots is not None and placement != "device":
                    named["slots"] = options.slots
                prepare = by_other_method if variant in other_methods.INDEXES else placed
                yield named, partial(prepare, work, options, variant, placement, search)


def _key(work: Workload, options: Options) -> Case:
    """Return the fields that all cases of a batch share."""
    return {
        "kind": "shared" if work.is_shared else "e2e",
        **({"shape": options.shape_name} if options.shape_name else {}),
        "context_len": work.context_len,
        "batch_size": work.batch_size,
        **({"as_ampere": True} if options.as_ampere else {}),
    }


def measure_steps(work: Workload, weights: ModelWeights, prepared: Prepared, options: Options) -> dict[str, Any]:
    """Return the time per output token, its parts, and the bytes moved and allocated."""
    attention = RecordedQueries(prepared.attention, work)
    runner = make_runner(work, weights, with_other_layers(work, options, attention))

    step = greedy_step(runner, work.batch_size)
    for _ in range(2 if prepared.is_slow else WARM_UP_STEPS):
        step()
    prepared.start_counting()
    times_us = time_steps(step, SLOW_STEPS if prepared.is_slow else options.num_steps)
    p50, p99 = (float(x) for x in np.percentile(times_us, [50, 99]))
    mean = float(np.mean(times_us))
    facts = prepared.facts(len(times_us))
    least, roofline_us = roofline(work, weights, prepared, options, facts)
    case: dict[str, Any] = {
        "p50_us": round(p50, 1),
        "p99_us": round(p99, 1),
        "mean_us": round(mean, 1),
        "num_samples": len(times_us),
        "tokens_per_s": round(work.batch_size / mean * 1e6, 1),
        "moved_bytes": round(least),
        "roofline_us": round(roofline_us, 1),
        "of_roofline": round(roofline_us / mean, 3),
        "hbm_bytes": torch.cuda.memory_allocated(),
        **facts,
    }
    if not prepared.is_slow:
        parts = times_by_purpose(kernel_times(step, PROFILED_STEPS), options.num_layers)
        q = torch.zeros(work.batch_size, weights.spec.num_q_heads, weights.spec.head_dim, dtype=DTYPE, device="cuda")
        rows = runner.rows(work.batch_size)
        alone = time_replays(attention_only(attention, rows, q), options.num_layers, options.seconds)
        case |= {"parts_us": parts, "attention_us": round(alone.p50_us, 2)}
    return case


def roofline(
    work: Workload, weights: ModelWeights, prepared: Prepared, options: Options, facts: dict[str, Any]
) -> tuple[float, float]:
    """Return the bytes of device memory that a step must read, and its least µs: for these bytes, or for the link."""
    least = streamed_bytes(weights) + prepared.step_bytes + other_bytes(work, weights)
    link_us = facts.get("link_bytes", 0) / options.ceilings["h2d_gbps"] / 1e3
    return least, max(least / options.ceilings["read_gbps"] / 1e3, link_us)


def make_runner(
    work: Workload, weights: ModelWeights, attention: StepAttention, devices: Devices | None = None
) -> ModelRunner:
    """Return a runner for the batch, in which every request has TAIL_LEN rows in its tail."""
    next_query = _next_query(work, weights, attention)
    runner = ModelRunner(weights, attention, [work.batch_size], next_query, devices=devices)
    requests = list(range(work.batch_size))
    positions = [work.context_len + TAIL_LEN] * work.batch_size
    contexts = [request % work.num_contexts for request in requests]
    runner.fill(work.batch_size, requests, positions, contexts, requests, [TAIL_LEN] * work.batch_size)
    return runner


def _next_query(work: Workload, weights: ModelWeights, attention: StepAttention) -> Tensor | None:
    if not attention.lookahead:
        return None
    shape = weights.spec
    sizes = work.batch_size, len(shape.indexed_layers), shape.num_q_heads, shape.head_dim + 1, shape.head_dim
    return torch.zeros(sizes, dtype=weights.dtype, device=work.device)


def time_steps(step: Callable[[], None], num_steps: int) -> list[float]:
    """Return the time of each step in µs, between CUDA events."""
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [1e3 * before.elapsed_time(after) for before, after in itertools.pairwise(events)]
