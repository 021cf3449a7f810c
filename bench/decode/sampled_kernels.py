"""MagicPIG's work on the CPU in a layer of a step, as stages: count hash collisions, attend to rows that collide twice.

`csattn.selectors.magicpig` is the definition. A row collides with a query in each table in which both have the same
code. A piece of the first stage is a part of a query head's tables: a thread counts collisions in one byte per row, and
keeps a bit for each row that collides at least once in this part, and one for each that collides at least twice. A
piece of the second stage is a range of a KV head's rows, to which its query heads attend one after the other, so that a
row that several of them sample is read from memory once and then from a cache. The third stage joins the ranges.
"""

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from csattn.attention.row_math import LEAST, add_weighted_values, score_16, softmax_weights
from csattn.cpu.addresses import LINE_BYTES, array_at
from csattn.cpu.arguments import floats_of, number_at, word_of, words_at
from csattn.cpu.jit import exact_kernel
from csattn.cpu.lanes import larger, mask_at_least, population, smaller, trailing_zeros
from csattn.cpu.simd import LANES, F32x16, Vector, fill, load, prefetch, prefetch_early, store

U8x64 = Vector(types.uint8, 64)
WORD = 64  # rows for each word of bits
NUM_PARTS = 2  # of a head's tables, for more pieces; a part has at most 255, because a byte counts
RANGE_WORDS = 32
STEPS = 8192  # intervals in the table of log weights
AHEAD = 8  # how many buckets ahead are prefetched
EARLY_ROWS = 2 * LANES  # how far ahead rows are prefetched

# "by context" is the address of an int64 array with an address for each context
ARGUMENTS = (
    "num_contexts",  # request i continues context i % num_contexts
    "num_kv_heads",
    "group_size",
    "head_dim",
    "context_len",
    "first",  # rows [first, stop) may be taken
    "stop",
    "num_tables",
    "num_codes",
    "kvs",  # by context: [num_kv_heads, context_len, 2, head_dim] bfloat16
    "norms",  # by context: [num_kv_heads, context_len] float32, 1 / |key - mean key|
    "rows",  # by context: [num_kv_heads, num_tables, context_len] int32
    "starts",  # by context: [num_kv_heads, num_tables, num_codes + 1] int32
    "q",  # [batch_size, num_q_heads, head_dim] float32
    "codes",  # [batch_size, num_q_heads, num_tables] int16
    "to_cosines",  # [batch_size, num_q_heads, 2] float32: the cosine is (logit - first) * second * norm
    "softmax_scale",  # address of a float64
    "log_weights",  # [STEPS + 2] float32, at each 1 - cosine in steps of 2 / STEPS
    "counters",  # [num_threads, num_words * WORD] uint8, zeros between pieces
    "collision_bits",  # [batch_size, num_q_heads, NUM_PARTS, 2, num_words] uint64: rows that collide once, and twice
    "num_ranges",  # ranges of RANGE_WORDS words
    "parts",  # [batch_size, num_q_heads, num_ranges, head_dim + 2] float32
    "entries_read",  # [batch_size * num_q_heads * NUM_PARTS] int64, written: bucket entries
    "rows_read",  # [batch_size * num_kv_heads * num_ranges] int64, written: rows that any head of the group samples
    "out",  # [batch_size, num_q_heads, head_dim] float32
    "lse",  # [batch_size, num_q_heads] float32
)
arguments_at = words_at(ARGUMENTS)


def count_collisions_stage(arguments: int, piece: int, thread: int, unused: int) -> int:
    """Count collisions. A piece is a part of the tables of a query head: NUM_PARTS * num_q_heads for each request."""
    args = arguments_at(arguments)
    _count(args, piece, thread)
    _keep_bits(args, piece, thread)
    return 0


def attend_stage(arguments: int, piece: int, thread: int, unused: int) -> int:
    """Attend to sampled rows. A piece is a range of a KV head: num_ranges * num_kv_heads for each request."""
    _attend(arguments_at(arguments), piece, np.uint16(0))
    return 0


