"""One layer's attention of one step, by itself: full attention in its fastest form, the window alone, and ours."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bench.decode.baselines import (
    TOLERANCE,
    Attention,
    StreamedAttention,
    fastest_full_attention,
    full_attention_ways,
    reference_attention,
    relative_error,
)
from bench.decode.gpu_timing import Timing, capture, num_input_sets, time_graph, time_replays
from bench.decode.kernel_times import kernel_times, times_by_purpose
from bench.decode.recorded import Recorded, of_variant
from bench.decode.results import Results
from bench.decode.roofline import full_bytes, rest_bytes, selected_bytes, table_row_bytes
from bench.decode.sparse_op import SET_BYTES, SparseOp
from bench.decode.tables import distinct_rows
from bench.decode.workload import Workload
from bench.records import Case
from bench.timing import gate
from csattn.config import SearchConfig
from workers.model_runner.shapes import ModelShape

MOST_STREAMED_LAYERS = 2
PROFILED_RUNS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What all cases of a run have in common."""

    shape: ModelShape
    search: SearchConfig
    ceilings: dict[str, float]  # see `gpu_timing.ceilings`
    seconds: float  # of measuring, per figure
    pinned_bytes: int  # host memory that streaming may pin
    num_steps: int = 192  # that are timed, of whole steps
    takes_apart: bool = True  # whether whole steps are profiled, too
    only_ahead: bool = False  # of our schedules
    is_shared: bool = False  # one context for all requests of a batch

    @property
    def every_4th(self) -> SearchConfig:
        """The published schedule without a search at every step: more rows, chosen every fourth step."""
        return replace(self.search, keep=0.15, search_period=4)


def run_op_cases(
    results: Results,
    recorded: Recorded,
    options: Options,
    context_lens: list[int],
    batch_sizes: list[int],
    variants: list[str],  # "full", "streamed", "window", or names of recorded indexes, with "+rest" or without
) -> None:
    """Measure whatever the results do not hold yet, shortest contexts first."""
    for context_len in context_lens:
        for batch_size in batch_sizes:
            work = Workload(recorded, context_len, batch_size, torch.device("cuda"))
            for variant in variants:
                key = {
                    "kind": "op",
                    "context_len": context_len,
                    "batch_size": batch_size,
                    "variant": variant,
                    "placement": "host" if variant == "streamed" else "device",
                }
                wanted = [{**key, "schedule": schedule} for schedule in _schedules(variant, options)]
                missing = [case for case in wanted if not results.has(**case)]
                try:
                    for case, figures in zip(missing, _measure(work, options, missing, results), strict=True):
                        results.add({**case, **figures})
                except torch.OutOfMemoryError as error:
                    for case in missing:
                        if not results.has(**case):
                            results.add({**case, "refused": str(error).splitlines()[0]})
                torch.cuda.empty_cache()


def _schedules(variant: str, options: Options) -> dict[str, SearchConfig]:
    if variant in ("full", "streamed", "window"):
        return {"none": options.search}
    search, every_4th = (of_variant(variant, search)[1] for search in (options.search, options.every_4th))
    return {"every step": search, "every 4th step, keep 0.15": every_4th}


def _measure(work: Workload, options: Options, cases: list[Case], results: Results) -> Iterator[dict[str, Any]]:
    """Figures of cases that differ in their schedule only, one after the other."""
    if not cases:
        return
    variant = cases[0]["variant"]
    if variant == "full":
        yield full_attention_case(work, options)
    elif variant == "streamed":
        yield streamed_case(work, options, _full_attention_of(results, work))
    elif variant == "window":
        yield window_case(SparseOp(work, options.shape, options.search, None), options)
    else:
        index_name, search = of_variant(variant, options.search)
        op = SparseOp(work, options.shape, search, index_name)
        for case in cases:
            op.plan(_schedules(variant, options)[case["schedule"]])
            yield sparse_case(op, options, index_name)


