"""MagicPIG's step, as fast as its bytes allow: it samples rows by hash tables in host memory, and the CPU attends.

Not an implementation, but a bound in its favour: the step of sinks and window alone, on the GPU, and in each layer what
the CPU has to read for the queries, at the rate at which this CPU reads memory. How many rows that is follows from the
recorded queries and keys; rows that several query heads of a group sample count once.
"""

import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from bench.decode.options import Options
from bench.decode.roofline import row_bytes
from bench.decode.widened import NUM_WIDE_LAYERS
from bench.decode.workload import Workload
from csattn.selectors.magicpig import hash_codes

TABLES = {"magicpig": 150, "magicpig-300": 300}  # both as published, of NUM_BITS bits
NUM_BITS, SEED = 10, 1234
KEYS_PER_BLOCK = 2048
NUM_QUERIES = 4  # recorded steps that are sampled for
PROBE_BYTES, PROBES = 4 << 30, 5


@dataclass(frozen=True, slots=True)
class Sampled:
    """For one request's step in a layer, the mean over some steps and all KV heads."""

    rows: float  # that any query head of a KV head's group samples
    met: float  # entries of the buckets that these query heads fall into, all tables


def sample(work: Workload, num_tables: int) -> Sampled:
    """What the tables have for recorded queries, the mean over layers that differ."""
    layers = [_of_layer(work, layer_idx, num_tables) for layer_idx in range(NUM_WIDE_LAYERS)]
    return Sampled(*(sum(counts) / len(layers) for counts in zip(*layers, strict=True)))


def _of_layer(work: Workload, layer_idx: int, num_tables: int) -> tuple[float, float]:
    heads, keys, steps = work.heads, work.keys(layer_idx), work.queries(layer_idx)
    generator = torch.Generator().manual_seed(SEED)
    projections = torch.randn(heads.head_dim, num_tables * NUM_BITS, generator=generator).to(work.device)
    mean = keys.float().mean(1, keepdim=True)
    step_ids = torch.linspace(0, len(steps) - 1, NUM_QUERIES).long()
    queries = steps[step_ids, 0].float().view(NUM_QUERIES, heads.num_kv_heads, heads.group_size, heads.head_dim)
    asked = hash_codes(queries, projections, num_tables)  # [NUM_QUERIES, num_kv_heads, group_size, num_tables]
    num_rows = num_met = 0
    for block in torch.split(keys, KEYS_PER_BLOCK, dim=1):
        codes = hash_codes(block.float() - mean, projections, num_tables)  # [num_kv_heads, num_keys, num_tables]
        for of_step in asked:
            meetings = (of_step[:, :, None] == codes[:, None]).sum(-1)
            num_met += int(meetings.sum())
            num_rows += int((meetings >= 2).any(1).sum())
    num_heads = NUM_QUERIES * heads.num_kv_heads
    return num_rows / num_heads, num_met / num_heads


def bound_case(work: Workload, options: Options, variant: str, window_us: float) -> dict[str, Any]:
    """What a step of the batch takes at least. window_us: of sinks and window alone, all layers and products."""
    sampled = sample(work, TABLES[variant])
    of_head = row_bytes(options.shape) // work.heads.num_kv_heads
    heads = options.num_layers * work.heads.num_kv_heads
    step_bytes = heads * work.batch_size * (of_head * sampled.rows + 4 * sampled.met)
    index_bytes = heads * work.num_contexts * 4 * TABLES[variant] * work.context_len
    us = window_us + step_bytes / host_read_gbps() / 1e3
    return {
        "is_bound": True,
        "p50_us": round(us, 1),
        "mean_us": round(us, 1),
        "tokens_per_s": round(work.batch_size / us * 1e6, 1),
        "rows_share": round(sampled.rows / work.context_len, 4),
        "host_bytes_read": round(step_bytes),
        "host_gbps": round(host_read_gbps(), 1),
        "index_bytes": index_bytes,
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
