"""MagicPIG's step: hash tables in host memory sample rows, and the CPU attends to them.

The time of a step is put together from two measured parts: the GPU's step over sinks and window alone, and the time of
all CPUs for one layer after another. Each layer needs both parts of the layer before. While the CPU works, the GPU
attends to sinks, window and tail. All else counts as free, to MagicPIG's advantage: hashing the queries, copying them
to the host and outputs back, starting the CPU's part, joining it with the GPU's, and hashing the rows of answers.
"""

import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.decode.options import Options
from bench.decode.roofline import row_bytes
from bench.decode.sampled_layer import HashedLayer, OtherLayers, SampledAttention, Tables, hash_layer
from bench.decode.widened import NUM_WIDE_LAYERS
from bench.decode.workload import Workload
from bench.records import Case, Records
from bench.timing import gate
from csattn.attention import reference
from csattn.cpu.team import Team
from csattn.cpus import available_cpus
from csattn.selectors.base import ContextView
from csattn.selectors.magicpig import hash_codes, sampling_probability

TABLES = {"magicpig": Tables(10, 150), "magicpig-300": Tables(11, 300)}
BATCH_FIELDS = "kind", "shape", "context_len", "batch_size", "weights"  # fields that the cases of a batch share
NUM_STEPS = 40  # timed for each layer
PROBE_BYTES, PROBES = 4 << 30, 5
NUMBER_BYTES = 4  # of a row id in a bucket, and of a key's norm


@dataclass(frozen=True, slots=True)
class Sampled:
    """Figures of a batch in one layer, an entry for each timed step."""

    us: NDArray[np.float64]  # CPU time
    rows: NDArray[np.int64]  # rows read; one that several query heads of a group sample counts once
    bucket_entries: NDArray[np.int64]  # entries in the buckets of all query heads, in all tables


def add_sampled(results: Records, work: Workload, options: Options, variants: list[str], key: Case) -> None:
    """Measure those of the variants that are MagicPIG's, for a batch.

    key: the fields that the batch's cases share. Raises GateError if the variant `window` has not been measured before.
    """
    for variant in (variant for variant in variants if variant in TABLES):
        wanted = {"variant": "window", **{name: key.get(name) for name in BATCH_FIELDS}}
        windows = [case for case in results.cases if all(case.get(name) == value for name, value in wanted.items())]
        gate(
            bool(windows),
            f"{variant}'s step begins with that of sinks and window; ask for the variant window before it",
        )
        found: Case = {**key, "variant": variant, "placement": "host", "schedule": "every step"}
        if not results.has(**found):
            started = time.perf_counter()
            case = sampled_case(work, options, variant, windows[0])
            results.add({**found, "data": work.data, **case, "case_s": round(time.perf_counter() - started, 1)})


def sampled_case(work: Workload, options: Options, variant: str, window: Case) -> dict[str, Any]:
    """Return the figures of the batch's steps. window: the case of sinks and window alone."""
    tables, num_kv_heads = TABLES[variant], work.heads.num_kv_heads
    read_gbps = host_read_gbps()
    layers = sample(work, options, tables)
    cpu_us, rows, bucket_entries = (
        np.mean([getattr(of, name) for of in layers], axis=0) for name in ("us", "rows", "bucket_entries")
    )
    longer_us = [np.maximum(of.us - window["attention_us"], 0) for of in layers]
    times_us = window["p50_us"] + options.num_layers * np.mean(longer_us, axis=0)
    p50, p99 = (float(x) for x in np.percentile(times_us, [50, 99]))
    mean = float(times_us.mean())
    of_row = row_bytes(options.shape) // num_kv_heads + NUMBER_BYTES
    step_bytes = options.num_layers * (of_row * rows.mean() + NUMBER_BYTES * bucket_entries.mean())
    bound_us = step_bytes / options.num_layers / read_gbps / 1e3
    index_rows = options.num_layers * num_kv_heads * work.num_contexts * work.context_len
    return {
        "p50_us": round(p50, 1),
        "p99_us": round(p99, 1),
        "mean_us": round(mean, 1),
        "num_samples": len(times_us),
        "tokens_per_s": round(work.batch_size / mean * 1e6, 1),
        "cpu_us": round(float(np.median(cpu_us)), 1),  # per layer
        "rows_share": round(float(rows.mean()) / (work.batch_size * num_kv_heads * work.context_len), 4),
        "host_bytes_read": round(step_bytes),
        "host_gbps": round(read_gbps, 1),
        "of_bound": round(bound_us / float(np.median(cpu_us)), 3),  # time of these bytes at that rate, over cpu_us
        "index_bytes": index_rows * NUMBER_BYTES * tables.number,
        "hbm_bytes": window["hbm_bytes"],
    }