def join_stage(arguments: int, piece: int, thread: int, unused: int) -> int:
    """Join the ranges by their log-sum-exps. A piece is a query head of a request."""
    args = arguments_at(arguments)
    words = args.head_dim + 2
    parts = array_at(args.parts + 4 * piece * args.num_ranges * words, args.num_ranges * words, np.float32(0))
    joined = np.zeros(words, np.float32)
    joined[args.head_dim] = LEAST
    for number in range(args.num_ranges):
        _join(joined, parts[number * words : (number + 1) * words])
    out, total = floats_of(args.out, piece, args.head_dim), joined[args.head_dim + 1]
    for j in range(args.head_dim):
        out[j] = joined[j] / total if total > 0 else np.float32(0)
    lse = np.float32(joined[args.head_dim] + np.log(total)) if total > 0 else np.float32(-np.inf)
    floats_of(args.lse, piece, 1)[0] = lse
    return 0


@exact_kernel
def _num_words(args: Any) -> int:
    words: int = -(-args.context_len // WORD)
    return words


@exact_kernel
def _count(args: Any, piece: int, thread: int) -> None:
    """Count collisions in the thread's counters."""
    head, part = piece // NUM_PARTS, piece % NUM_PARTS
    request, q_head = head // (args.num_kv_heads * args.group_size), head % (args.num_kv_heads * args.group_size)
    context, kv_head = request % args.num_contexts, q_head // args.group_size
    num_tables, context_len, room = args.num_tables, args.context_len, _num_words(args) * WORD
    codes = array_at(args.codes + 2 * head * num_tables, num_tables, np.int16(0))
    num_starts = num_tables * (args.num_codes + 1)
    starts = array_at(word_of(args.starts, context) + 4 * kv_head * num_starts, num_starts, np.int32(0))
    table_rows = num_tables * context_len
    rows = array_at(word_of(args.rows, context) + 4 * kv_head * table_rows, table_rows, np.int32(0))
    counters = array_at(args.counters + thread * room, room, np.uint8(0))
    first, last = part * num_tables // NUM_PARTS, (part + 1) * num_tables // NUM_PARTS
    for table in range(first, last):
        prefetch_early(starts, table * (args.num_codes + 1) + codes[table])
    for table in range(first, min(first + AHEAD, last)):
        _prefetch_bucket(starts, rows, table, codes[table], args.num_codes, context_len)
    read = 0
    for table in range(first, last):
        if table + AHEAD < last:
            _prefetch_bucket(starts, rows, table + AHEAD, codes[table + AHEAD], args.num_codes, context_len)
        at = table * (args.num_codes + 1) + codes[table]
        begin, end = table * context_len + starts[at], table * context_len + starts[at + 1]
        for row in rows[begin:end]:
            counters[np.uint32(row)] += np.uint8(1)
        read += end - begin
    array_at(args.entries_read + 8 * piece, 1, np.int64(0))[0] = read


@exact_kernel
def _prefetch_bucket(
    starts: NDArray[np.int32], rows: NDArray[np.int32], table: int, code: int, num_codes: int, context_len: int
) -> None:
    """Prefetch the first and last cache line of a bucket, and those between if there are any."""
    at = table * (num_codes + 1) + code
    begin, end = table * context_len + starts[at], table * context_len + starts[at + 1]
    prefetch_early(rows, begin)
    prefetch_early(rows, end)
    for place in range(begin + LANES, end - LANES, LANES):
        prefetch_early(rows, place)


@exact_kernel
def _keep_bits(args: Any, piece: int, thread: int) -> None:
    """Write the bits of rows that collide at least once, and twice, and set the thread's counters to zero."""
    num_words = _num_words(args)
    counters = array_at(args.counters + thread * num_words * WORD, num_words * WORD, np.uint8(0))
    bits = array_at(args.collision_bits + 16 * piece * num_words, 2 * num_words, np.uint64(0))
    zeros, ones, twos = fill(U8x64, 0), fill(U8x64, 1), fill(U8x64, 2)
    for word in range(num_words):
        counts = load(U8x64, counters, word * WORD)
        bits[word] = mask_at_least(counts, ones)
        bits[num_words + word] = mask_at_least(counts, twos)
        store(counters, word * WORD, zeros)


@exact_kernel
def _attend(args: Any, piece: int, like: Any) -> None:
    kv_head, number = piece // args.num_ranges, piece % args.num_ranges  # of all requests
    first, last = number * RANGE_WORDS, min((number + 1) * RANGE_WORDS, _num_words(args))
    group_size, head_dim, context_len = args.group_size, args.head_dim, args.context_len
    sampled = np.empty((group_size, last - first), np.uint64)
    array_at(args.rows_read + 8 * piece, 1, np.int64(0))[0] = _take(args, kv_head, first, sampled)
    context, at = kv_head // args.num_kv_heads % args.num_contexts, kv_head % args.num_kv_heads * context_len
    kv = word_of(args.kvs, context) + 4 * head_dim * (at + first * WORD)
    norms = array_at(word_of(args.norms, context) + 4 * (at + first * WORD), (last - first) * WORD, np.float32(0))
    rows, of_rows = np.empty(RANGE_WORDS * WORD, np.int64), np.empty(RANGE_WORDS * WORD, np.float32)
    weights = np.empty(RANGE_WORDS * WORD, np.float32)
    for g in range(group_size):
        q_head = kv_head * group_size + g
        part = floats_of(args.parts, q_head * args.num_ranges + number, head_dim + 2)
        part[:head_dim] = 0.0
        count = _list(sampled[g], kv, 4 * head_dim, norms, rows, of_rows)
        room = -(-count // LANES) * LANES
        _score(floats_of(args.q, q_head, head_dim), rows, room, number_at(args.softmax_scale), weights, like)
        _add_log_weights(args, q_head, of_rows, room, weights)
        softmax_weights(weights, 0, count, room, part, head_dim)
        _mix(weights, rows, room, part, like)


@exact_kernel
def _take(args: Any, kv_head: int, first_word: int, sampled: NDArray[np.uint64]) -> int:
    """Write each head's bits of sampled rows to taken [group_size, words of the range]; return how many any samples."""
    num_words, any_taken = _num_words(args), 0
    collision_bits = array_at(
        args.collision_bits + 16 * kv_head * len(sampled) * NUM_PARTS * num_words, 0, np.uint64(0)
    )
    for word in range(sampled.shape[1]):
        of_group, inside = np.uint64(0), _inside(args.first, args.stop, (first_word + word) * WORD)
        for g in range(len(sampled)):
            once = twice = np.uint64(0)
            for part in range(NUM_PARTS):
                at = 2 * (g * NUM_PARTS + part) * num_words + first_word + word
                here = collision_bits[at]
                twice |= collision_bits[at + num_words] | (once & here)
                once |= here
            sampled[g, word] = twice & inside
            of_group |= twice & inside
        any_taken += population(of_group)
    return any_taken


@exact_kernel
def _inside(first: int, stop: int, begin: int) -> np.uint64:
    """Return the bits of the rows [first, stop) in the word that begins with row `begin`."""
    low, high = max(first - begin, 0), min(stop - begin, WORD)
    if low >= high:
        return np.uint64(0)
    ones = np.uint64(0xFFFFFFFFFFFFFFFF)
    return (ones << np.uint64(low)) & (ones >> np.uint64(WORD - high))


@exact_kernel
def _list(
    sampled: NDArray[np.uint64],
    kv: int,
    row_bytes: int,
    norms: NDArray[np.float32],
    rows: NDArray[np.int64],
    of_rows: NDArray[np.float32],
) -> int:
    """Write the addresses of the taken rows and the inverse norms of their keys; return the number of rows.

    Copies of the last row fill up the last LANES.
    """
    count = 0
    for word in range(len(sampled)):
        bits = sampled[word]
        while bits != np.uint64(0):
            row = word * WORD + np.int64(trailing_zeros(bits))
            bits &= bits - np.uint64(1)
            rows[count], of_rows[count] = kv + row * row_bytes, norms[row]
            count += 1
    for i in range(count, -(-count // LANES) * LANES):
        rows[i], of_rows[i] = rows[count - 1], of_rows[count - 1]
    return count


@exact_kernel
def _score(
    q: NDArray[np.float32],
    rows: NDArray[np.int64],
    room: int,
    softmax_scale: np.float32,
    scores: NDArray[np.float32],
    like: Any,
) -> None:
    head_dim = len(q)
    for block in range(-EARLY_ROWS, room, LANES):
        _prefetch_halves(rows, block + EARLY_ROWS, room, 0, head_dim, like)
        if block >= 0:
            score_16(q, rows, block, like, head_dim, 1, softmax_scale, scores, block, room)


@exact_kernel
def _mix(
    weights: NDArray[np.float32], rows: NDArray[np.int64], room: int, part: NDArray[np.float32], like: Any
) -> None:
    head_dim = len(part) - 2
    for block in range(-EARLY_ROWS, room, LANES):
        _prefetch_halves(rows, block + EARLY_ROWS, room, head_dim, head_dim, like)
        if block >= 0:
            add_weighted_values(weights, block, rows[block:], LANES, head_dim, like, head_dim, part)


@exact_kernel
def _prefetch_halves(rows: NDArray[np.int64], first: int, room: int, start: int, width: int, like: Any) -> None:
    """Prefetch the keys or the values of the next LANES rows: `width` elements of each, from `start`."""
    for i in range(first, min(first + LANES, room)):
        row = array_at(rows[i], start + width, like)
        for line in range(start, start + width, LINE_BYTES // 2):
            prefetch(row, line)


@exact_kernel
def _add_log_weights(
    args: Any, q_head: int, of_rows: NDArray[np.float32], room: int, logits: NDArray[np.float32]
) -> None:
    """Subtract the log of rows' sampling probabilities, interpolated linearly in the table. of_rows: overwritten."""
    table, to_cosine = floats_of(args.log_weights, 0, STEPS + 2), floats_of(args.to_cosines, q_head, 2)
    of_mean, factor = fill(F32x16, to_cosine[0]), fill(F32x16, to_cosine[1])
    zero, one, two, steps = fill(F32x16, 0), fill(F32x16, 1), fill(F32x16, 2), fill(F32x16, STEPS / 2)
    for i in range(0, room, LANES):
        cosines = (load(F32x16, logits, i) - of_mean) * factor * load(F32x16, of_rows, i)
        store(of_rows, i, smaller(larger(one - cosines, zero), two) * steps)
    for i in range(room):
        step = np.uint32(np.int32(of_rows[i]))
        below, above = table[step], table[step + np.uint32(1)]
        logits[i] += below + (of_rows[i] - np.float32(step)) * (above - below)


@exact_kernel
def _join(part: NDArray[np.float32], other: NDArray[np.float32]) -> None:
    """Merge `other` into `part`: [head_dim + 2] each, weighted sum of values, largest logit, sum of weights."""
    head_dim = len(part) - 2
    top = max(part[head_dim], other[head_dim])
    weight, other_weight = np.float32(np.exp(part[head_dim] - top)), np.float32(np.exp(other[head_dim] - top))
    for j in range(head_dim):
        part[j] = weight * part[j] + other_weight * other[j]
    part[head_dim] = top
    part[head_dim + 1] = weight * part[head_dim + 1] + other_weight * other[head_dim + 1]
