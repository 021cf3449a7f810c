"""MagicPIG's step, as fast as its bytes allow: it samples rows by hash tables in host memory, and the CPU attends.

Not an implementation, but a bound in its favour: the step of sinks and window alone, whose attention a GPU does
meanwhile, and in each layer what the CPU has to read for the queries, at the rate at which this CPU reads memory. How
many rows that is follows from recorded queries and keys; rows that several query heads of a group sample count once.
"""

import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from bench.decode.options import Options
from bench.decode.results import Results
from bench.decode.roofline import row_bytes
from bench.decode.widened import NUM_WIDE_LAYERS
from bench.decode.workload import Workload
from bench.records import Case
from bench.timing import gate
from csattn.config import SearchConfig
from csattn.selectors.base import ContextView
from csattn.selectors.magicpig import hash_codes, make_projections


@dataclass(frozen=True, slots=True)
class Tables:
    """Of hashes, as published."""

    num_bits: int
    number: int


TABLES = {"magicpig": Tables(10, 150), "magicpig-300": Tables(11, 300)}
ALIKE = "kind", "shape", "context_len", "batch_size", "weights"  # of cases of a batch
KEYS_PER_BLOCK = 2048
NUM_QUERIES = 4  # recorded steps that are sampled for
PROBE_BYTES, PROBES = 4 << 30, 5


@dataclass(frozen=True, slots=True)
class Sampled:
    """For one request's step in a layer, the mean over some steps and all KV heads."""

    rows: float  # that any query head of a KV head's group samples
    met: float  # entries of the buckets that these query heads fall into, all tables


def sample(work: Workload, tables: Tables, search: SearchConfig) -> Sampled:
    """What the tables have for recorded queries, the mean over layers that differ."""
    layers = [_of_layer(work, layer_idx, tables, search) for layer_idx in range(NUM_WIDE_LAYERS)]
    return Sampled(*(sum(counts) / len(layers) for counts in zip(*layers, strict=True)))


def _of_layer(work: Workload, layer_idx: int, tables: Tables, search: SearchConfig) -> tuple[float, float]:
    heads, keys, steps = work.heads, work.keys(layer_idx), work.queries(layer_idx)
    middle = ContextView(work.context_len, heads.softmax_scale, search).middle
    projections = make_projections(heads.head_dim, tables.num_bits, tables.number).to(work.device)
    mean = keys.float().mean(1, keepdim=True)
    step_ids = torch.linspace(0, len(steps) - 1, NUM_QUERIES).long()
    queries = steps[step_ids, 0].float().view(NUM_QUERIES, heads.num_kv_heads, heads.group_size, heads.head_dim)
    asked = hash_codes(queries, projections, tables.number)  # [NUM_QUERIES, num_kv_heads, group_size, number]
    num_rows = num_met = 0
    for first in range(0, work.context_len, KEYS_PER_BLOCK):
        block = keys[:, first : first + KEYS_PER_BLOCK].float()
        codes = hash_codes(block - mean, projections, tables.number)  # [num_kv_heads, num_keys, number]
        rows = torch.arange(first, first + block.shape[1], device=work.device)
        is_far = (rows >= middle.start) & (rows < middle.stop)
        for of_step in asked:
            meetings = (of_step[:, :, None] == codes[:, None]).sum(-1)
            num_met += int(meetings.sum())
            num_rows += int(((meetings >= 2).any(1) & is_far).sum())
    num_heads = NUM_QUERIES * heads.num_kv_heads
    return num_rows / num_heads, num_met / num_heads


def add_bounds(results: Results, work: Workload, options: Options, variants: list[str], key: Case) -> None:
    """Those that are asked for, of a batch. key: of its cases; that of sinks and window alone was measured."""
    for variant in (variant for variant in variants if variant in TABLES):
        wanted = {"variant": "window", **{name: key.get(name) for name in ALIKE}}
        alone = [case for case in results.cases if all(case.get(name) == value for name, value in wanted.items())]
        gate(bool(alone), f"{variant} is a bound above sinks and window alone; ask for the variant window before it")
        found: Case = {**key, "variant": variant, "placement": "host", "schedule": "every step"}
        if not results.has(**found):
            results.add({**found, "data": work.data, **bound_case(work, options, variant, alone[0], host_read_gbps())})


def bound_case(work: Workload, options: Options, variant: str, window: Case, read_gbps: float) -> dict[str, Any]:
    """What a step of the batch takes at least. window: the case of sinks and window alone; read_gbps: of the host."""
    tables = TABLES[variant]
    sampled = sample(work, tables, options.search)
    of_head = row_bytes(options.shape) // work.heads.num_kv_heads
    heads = options.num_layers * work.heads.num_kv_heads
    step_bytes = heads * work.batch_size * (of_head * sampled.rows + 4 * sampled.met)
    us = window["p50_us"] - options.num_layers * window["attention_us"] + step_bytes / read_gbps / 1e3
    return {
        "is_bound": True,
        "p50_us": round(us, 1),
        "mean_us": round(us, 1),
        "tokens_per_s": round(work.batch_size / us * 1e6, 1),
        "rows_share": round(sampled.rows / work.context_len, 4),
        "host_bytes_read": round(step_bytes),
        "host_gbps": round(read_gbps, 1),
        "index_bytes": heads * work.num_contexts * 4 * tables.number * work.context_len,
    }


@cache
def host_read_gbps() -> float:
    """What all of this machine's CPUs together read of memory."""
    words = torch.ones(PROBE_BYTES // 8, dtype=torch.int64)
    rates = []
    for _ in range(PROBES):
        started = time.perf_counter()
        words.sum()
        rates.append(PROBE_BYTES / (time.perf_counter() - started) / 1e9)
    return max(rates)