def sample(work: Workload, options: Options, tables: Tables) -> list[Sampled]:
    """Measure the distinct layers, which are in memory one at a time."""
    num_layers = min(NUM_WIDE_LAYERS, options.num_layers)
    with Team(available_cpus()) as team:
        others = OtherLayers(team)
        return [_of_layer(work, options, tables, layer_idx, team, others) for layer_idx in range(num_layers)]


def _of_layer(
    work: Workload, options: Options, tables: Tables, layer_idx: int, team: Team, others: OtherLayers
) -> Sampled:
    view = ContextView(work.context_len, work.heads.softmax_scale, options.search)
    layer = hash_layer(work.rows(layer_idx), tables)
    attention = SampledAttention(team, layer, work.num_contexts, work.batch_size, options.shape.num_q_heads, view)
    queries = work.queries(layer_idx).float().cpu()
    attention.hash_queries(queries[0])
    attention.attend()
    _check(layer, attention, queries[0, 0, 0], view)
    us, rows, bucket_entries = [], [], []
    for step in range(1, 1 + NUM_STEPS):
        read = row_bytes(options.shape) // work.heads.num_kv_heads * attention.num_rows
        attention.hash_queries(queries[step % len(queries)])
        others.read((options.num_layers - 1) * (read + NUMBER_BYTES * attention.num_bucket_entries))
        started = time.perf_counter()
        attention.attend()
        us.append((time.perf_counter() - started) * 1e6)
        rows.append(attention.num_rows)
        bucket_entries.append(attention.num_bucket_entries)
    return Sampled(np.array(us), np.array(rows), np.array(bucket_entries))


def _check(layer: HashedLayer, attention: SampledAttention, q: Tensor, view: ContextView) -> None:
    """Raise GateError if attention of the first request's first head is not the definition's. q: [head_dim]."""
    tables, rows, starts = layer.tables, layer.rows[0], layer.starts[0].tolist()
    codes = hash_codes(q, layer.projections, tables.number).tolist()
    buckets = [of[at[code] : at[code + 1]] for of, at, code in zip(rows, starts, codes, strict=True)]
    collisions = torch.bincount(torch.cat(buckets).long(), minlength=view.context_len)
    sampled = view.middle.start + (collisions[view.middle] >= 2).nonzero()[:, 0]
    k, v = layer.kv[0, sampled].float().unbind(1)
    cosines = torch.cosine_similarity(k - layer.key_mean[0], q, dim=-1)
    log_weights = -sampling_probability(cosines, tables.num_bits, tables.number).log().float()
    wanted = reference.attend(q[None, None, None], k[None, None], v[None, None], view.softmax_scale, None, log_weights)
    for got, want in zip((attention.out[0, 0], attention.lse[0, 0]), wanted, strict=True):
        off = (got - want.view(got.shape)).nan_to_num().abs().max()  # for no rows, both lse are -inf
        gate(float(off) < 1e-3, f"attention to sampled rows is off by {float(off):.2e}")


@cache
def host_read_gbps() -> float:
    """Return the best rate in GB/s at which all CPUs of this machine together read memory."""
    words = torch.ones(PROBE_BYTES // 8, dtype=torch.int64)
    rates = []
    for _ in range(PROBES):
        started = time.perf_counter()
        words.sum()
        rates.append(PROBE_BYTES / (time.perf_counter() - started) / 1e9)
    return max(rates)
