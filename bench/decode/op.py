"""Time one layer's attention in one step by itself: the fastest full attention, the window alone, and csattn."""

from typing import Any

import torch

from bench.decode.baselines import TOLERANCE, fastest_full_attention, reference_attention, relative_error
from bench.decode.gpu_timing import Timing, capture, num_input_sets, time_graph, time_replays
from bench.decode.kernel_times import kernel_times, times_by_purpose
from bench.decode.options import Options
from bench.decode.placements import streamed
from bench.decode.prepared import window_only
from bench.decode.recording import Recording
from bench.decode.results import Results
from bench.decode.roofline import full_bytes
from bench.decode.sparse_op import MOST_SETS, SET_BYTES, RecordedCalls, SparseOp
from bench.decode.steps import merge_requests, split_requests
from bench.decode.workload import Workload
from bench.timing import gate
from csattn.errors import CsattnError

OTHERS = "full", "streamed", "window"  # variants that `of_variant` does not read
STREAMED_LAYERS = 4
PROFILED_RUNS = 3


def run_op_cases(
    results: Results,
    recording: Recording,
    options: Options,
    context_lens: list[int],
    batch_sizes: list[int],
    variants: list[str],  # of `OTHERS`, or as `variants.of_variant` reads them
) -> None:
    """Measure the cases that the results do not hold yet, in the order of the arguments."""
    for context_len in context_lens:
        for batch_size in batch_sizes:
            work = Workload(recording, options.heads, context_len, batch_size, torch.device("cuda"), options.is_shared)
            for variant in variants:
                case = {
                    "kind": "shared op" if work.is_shared else "op",
                    "context_len": context_len,
                    "batch_size": batch_size,
                    "variant": variant,
                    "placement": "host" if variant == "streamed" else "device",
                    "schedule": "none" if variant in OTHERS else "every step",
                }
                if results.has(**case):
                    continue
                try:
                    results.add({**case, "data": work.data, **_measure(work, options, variant)})
                except (CsattnError, torch.OutOfMemoryError) as error:
                    results.add({**case, "refused": str(error).splitlines()[0]})
                torch.cuda.empty_cache()


def _measure(work: Workload, options: Options, variant: str) -> dict[str, Any]:
    if variant == "full":
        return full_attention_case(work, options)
    if variant == "streamed":
        return streamed_case(work, options)
    if variant == "window":
        return window_case(work, options)
    return sparse_case(SparseOp(work, options, variant), options)


def full_attention_case(work: Workload, options: Options) -> dict[str, Any]:
    """Time every backend on the same rows, and name the fastest."""
    moved = work.num_contexts * full_bytes(options.shape, work.context_len)
    num_sets = max(1, min(num_input_sets(moved, 16), SET_BYTES // moved))
    kv = [work.separate_kv(i) for i in range(num_sets)]
    inputs = [(merge_requests(work.queries(i)[i], k), k, v) for i, (k, v) in enumerate(kv)]
    full = fastest_full_attention(inputs, options.seconds)
    return {
        **full.timing.to_json(),
        **_against_roofline(full.timing, moved, options.ceilings["read_gbps"]),
        "backend": full.name,
        "candidates_us": full.candidates,
        "hbm_bytes": moved,
    }


def streamed_case(work: Workload, options: Options) -> dict[str, Any]:
    """Check and time full attention over KV in pinned host memory. A layer's KV is copied during the layer before."""
    prepared = streamed(work, options.of_layers(STREAMED_LAYERS))
    attention, rows = prepared.attention, work.step_rows(0)
    kv = work.separate_kv(0)
    q = work.queries(0)[0].contiguous()
    out = torch.empty_like(q)

    def step(num_layers: int = STREAMED_LAYERS) -> None:
        attention.begin_step(rows)
        for layer_idx in range(num_layers):
            attention.attend(layer_idx, q, rows, out)

    step(1)
    error = relative_error(out, split_requests(reference_attention(merge_requests(q, kv[0]), *kv), len(q), kv[0]))
    gate(error < TOLERANCE, f"streamed full attention is off by {error:.3f}")
    timing = time_replays(step, STREAMED_LAYERS, options.seconds, least=3)
    prepared.close()
    moved = work.num_contexts * full_bytes(options.shape, work.context_len)
    return {
        **timing.to_json(),
        **_against_roofline(timing, moved, options.ceilings["h2d_gbps"]),
        "hbm_bytes": 2 * moved,
    }


def window_case(work: Workload, options: Options) -> dict[str, Any]:
    """Time attention to the resident rows alone: sinks, window and tail."""
    window = window_only(work, options.of_layers(MOST_SETS))
    moved = window.step_bytes / MOST_SETS
    timing = time_graph(RecordedCalls(window.attention, work).calls, options.seconds)
    return {
        **timing.to_json(),
        **_against_roofline(timing, moved, options.ceilings["read_gbps"]),
        "hbm_bytes": round(moved),
    }


def sparse_case(op: SparseOp, options: Options) -> dict[str, Any]:
    """Check and time search and attention on the device."""
    op.check()
    steps = capture(op.calls)
    whole = time_replays(steps.replay, len(op.calls), options.seconds)
    parts = times_by_purpose(kernel_times(steps.replay, PROFILED_RUNS), len(op.calls))
    return {
        **whole.to_json(),
        "parts_us": parts,
        **_against_roofline(whole, sum(op.moved.values()), options.ceilings["read_gbps"]),
        "moved_parts_bytes": op.moved,
        "num_sets": op.num_sets,
        "hbm_bytes": op.stored_bytes,
    }


def _against_roofline(timing: Timing, moved_bytes: float, best_gbps: float) -> dict[str, float]:
    gbps = moved_bytes / timing.p50_us / 1e3
    return {
        "moved_bytes": round(moved_bytes),
        "gbps": round(gbps, 1),
        "roofline_us": round(moved_bytes / best_gbps / 1e3, 2),
        "of_roofline": round(gbps / best_gbps, 3),
    }