def full_attention_case(work: Workload, options: Options) -> dict[str, Any]:
    """Every backend on the same rows, the fastest named."""
    moved = work.batch_size * full_bytes(options.shape, work.context_len)
    num_sets = max(1, min(num_input_sets(moved, 16), SET_BYTES // moved))
    inputs = [(work.queries(i)[i][:, :, None], *work.separate_kv(i)) for i in range(num_sets)]
    full = fastest_full_attention(inputs, options.seconds)
    return {
        **full.timing.to_json(),
        **_against_roofline(full.timing, moved, options.ceilings["read_gbps"]),
        "backend": full.name,
        "candidates_us": full.candidates,
        "hbm_bytes": moved,
    }


def streamed_case(work: Workload, options: Options, attend: Attention) -> dict[str, Any]:
    """Full attention over KV that is copied from pinned host memory, each layer's during the layer before."""
    moved = work.batch_size * full_bytes(options.shape, work.context_len)
    num_layers = min(MOST_STREAMED_LAYERS, options.pinned_bytes // moved)
    if num_layers == 0:
        return {"refused": f"a layer's KV has {moved} bytes, this run pins {options.pinned_bytes}; raise --pin-gib"}
    kv = torch.stack(work.separate_kv(0))
    q = work.queries(0)[0][:, :, None]
    want = reference_attention(q, *kv)
    pool = pinned(options.pinned_bytes)[: num_layers * moved].view(kv.dtype).view(num_layers, *kv.shape)
    pool.copy_(kv)
    del kv
    streamed = StreamedAttention([(k, v) for k, v in pool], attend)
    error = relative_error(streamed.attend(0, q), want)
    gate(error < TOLERANCE, f"streamed full attention is off by {error:.3f}")
    streamed.finish()

    def step() -> None:
        for layer_idx in range(num_layers):
            streamed.attend(layer_idx, q)

    timing = time_replays(step, num_layers, options.seconds, least=3)
    streamed.finish()
    return {
        **timing.to_json(),
        **_against_roofline(timing, moved, options.ceilings["h2d_gbps"]),
        "hbm_bytes": 2 * moved,
    }


def window_case(op: SparseOp, options: Options) -> dict[str, Any]:
    """The resident rows alone."""
    timing = time_graph([op.attend_call(i) for i in range(op.num_calls)], options.seconds)
    moved = op.work.batch_size * op.resident_bytes
    return {
        **timing.to_json(),
        **_against_roofline(timing, moved, options.ceilings["read_gbps"]),
        "hbm_bytes": op.hbm_bytes,
    }


def sparse_case(op: SparseOp, options: Options, index_name: str) -> dict[str, Any]:
    """Search and attention on the device."""
    assert op.config is not None
    work, search = op.work, op.search_config
    op.check()
    steps = capture([op.step_call(i) for i in range(op.num_calls)])
    whole = time_replays(steps.replay, op.num_calls, options.seconds)
    parts = times_by_purpose(kernel_times(steps.replay, PROFILED_RUNS), op.num_calls)
    rows_read = distinct_rows(op.q.flatten(0, 1), work.recorded.indexes[index_name][0])
    table = rows_read * op.num_index_heads * table_row_bytes(op.config, work.context_len) / op.period
    kept = selected_bytes(options.shape, work.context_len, search.keep)
    kept *= op.num_index_heads // options.shape.num_kv_heads  # heads that choose for themselves read for themselves
    rest = op.num_index_heads * rest_bytes(options.shape) if search.estimate_rest else 0
    moved = work.batch_size * (table + kept + op.resident_bytes + rest)
    return {
        **whole.to_json(),
        "parts_us": parts,
        **_against_roofline(whole, moved, options.ceilings["read_gbps"]),
        "moved_parts_bytes": {
            "table": round(work.batch_size * table),
            "rows": work.batch_size * (kept + op.resident_bytes + rest),
        },
        "distinct_rows": round(rows_read, 2),
        "hbm_bytes": op.hbm_bytes,
    }


def _full_attention_of(results: Results, work: Workload) -> Attention:
    """The fastest way measured for this shape, or a safe one."""
    for case in results.cases:
        same = case["context_len"] == work.context_len and case["batch_size"] == work.batch_size
        if same and case["variant"] == "full" and "backend" in case:
            return full_attention_ways()[case["backend"]]
    return full_attention_ways()["flash, packed"]


@cache
def pinned(num_bytes: int) -> Tensor:
    """Pinned once: that takes most of a second per GiB."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def _against_roofline(timing: Timing, moved_bytes: float, best_gbps: float) -> dict[str, float]:
    gbps = moved_bytes / timing.p50_us / 1e3
    return {
        "moved_bytes": round(moved_bytes),
        "gbps": round(gbps, 1),
        "roofline_us": round(moved_bytes / best_gbps / 1e3, 2),
        "of_roofline": round(gbps / best_gbps, 3),
    }
