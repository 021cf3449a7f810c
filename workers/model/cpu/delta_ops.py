"""Records the operation of layers of linear attention (Gated DeltaNet) on a tape, and its stages.

Stages process each request by itself, and its rows in the order of its tokens.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.batch import StepRows
from csattn.cpu.addresses import array_at
from csattn.cpu.arguments import floats_of, number_at, word_of, words_at
from csattn.cpu.jit import exact_kernel
from csattn.models.spec import DeltaSpec
from csattn.models.weights import DeltaWeights
from workers.model.cpu.scalars import sigmoid, softplus
from workers.model.cpu.stage_recorder import StageRecorder
from workers.model.ops import DeltaBuffers, DeltaState

# Arguments of the stages: sizes, and addresses of float32 arrays unless stated otherwise. A state has two versions: a
# step reads the one that the request's version selects and writes the other.
MIX = (
    "num_rows",  # address of the number of rows
    "tail_ids",  # [num_rows] int64
    "tail_lens",  # [num_rows] int64: a request's rows are processed in this order, whatever their order in the step
    "versions",  # [num_tails] int64
    "inputs",  # [num_rows, in_width]: the channels come first
    "in_width",
    "num_channels",
    "conv",  # [num_channels, conv_len]
    "conv_len",
    "conv_state",  # [num_tails, 2, num_channels, conv_len - 1]
    "mixed",  # [num_rows, num_channels], written
)
DELTA_RULE = (
    "num_rows",
    "tail_ids",
    "tail_lens",
    "versions",
    "inputs",  # [num_rows, in_width]: after the channels come the gates, then how much is written and forgotten
    "in_width",
    "num_channels",
    "mixed",  # [num_rows, num_channels]
    "num_k_heads",
    "num_v_heads",
    "k_dim",
    "v_dim",
    "decay",  # [num_v_heads]
    "decay_bias",
    "norm",  # [v_dim]
    "eps",  # address of a float64
    "memory",  # [num_tails, 2, num_v_heads, k_dim, v_dim]
    "out",  # [num_rows, num_v_heads * v_dim], written
)
BLOCK = 64  # channels
_mix_at, _delta_rule_at = words_at(MIX), words_at(DELTA_RULE)


class TapeDeltaOps(StageRecorder):
    """The part of `TapeOps` for layers of linear attention."""

    def delta(
        self,
        weights: DeltaWeights,
        spec: DeltaSpec,
        eps: float,
        rows: StepRows,
        state: DeltaState,
        buffers: DeltaBuffers,
    ) -> None:
        """state: it must have two versions."""
        common: dict[str, Any] = {
            "num_rows": self._num_rows,
            "tail_ids": rows.tail_ids,
            "tail_lens": rows.tail_lens,
            "versions": state.version,
            "inputs": buffers.inputs,
            "in_width": spec.in_width,
            "num_channels": spec.num_channels,
            "mixed": buffers.mixed,
        }
        self._record(
            mix_stage,
            MIX,
            reads=[buffers.inputs],
            writes=[buffers.mixed],
            per_row=mix_pieces(spec.num_channels),
            conv=weights.conv,
            conv_len=spec.conv_len,
            conv_state=state.conv,
            **common,
        )
        self._record(
            delta_rule_stage,
            DELTA_RULE,
            reads=[buffers.inputs, buffers.mixed],
            writes=[buffers.out],
            per_row=spec.num_v_heads,
            num_k_heads=spec.num_k_heads,
            num_v_heads=spec.num_v_heads,
            k_dim=spec.k_dim,
            v_dim=spec.v_dim,
            decay=weights.decay,
            decay_bias=weights.decay_bias,
            norm=weights.norm,
            eps=self._number(eps),
            memory=state.memory,
            out=buffers.out,
            **common,
        )


def mix_pieces(num_channels: int) -> int:
    """Return the number of pieces of a row in `mix_stage`."""
    return -(-num_channels // BLOCK)


def mix_stage(arguments: int, piece: int, thread: int, unused: int) -> int:
    """Convolve the channels. A piece is a block of channels of a row; a request's first row does the work of all of
    its rows."""
    args = _mix_at(arguments)
    blocks = -(-args.num_channels // BLOCK)
    row, first = piece // blocks, piece % blocks * BLOCK
    rows = _rows_of(args, row)
    if len(rows) == 0:
        return 0
    in_width, num_channels, size = args.in_width, args.num_channels, args.conv_len
    tail = word_of(args.tail_ids, row)
    version = word_of(args.versions, tail)
    count, places = min(BLOCK, num_channels - first), num_channels * (size - 1)
    conv = array_at(args.conv, num_channels * size, np.float32(0))
    before = floats_of(args.conv_state, 2 * tail + version, places)
    after = floats_of(args.conv_state, 2 * tail + 1 - version, places)
    seen = np.empty(size, np.float32)
    for channel in range(first, first + count):
        for i in range(size - 1):
            seen[i] = before[channel * (size - 1) + i]
        for other in rows:
            seen[size - 1] = floats_of(args.inputs, other, in_width)[channel]
            total = np.float32(0.0)
            for i in range(size):
                total += seen[i] * conv[channel * size + i]
            mixed = floats_of(args.mixed, other, num_channels)
            mixed[channel] = total * sigmoid(total)
            for i in range(size - 1):
                seen[i] = seen[i + 1]
        for i in range(size - 1):
            after[channel * (size - 1) + i] = seen[i]
    return 0


def delta_rule_stage(arguments: int, piece: int, thread: int, unused: int) -> int:
    """Update and read the memory. A piece is a value head of a row; a request's first row does the work of all of its
    rows."""
    args = _delta_rule_at(arguments)
    row, head = piece // args.num_v_heads, piece % args.num_v_heads
    rows = _rows_of(args, row)
    if len(rows) == 0:
        return 0
    in_width, num_channels, k_dim, v_dim = args.in_width, args.num_channels, args.k_dim, args.v_dim
    num_k_heads, num_v_heads = args.num_k_heads, args.num_v_heads
    tail = word_of(args.tail_ids, row)
    version, size = word_of(args.versions, tail), k_dim * v_dim
    decay = array_at(args.decay, num_v_heads, np.float32(0))[head]
    decay_bias = array_at(args.decay_bias, num_v_heads, np.float32(0))[head]
    norm, eps = array_at(args.norm, v_dim, np.float32(0)), number_at(args.eps)
    before = floats_of(args.memory, (2 * tail + version) * num_v_heads + head, size)
    memory = floats_of(args.memory, (2 * tail + 1 - version) * num_v_heads + head, size)
    memory[:] = before
    k_head, k_width = head // (num_v_heads // num_k_heads), num_k_heads * k_dim
    q, k = np.empty(k_dim, np.float32), np.empty(k_dim, np.float32)
    change, read = np.empty(v_dim, np.float32), np.empty(v_dim, np.float32)
    for other in rows:
        inputs = floats_of(args.inputs, other, in_width)
        mixed = floats_of(args.mixed, other, num_channels)
        _unit(mixed, k_head * k_dim, q)
        _unit(mixed, k_width + k_head * k_dim, k)
        v_at, z_at = 2 * k_width + head * v_dim, num_channels + head * v_dim
        numbers_at = num_channels + num_v_heads * v_dim
        write = sigmoid(inputs[numbers_at + head])
        decay_factor = np.exp(-decay * softplus(inputs[numbers_at + num_v_heads + head] + decay_bias))
        change[:], read[:] = 0.0, 0.0
        for i in range(k_dim):
            for j in range(v_dim):
                memory[i * v_dim + j] *= decay_factor
                change[j] += memory[i * v_dim + j] * k[i]
        for j in range(v_dim):
            change[j] = (mixed[v_at + j] - change[j]) * write
        for i in range(k_dim):
            for j in range(v_dim):
                memory[i * v_dim + j] += k[i] * change[j]
                read[j] += memory[i * v_dim + j] * q[i]
        scale, total = np.float32(1.0) / np.sqrt(np.float32(k_dim)), np.float32(0.0)
        for j in range(v_dim):
            read[j] *= scale
            total += read[j] * read[j]
        rms = np.float32(1.0) / np.sqrt(total / np.float32(v_dim) + eps)
        out = floats_of(args.out, other * num_v_heads + head, v_dim)
        for j in range(v_dim):
            z = inputs[z_at + j]
            out[j] = read[j] * rms * norm[j] * z * sigmoid(z)
    return 0


@exact_kernel
def _rows_of(args: Any, row: int) -> NDArray[np.int64]:
    """Return all rows of the row's request, in the order of their tokens, if it is the first of them in the step; else
    none."""
    num_rows = word_of(args.num_rows, 0)
    tails, lens = array_at(args.tail_ids, num_rows, np.int64(0)), array_at(args.tail_lens, num_rows, np.int64(0))
    found = np.empty(num_rows, np.int64)
    count = 0
    for other in range(num_rows):
        if tails[other] == tails[row]:
            if other < row:
                return found[:0]
            place = count
            while place > 0 and lens[found[place - 1]] > lens[other]:
                found[place] = found[place - 1]
                place -= 1
            found[place] = other
            count += 1
    return found[:count]


@exact_kernel
def _unit(x: NDArray[np.float32], at: int, out: NDArray[np.float32]) -> None:
    total = np.float32(1e-6)
    for i in range(len(out)):
        total += x[at + i] * x[at + i]
    scale = np.float32(1.0) / np.sqrt(total)
    for i in range(len(out)):
        out[i] = x[at + i] * scale
