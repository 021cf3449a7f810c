"""Time one layer's attention in one step by itself: the fastest full attention, and csattn."""

from typing import Any

import torch

from bench.decode.baselines import fastest_full_attention
from bench.decode.gpu_timing import Timing, capture, num_input_sets, time_replays
from bench.decode.kernel_times import kernel_times, times_by_purpose
from bench.decode.options import Options
from bench.decode.recording import Recording
from bench.decode.roofline import full_bytes
from bench.decode.sparse_op import SET_BYTES, SparseOp
from bench.decode.steps import merge_requests
from bench.decode.workload import Workload
from bench.records import Records
from csattn.errors import CsattnError

OTHERS = ("full",)  # variants that `of_variant` does not read
PROFILED_RUNS = 3


def run_op_cases(
    results: Records,
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
                    "placement": "device",
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
