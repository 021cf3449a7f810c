"""Latent attention (MLA) in steps on the CPU: the model chooses what its rows attend to, not the request.

The tape has three stages, score, choose and attend, in which no row depends on others. A row sees its context, then its
own tail. What is kept of a token is contiguous: the latent, the part with RoPE, the index key.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from csattn.cpu.addresses import KindStage, array_at
from csattn.cpu.arguments import bytes_of, floats_of, number_at, word, word_of, words_at, words_of
from csattn.cpu.floats import exp_lanes, load_float
from csattn.cpu.jit import exact_kernel
from csattn.cpu.lanes import fma, larger, largest_lane
from csattn.cpu.simd import LANES, F32x16, fill, load, store
from csattn.cpu.tape import Tape
from csattn.models.latent_spec import LatentSpec
from workers.model.cpu.cpu_model import CpuModel
from workers.model.cpu.linear import TILE, products

# Arguments of all three stages: sizes, and addresses of float32 arrays unless stated otherwise.
ARGUMENTS = (
    "contexts",  # [num_rows] addresses of rows [context_len, width], of the model's dtype
    "context_lens",  # [num_rows] int64
    "tails",  # of the layer, [num_tails, tail_capacity, width], of the model's dtype
    "tail_capacity",
    "tail_ids",  # [num_rows] int64
    "tail_lens",  # [num_rows] int64
    "width",
    "kv_rank",
    "key_width",  # of the latent and the part with RoPE; the index key follows
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
_arguments_at = words_at(ARGUMENTS)
KEYS = 512  # that a piece of work scores
HEADS = 16  # that a piece of work attends from
_BINS = 2048  # of the radix select: a score has three digits


class LatentChoice:
    """Buffers for scores and chosen rows, which all layers use in turn.

    A layer without an indexer reads the choice of the last layer that has one.
    """

    def __init__(self, max_rows: int, top_k: int) -> None:
        self.scores = np.zeros((max_rows, 0), np.float32)
        self.chosen = np.zeros((max_rows, top_k), np.int32)
        self.num_chosen = np.zeros(max_rows, np.int64)

    def make_room(self, num_seen: int) -> None:
        """Enlarge the scores, if necessary, for rows that see num_seen others."""
        if num_seen > self.scores.shape[1]:
            self.scores = np.zeros((len(self.scores), max(num_seen, 5 * self.scores.shape[1] // 4)), np.float32)


class LatentRows:
    """One layer: its tape, which attends to the chosen rows of context and tail, and the tape's arguments."""

    def __init__(self, layer_idx: int, spec: LatentSpec, model: CpuModel, choice: LatentChoice) -> None:
        self.layer_idx, self._spec, self._choice, room = layer_idx, spec, choice, model.latents[layer_idx]
        assert room is not None
        self._contexts, self._context_lens = (np.zeros(model.max_rows, np.int64) for _ in range(2))
        self._scale, tails, indexer = np.array([model.spec.softmax_scale]), model.tails[layer_idx], spec.indexer
        values = {
            "contexts": self._contexts,
            "context_lens": self._context_lens,
            "tails": tails,
            "tail_capacity": tails.shape[2],
            "tail_ids": model.tail_ids,
            "tail_lens": model.tail_lens,
            "width": tails.shape[3:].numel(),
            "kv_rank": spec.kv_rank,
            "key_width": spec.key_width,
            "num_heads": spec.num_heads,
            "q": room.queries.q,
            "softmax_scale": self._scale,
            "num_index_heads": spec.num_index_heads,
            "index_dim": spec.index_dim,
            "index_q": room.queries.index_q,
            "index_weights": room.queries.index_weights,
            "scores": choice.scores,
            "scores_width": 0,
            "top_k": spec.top_k or 0,
            "chosen": choice.chosen,
            "num_chosen": choice.num_chosen,
            "out": room.attended,
        }
        self._room = room  # kept alive: the tape has its addresses, and those of the choice
        self._arguments = words_of(ARGUMENTS, values)
        self.tape = Tape()
        if indexer is not None:
            self.tape.add(KindStage(score_stage, model.dtype_name), self._arguments)
            self.tape.add(choose_stage, self._arguments)
        self.tape.add(KindStage(attend_stage, model.dtype_name), self._arguments)

    def set_contexts(self, kv: list[Tensor]) -> None:
        """Set the contexts of the next steps' rows. kv: [1, context_len, 2, head_dim] each."""
        self._contexts[: len(kv)] = [word(rows) for rows in kv]
        self._context_lens[: len(kv)] = [rows.shape[1] for rows in kv]

    def set_lens(self, context_lens: NDArray[np.int64], tail_lens: NDArray[np.int64]) -> None:
        """Set the lengths of the next step's rows, and divide its work into pieces."""
        num_rows = len(tail_lens)
        pieces: list[int] = []
        if self._spec.indexer is not None:
            longest = int((context_lens + tail_lens).max())
            self._choice.make_room(longest)
            width = self._choice.scores.shape[1]
            self._arguments[ARGUMENTS.index("scores")] = word(self._choice.scores)
            self._arguments[ARGUMENTS.index("scores_width")] = width
            pieces = [num_rows * score_pieces(width), num_rows]
        self.tape.pieces[:] = [*pieces, num_rows * attend_pieces(self._spec.num_heads)]


