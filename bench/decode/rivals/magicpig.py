"""MagicPIG (arXiv:2410.16179) on the CPU: tables probed, and attention to the rows that were sampled, where they lie;
definition: `csattn.selectors.magicpig`.

A query head's rows are its own, so its whole attention to them is: only outputs and their sums leave the CPU.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.decode.rivals.records import Told, reader_of, record_of, scratch
from csattn.attention.row_math import mix, score_16, weigh
from csattn.cpu.floats import LANES, exp_lanes
from csattn.cpu.tape import Tape
from csattn.jit import exact_kernel
from csattn.search.atomics import array_at
from csattn.search.simd import F32x16, fill, prefetch, prefetch_early, store
from csattn.selectors.magicpig import sampling_probability

RANGE_ROWS, MAX_RANGES = 256, 16  # sampled rows are attended to in ranges of that many, more where there are many
CHANCES = 8192  # cosines whose chance is known; between them it is interpolated
TABLES_AHEAD = 12  # whose rows are asked for before they are counted
MOST_AHEAD = 256  # rows of a bucket that are asked for: of longer ones the rest comes as it is read
NO_ROW = np.float32(-1e30)  # the largest logit where there is none

LSH = record_of(
    (
        "num_q_heads",
        "group_size",
        "head_dim",
        "num_keys",
        "first",  # keys [first, last) may be sampled
        "last",
        "num_tables",
        "num_codes",
        "codes",  # [num_q_heads, num_tables] int16: the queries'
        "rows",  # [num_kv_heads, num_tables, num_keys] int32: `PreparedMagicpig.rows`
        "starts",  # [num_kv_heads, num_tables, num_codes + 1] int32
        "q",  # [num_q_heads, head_dim] float32
        "kv",  # [num_kv_heads, num_keys, 2, head_dim] bfloat16
        "key_mean",  # [num_kv_heads, head_dim] float32
        "norms",  # [num_kv_heads, num_keys] float32: of the keys less their mean
        "chances",  # [CHANCES + 2] float32: minus the logarithm of how likely a row is sampled, by its cosine
        "meetings",  # [num_threads, num_keys] uint8, zero between searches
        "sampled",  # [num_q_heads, num_keys + 1] int32
        "num_sampled",  # [num_q_heads] int64
        "parts",  # [num_q_heads, MAX_RANGES, head_dim + 2] float32
        "out",  # [num_q_heads, head_dim + 2] float32, written: weighted sum of values, largest logit, sum of weights
    ),
    ("softmax_scale",),
)
lsh_at = reader_of(LSH)


class SampledAttention:
    """One row's attention to its sampled rows: fill `q` and `codes`, point the others at the layer, run the tape."""

    def __init__(
        self,
        shape: tuple[int, int, int],  # num_kv_heads, group_size, head_dim
        num_keys: int,
        middle: slice,
        softmax_scale: float,
        num_bits: int,
        num_tables: int,
        num_threads: int,
    ) -> None:
        num_kv_heads, group_size, head_dim = shape
        num_q_heads = num_kv_heads * group_size
        self.told = told = Told(LSH)
        sizes = {"num_q_heads": num_q_heads, "group_size": group_size, "head_dim": head_dim, "num_keys": num_keys}
        sizes |= {"first": middle.start, "last": middle.stop, "num_tables": num_tables, "num_codes": 1 << num_bits}
        for name, size in sizes.items():
            told[name] = size
        told["softmax_scale"] = softmax_scale
        told["chances"] = log_weights(num_bits, num_tables)
        told["meetings"] = scratch((num_threads, -(-num_keys // 64) * 64), np.uint8)
        told["sampled"] = scratch((num_q_heads, num_keys + 1), np.int32)
        told["num_sampled"] = scratch((num_q_heads,), np.int64)
        told["parts"] = scratch((num_q_heads, MAX_RANGES, head_dim + 2), np.float32)
        self.tape = Tape()
        self.tape.add(probe_stage, told.words, num_q_heads)
        self.tape.add(attend_stage, told.words, num_q_heads * MAX_RANGES)
        self.tape.add(merge_stage, told.words, num_q_heads)


def log_weights(num_bits: int, num_tables: int) -> NDArray[np.float32]:
    """What a sampled row's logit is raised by, at cosines from -1 to 1: [CHANCES + 2], the last one twice."""
    cosines = torch.linspace(-1, 1, CHANCES + 1, dtype=torch.float64)
    weights = -sampling_probability(cosines, num_bits, num_tables).log()
    return torch.cat([weights, weights[-1:]]).float().numpy()


def probe_stage(arguments: int, q_head: int, thread: int, unused: int) -> int:
    """The keys that a query meets in at least two tables."""
    lsh = lsh_at(arguments)
    kv_head, num_tables, num_keys = q_head // lsh.group_size, lsh.num_tables, lsh.num_keys
    codes = array_at(lsh.codes + 2 * q_head * num_tables, num_tables, np.int16(0))
    size = num_tables * (lsh.num_codes + 1)
    starts = array_at(lsh.starts + 4 * kv_head * size, size, np.int32(0))
    rows = array_at(lsh.rows + 4 * kv_head * num_tables * num_keys, num_tables * num_keys, np.int32(0))
    room = -(-num_keys // 64) * 64
    meetings = array_at(lsh.meetings + thread * room, room, np.uint8(0))
    sampled = array_at(lsh.sampled + 4 * q_head * (num_keys + 1), num_keys + 1, np.int32(0))
    begins, ends = np.empty(num_tables, np.int64), np.empty(num_tables, np.int64)
    for table in range(num_tables):
        bucket = table * (lsh.num_codes + 1) + np.int64(codes[table])
        begins[table] = table * num_keys + np.int64(starts[bucket])
        ends[table] = table * num_keys + np.int64(starts[bucket + 1])
    first, last, count = np.uint64(lsh.first), np.uint64(lsh.last), np.int64(0)
    for table in range(-TABLES_AHEAD, num_tables):
        later = table + TABLES_AHEAD
        if later < num_tables:
            for line in range(begins[later], min(ends[later], begins[later] + MOST_AHEAD), 16):
                prefetch_early(rows, line)
        if table < 0:
            continue
        for i in range(begins[table], ends[table]):
            row = np.uint64(rows[np.uint64(i)])
            met = np.uint8(meetings[row] + np.uint8(1))
            meetings[row] = met
            sampled[np.uint64(count)] = row  # no branch, for nobody could foretell it
            count += np.int64(met == 2) & np.int64(row >= first) & np.int64(row < last)
    array_at(lsh.num_sampled, lsh.num_q_heads, np.int64(0))[q_head] = count
    meetings[:] = 0
    return 0


def attend_stage(arguments: int, piece: int, thread: int, unused: int) -> int:
    """A query head's attention to a range of its sampled rows, each weighed by how likely it was sampled."""
    lsh = lsh_at(arguments)
    q_head, number = piece // MAX_RANGES, piece % MAX_RANGES
    num_sampled = array_at(lsh.num_sampled, lsh.num_q_heads, np.int64(0))[q_head]
    range_rows = _range_rows(num_sampled)
    first, last = number * range_rows, min((number + 1) * range_rows, num_sampled)
    if first >= last:
        return 0
    head_dim, num_keys, kv_head = lsh.head_dim, lsh.num_keys, q_head // lsh.group_size
    sampled = array_at(lsh.sampled + 4 * (q_head * (num_keys + 1) + first), last - first, np.int32(0))
    count, row_bytes = last - first, 4 * head_dim
    room = -(-count // LANES) * LANES
    addresses = np.empty(room, np.int64)
    kv = lsh.kv + kv_head * num_keys * row_bytes
    for i in range(room):
        addresses[i] = kv + np.int64(sampled[min(i, count - 1)]) * row_bytes
    q = array_at(lsh.q + 4 * q_head * head_dim, head_dim, np.float32(0))
    weights = np.empty(room, np.float32)
    for block in range(0, room, LANES):
        for i in range(block + LANES, min(block + 2 * LANES, room)):
            for line in range(0, 2 * head_dim, 32):
                prefetch(array_at(addresses[i], 2 * head_dim, np.uint16(0)), line)
        score_16(q, addresses, block, np.uint16(0), head_dim, 1, lsh.softmax_scale, weights, block, room)
    _raise_by_chance(lsh, q, kv_head, sampled, weights)
    for i in range(count, room):
        weights[i] = weights[count - 1]
    words = head_dim + 2
    part = array_at(lsh.parts + 4 * piece * words, words, np.float32(0))
    weigh(weights, 0, count, room, part, head_dim)
    part[:head_dim] = 0.0
    mix(weights, 0, addresses, 0, room, head_dim, np.uint16(0), head_dim, part)
    return 0


def merge_stage(arguments: int, q_head: int, thread: int, unused: int) -> int:
    lsh = lsh_at(arguments)
    head_dim, words = lsh.head_dim, lsh.head_dim + 2
    num_sampled = array_at(lsh.num_sampled, lsh.num_q_heads, np.int64(0))[q_head]
    ranges = -(-num_sampled // _range_rows(num_sampled))
    parts = array_at(lsh.parts + 4 * q_head * MAX_RANGES * words, MAX_RANGES * words, np.float32(0))
    out = array_at(lsh.out + 4 * q_head * words, words, np.float32(0))
    top = NO_ROW
    for i in range(ranges):
        top = max(top, parts[i * words + head_dim])
    for j in range(words):
        out[j] = 0.0
    scales = np.empty(LANES, np.float32)
    for i in range(ranges):
        store(scales, 0, exp_lanes(fill(F32x16, parts[i * words + head_dim] - top)))
        for j in range(head_dim):
            out[j] += scales[0] * parts[i * words + j]
        out[head_dim + 1] += scales[0] * parts[i * words + head_dim + 1]
    out[head_dim] = top
    return 0


@exact_kernel
def _range_rows(num_sampled: int) -> int:
    rows: int = max(RANGE_ROWS, -(-num_sampled // (MAX_RANGES * LANES)) * LANES)
    return rows


@exact_kernel
def _raise_by_chance(
    lsh: Any, q: NDArray[np.float32], kv_head: int, sampled: NDArray[np.int32], logits: NDArray[np.float32]
) -> None:
    """Add to each row's logit what its chance to be sampled is worth: it follows from its angle with the query."""
    head_dim = lsh.head_dim
    mean = array_at(lsh.key_mean + 4 * kv_head * head_dim, head_dim, np.float32(0))
    norms = array_at(lsh.norms + 4 * kv_head * lsh.num_keys, lsh.num_keys, np.float32(0))
    chances = array_at(lsh.chances, CHANCES + 2, np.float32(0))
    with_mean, squares = np.float32(0.0), np.float32(0.0)
    for i in range(head_dim):
        with_mean += q[i] * mean[i]
        squares += q[i] * q[i]
    to_product = np.float32(1.0 / lsh.softmax_scale)
    norm = max(np.float32(np.sqrt(squares)), np.float32(1e-20))
    for i in range(len(sampled)):
        cosine = (logits[i] * to_product - with_mean) / (norm * max(norms[sampled[i]], np.float32(1e-20)))
        place = (min(max(cosine, np.float32(-1.0)), np.float32(1.0)) + np.float32(1.0)) * np.float32(CHANCES / 2)
        whole = np.int64(place)
        part = place - np.float32(whole)
        logits[i] += chances[whole] + part * (chances[whole + 1] - chances[whole])
