"""What a learned indexer chooses, and attention to it, as stages of a tape: each row by itself, as the model says.

A row sees its context, then its own tail. Rows of both lie in one piece each: the latent, what turns, the index key.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.addresses import Stage, array_at
from csattn.cpu.floats import LANES, exp_lanes, largest_of, load_float
from csattn.cpu.jit import exact_kernel
from csattn.cpu.lanes import fma, larger
from csattn.cpu.simd import F32x16, fill, load, store
from workers.model.cpu.linear import TILE, products

# All three stages' arguments: sizes, and addresses of float32 but where something else is said.
ARGUMENTS = (
    "contexts",  # [num_rows] addresses of rows [context_len, width], of the model's dtype
    "context_lens",  # [num_rows] int64
    "tails",  # of the layer, [num_tails, tail_capacity, width], likewise
    "tail_capacity",
    "tail_ids",  # [num_rows] int64
    "tail_lens",  # [num_rows] int64
    "width",
    "kv_rank",
    "key_width",  # of the latent and what turns; behind them lies the index key
    "num_heads",
    "q",  # [num_rows, num_heads, key_width]
    "softmax_scale",  # address of a float64
    "num_index_heads",
    "index_dim",
    "index_q",  # [num_rows, num_index_heads, index_dim]
    "index_weights",  # [num_rows, num_index_heads]
    "scores",  # [num_rows, scores_width], written
    "scores_width",
    "top_k",  # 0: a row attends to all that it sees
    "chosen",  # [num_rows, top_k] int32, ascending, written
    "num_chosen",  # [num_rows] int64, written
    "out",  # [num_rows, num_heads, kv_rank], written
)
_NUM = len(ARGUMENTS)
KEYS = 512  # that a piece scores
HEADS = 16  # that a piece attends from
_BINS = 2048  # of a digit of a score, of which it has three


def score_pieces(num_seen: int) -> int:
    """Of each row, where a row sees so many at most."""
    return -(-num_seen // KEYS)


def attend_pieces(num_heads: int) -> int:
    """Of each row."""
    return -(-num_heads // HEADS)


def choose_stage(arguments: int, piece: int, thread: int, unused: int) -> int:
    """A piece is a row: the best of its scores, of equals the first, NaN last (`csattn.lightning.top_k_reference`)."""
    _choose(array_at(arguments, _NUM, np.int64(0)), piece)
    return 0


def latent_stage(name: str, kind: str) -> Stage:
    """score takes some keys of a row for a piece, attend some of its heads. kind: dtype of the rows."""
    return _STAGES[name][kind]


def _score_float32(arguments: int, piece: int, thread: int, unused: int) -> int:
    _score(array_at(arguments, _NUM, np.int64(0)), piece, np.float32(0), 4)
    return 0


def _score_bfloat16(arguments: int, piece: int, thread: int, unused: int) -> int:
    _score(array_at(arguments, _NUM, np.int64(0)), piece, np.uint16(0), 2)
    return 0


def _score_float16(arguments: int, piece: int, thread: int, unused: int) -> int:
    _score(array_at(arguments, _NUM, np.int64(0)), piece, np.int16(0), 2)
    return 0


def _attend_float32(arguments: int, piece: int, thread: int, unused: int) -> int:
    _attend(array_at(arguments, _NUM, np.int64(0)), piece, np.float32(0), 4)
    return 0


def _attend_bfloat16(arguments: int, piece: int, thread: int, unused: int) -> int:
    _attend(array_at(arguments, _NUM, np.int64(0)), piece, np.uint16(0), 2)
    return 0


def _attend_float16(arguments: int, piece: int, thread: int, unused: int) -> int:
    _attend(array_at(arguments, _NUM, np.int64(0)), piece, np.int16(0), 2)
    return 0


_STAGES: dict[str, dict[str, Stage]] = {
    "score": {"float32": _score_float32, "bfloat16": _score_bfloat16, "float16": _score_float16},
    "attend": {"float32": _attend_float32, "bfloat16": _attend_bfloat16, "float16": _attend_float16},
}


@exact_kernel
def _score(args: NDArray[np.int64], piece: int, like: Any, itemsize: int) -> None:
    blocks = -(-args[17] // KEYS)
    row, first = piece // blocks, piece % blocks * KEYS
    context, context_len, tail, tail_len = _seen(args, row, itemsize)
    stop = min(first + KEYS, context_len + tail_len)
    if context_len + tail_len <= args[18]:  # all are chosen
        return
    width, num_heads, dim = args[6], args[12], args[13]
    q = array_at(args[14] + 4 * row * num_heads * dim, num_heads * dim, np.float32(0))
    weights = array_at(args[15] + 4 * row * num_heads, num_heads, np.float32(0))
    scores = array_at(args[16] + 4 * row * args[17], args[17], np.float32(0))
    sums, sixteen = np.empty((num_heads + TILE) * LANES, np.float32), np.empty(LANES, np.float32)
    zero = fill(F32x16, 0.0)
    while first < stop:
        is_own = first >= context_len
        base, at, end = (tail, first - context_len, stop) if is_own else (context, first, min(stop, context_len))
        count = min(LANES, end - first)
        keys = array_at(base + (at * width + args[8]) * itemsize, (count - 1) * width + dim, like)
        products(q, num_heads, keys, width, 0, count, dim, sums)
        total = zero
        for head in range(num_heads):
            total = fma(fill(F32x16, weights[head]), larger(zero, load(F32x16, sums, head * LANES)), total)
        store(sixteen, 0, total)
        for i in range(count):
            scores[first + i] = sixteen[i]
        first += count


@exact_kernel
def _choose(args: NDArray[np.int64], row: int) -> None:
    top_k, num_seen = args[18], 0
    num_seen += array_at(args[1], row + 1, np.int64(0))[row] + array_at(args[5], row + 1, np.int64(0))[row]
    chosen = array_at(args[19] + 4 * row * top_k, top_k, np.int32(0))
    array_at(args[20], row + 1, np.int64(0))[row] = min(top_k, num_seen)
    if num_seen <= top_k:
        for i in range(num_seen):
            chosen[i] = i
        return
    scores = array_at(args[16] + 4 * row * args[17], num_seen, np.int32(0))  # their bits
    counts, prefix, mask, left = np.empty(_BINS, np.int64), 0, 0, top_k
    for shift in (21, 10, 0):  # digit by digit, what the last that is chosen begins with
        counts[:] = 0
        for i in range(num_seen):
            order = _ordered(scores[i])
            if order & mask == prefix:
                counts[(order >> shift) & (_BINS - 1)] += 1
        digit = _BINS - 1
        while counts[digit] < left:
            left -= counts[digit]
            digit -= 1
        prefix |= digit << shift
        mask |= (_BINS - 1) << shift
    count = 0
    for i in range(num_seen):
        order = _ordered(scores[i])
        if order > prefix or (order == prefix and left > 0):
            if order == prefix:
                left -= 1
            chosen[count] = i
            count += 1


@exact_kernel
def _ordered(bits: int) -> int:
    """Integers below 2 ** 32 that compare as those scores do: -0 equals +0, NaN is the least."""
    word = bits & 0xFFFFFFFF
    if word & 0x7FFFFFFF > 0x7F800000:
        return 0
    if word == 0x80000000:
        return word
    return (0xFFFFFFFF - word) if word & 0x80000000 else (word | 0x80000000)


@exact_kernel
def _attend(args: NDArray[np.int64], piece: int, like: Any, itemsize: int) -> None:
    width, kv_rank, key_width, num_heads, top_k = args[6], args[7], args[8], args[9], args[18]
    blocks = -(-num_heads // HEADS)
    row, first_head = piece // blocks, piece % blocks * HEADS
    heads = min(HEADS, num_heads - first_head)
    context, context_len, tail, tail_len = _seen(args, row, itemsize)
    num_rows = context_len + tail_len
    chosen = array_at(args[19] + 4 * row * top_k, top_k, np.int32(0))
    if top_k > 0:
        num_rows = array_at(args[20], row + 1, np.int64(0))[row]
    at = row * num_heads + first_head
    q = array_at(args[10] + 4 * at * key_width, heads * key_width, np.float32(0))
    stride, acc_width = -(-key_width // LANES) * LANES, -(-kv_rank // LANES) * LANES
    block, out = np.zeros(LANES * stride, np.float32), np.zeros(heads * acc_width, np.float32)
    sums, shares = np.empty((heads + TILE) * LANES, np.float32), np.empty(LANES, np.float32)
    largest, total = np.full(heads, -np.inf, np.float32), np.zeros(heads, np.float32)
    scale = fill(F32x16, np.float32(array_at(args[11], 1, np.float64(0))[0]))
    for start in range(0, num_rows, LANES):
        count = min(LANES, num_rows - start)
        for i in range(count):
            place = np.int64(chosen[start + i]) if top_k > 0 else start + i
            address = context + place * width * itemsize
            if place >= context_len:
                address = tail + (place - context_len) * width * itemsize
            kept = array_at(address, width, like)
            for j in range(key_width):
                block[i * stride + j] = load_float(kept, j)
        products(q, heads, block, stride, 0, count, key_width, sums)
        for head in range(heads):
            for i in range(count, LANES):
                sums[head * LANES + i] = -np.inf
            logits = load(F32x16, sums, head * LANES) * scale
            most = max(largest[head], largest_of(logits))
            before = np.exp(largest[head] - most)
            store(shares, 0, exp_lanes(logits - fill(F32x16, most)))
            largest[head] = most
            added = np.float32(0.0)
            for i in range(count):
                added += shares[i]
            total[head] = total[head] * before + added
            for j in range(0, acc_width, LANES):
                of_head = load(F32x16, out, head * acc_width + j) * fill(F32x16, before)
                for i in range(count):
                    of_head = fma(fill(F32x16, shares[i]), load(F32x16, block, i * stride + j), of_head)
                store(out, head * acc_width + j, of_head)
    written = array_at(args[21] + 4 * at * kv_rank, heads * kv_rank, np.float32(0))
    for head in range(heads):
        for j in range(kv_rank):
            written[head * kv_rank + j] = out[head * acc_width + j] / total[head]


@exact_kernel
def _seen(args: NDArray[np.int64], row: int, itemsize: int) -> Any:
    """Where the row's context begins and how long it is, then its tail."""
    tail_id = array_at(args[4], row + 1, np.int64(0))[row]
    tail = args[2] + tail_id * args[3] * args[6] * itemsize
    context, context_len = array_at(args[0], row + 1, np.int64(0))[row], array_at(args[1], row + 1, np.int64(0))[row]
    return context, context_len, tail, array_at(args[5], row + 1, np.int64(0))[row]
