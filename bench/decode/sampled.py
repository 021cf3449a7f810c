"""MagicPIG's step, as fast as its bytes allow: it samples rows by hash tables in host memory, and the CPU attends.

Not an implementation, but a bound in its favour: the step of sinks and window alone, on the GPU, and behind each layer's
query what the CPU has to read for it, at the rate at which this CPU reads memory. How many rows that is follows from the
recorded queries and keys; rows that several query heads of a group sample count once.
"""

from dataclasses import dataclass

import torch

from bench.decode.workload import Workload
from csattn.selectors.magicpig import hash_codes

TABLES = {"magicpig": 150, "magicpig-300": 300}  # as published, K = 10
NUM_BITS, SEED = 10, 1234
KEYS_PER_BLOCK = 4096
NUM_QUERIES = 4  # recorded steps that are sampled
PROBE_BYTES, PROBES = 4 << 30, 5


@dataclass(frozen=True, slots=True)
class Sampled:
    """Of one layer and one request, the mean of some steps."""

    rows_share: float  # of the context, of a KV head's rows
    bytes_read: float  # of buckets and of rows


def sample(work: Workload, num_tables: int) -> Sampled:
    """What its tables take for the recorded queries of the first layer."""
    heads = work.heads
    keys = work.keys(0)
    generator = torch.Generator().manual_seed(SEED)
    projections = torch.randn(heads.head_dim, num_tables * NUM_BITS, generator=generator).to(work.device)
    mean = keys.float().mean(1, keepdim=True)
    steps = work.queries(0)
    step_ids = torch.linspace(0, len(steps) - 1, NUM_QUERIES).long().tolist()
    queries = steps[step_ids, 0].float().view(NUM_QUERIES, heads.num_kv_heads, -1, heads.head_dim)
    asked = hash_codes(queries, projections, num_tables)  # [NUM_QUERIES, num_kv_heads, group_size, num_tables]
    num_rows = num_met = 0
    for block in torch.split(keys, KEYS_PER_BLOCK, dim=1):
        codes = hash_codes(block.float() - mean, projections, num_tables)  # [num_kv_heads, num_keys, num_tables]
        for of_step in asked:
            meetings = (of_step[:, :, None] == codes[:, None]).sum(-1)
            num_met += int(meetings.sum())
            num_rows += int((meetings >= 2).any(1).sum())
    row = row_bytes_of_head(work)
    share = num_rows / NUM_QUERIES / heads.num_kv_heads / work.context_len
    return Sampled(share, (4 * num_met + row * num_rows) / NUM_QUERIES)