def score_pieces(num_seen: int) -> int:
    """Return how many pieces of scoring a row has, if no row sees more than num_seen."""
    return -(-num_seen // KEYS)


def attend_pieces(num_heads: int) -> int:
    """Return how many pieces of attention a row has."""
    return -(-num_heads // HEADS)


def score_stage(arguments: int, piece: int, thread: int, like: Any) -> int:
    """Score up to KEYS index keys of one row. like: a number of the rows' dtype."""
    args, itemsize = _arguments_at(arguments), bytes_of(like)
    blocks = -(-args.scores_width // KEYS)
    row, first = piece // blocks, piece % blocks * KEYS
    context, context_len, tail, tail_len = _seen(args, row, itemsize)
    stop = min(first + KEYS, context_len + tail_len)
    if context_len + tail_len <= args.top_k:  # all are chosen
        return 0
    width, num_heads, dim = args.width, args.num_index_heads, args.index_dim
    q = array_at(args.index_q + 4 * row * num_heads * dim, num_heads * dim, np.float32(0))
    weights = floats_of(args.index_weights, row, num_heads)
    scores = floats_of(args.scores, row, args.scores_width)
    sums, sixteen = np.empty((num_heads + TILE) * LANES, np.float32), np.empty(LANES, np.float32)
    zero = fill(F32x16, 0.0)
    while first < stop:
        is_own = first >= context_len
        base, at, end = (tail, first - context_len, stop) if is_own else (context, first, min(stop, context_len))
        count = min(LANES, end - first)
        keys = array_at(base + (at * width + args.key_width) * itemsize, (count - 1) * width + dim, like)
        products(q, num_heads, keys, width, 0, count, dim, sums)
        total = zero
        for head in range(num_heads):
            total = fma(fill(F32x16, weights[head]), larger(zero, load(F32x16, sums, head * LANES)), total)
        store(sixteen, 0, total)
        for i in range(count):
            scores[first + i] = sixteen[i]
        first += count
    return 0


def choose_stage(arguments: int, row: int, thread: int, unused: int) -> int:
    """Choose one row's best scores, of equal ones the first, NaN last (`csattn.lightning.top_k_reference`)."""
    args = _arguments_at(arguments)
    top_k, num_seen = args.top_k, word_of(args.context_lens, row) + word_of(args.tail_lens, row)
    chosen = array_at(args.chosen + 4 * row * top_k, top_k, np.int32(0))
    array_at(args.num_chosen + 8 * row, 1, np.int64(0))[0] = min(top_k, num_seen)
    if num_seen <= top_k:
        for i in range(num_seen):
            chosen[i] = i
        return 0
    scores = array_at(args.scores + 4 * row * args.scores_width, num_seen, np.int32(0))  # the scores' bits
    counts, prefix, mask, left = np.empty(_BINS, np.int64), 0, 0, top_k
    for shift in (21, 10, 0):  # radix select: find the least score that is chosen, digit by digit
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
    return 0


@exact_kernel
def _ordered(bits: int) -> int:
    """Map a score's bits to an integer below 2 ** 32 that compares as the score does: -0 equals +0, NaN is least."""
    word = bits & 0xFFFFFFFF
    if word & 0x7FFFFFFF > 0x7F800000:
        return 0
    if word == 0x80000000:
        return word
    return (0xFFFFFFFF - word) if word & 0x80000000 else (word | 0x80000000)


def attend_stage(arguments: int, piece: int, thread: int, like: Any) -> int:
    """Attend from up to HEADS heads of one row, with an online softmax. like: a number of the rows' dtype."""
    args, itemsize = _arguments_at(arguments), bytes_of(like)
    width, kv_rank, key_width, num_heads, top_k = args.width, args.kv_rank, args.key_width, args.num_heads, args.top_k
    blocks = -(-num_heads // HEADS)
    row, first_head = piece // blocks, piece % blocks * HEADS
    heads = min(HEADS, num_heads - first_head)
    context, context_len, tail, tail_len = _seen(args, row, itemsize)
    num_rows = context_len + tail_len
    chosen = array_at(args.chosen + 4 * row * top_k, top_k, np.int32(0))
    if top_k > 0:
        num_rows = word_of(args.num_chosen, row)
    at = row * num_heads + first_head
    q = array_at(args.q + 4 * at * key_width, heads * key_width, np.float32(0))
    stride, acc_width = -(-key_width // LANES) * LANES, -(-kv_rank // LANES) * LANES
    block, out = np.zeros(LANES * stride, np.float32), np.zeros(heads * acc_width, np.float32)
    sums, shares = np.empty((heads + TILE) * LANES, np.float32), np.empty(LANES, np.float32)
    largest, total = np.full(heads, -np.inf, np.float32), np.zeros(heads, np.float32)
    scale = fill(F32x16, number_at(args.softmax_scale))
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
            most = max(largest[head], largest_lane(logits))
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
    written = array_at(args.out + 4 * at * kv_rank, heads * kv_rank, np.float32(0))
    for head in range(heads):
        for j in range(kv_rank):
            written[head * kv_rank + j] = out[head * acc_width + j] / total[head]
    return 0


@exact_kernel
def _seen(args: Any, row: int, itemsize: int) -> Any:
    """Return address and length of the row's context, then of its tail."""
    tail = args.tails + word_of(args.tail_ids, row) * args.tail_capacity * args.width * itemsize
    return word_of(args.contexts, row), word_of(args.context_lens, row), tail, word_of(args.tail_lens, row)
