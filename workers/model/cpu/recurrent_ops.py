"""Records the operation of layers of `RecurrentSpec` on a tape, and its stages.

Stages process each request by itself, and its rows in the order of its tokens.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.batch import StepRows
from csattn.cpu.addresses import array_at
from csattn.cpu.arguments import floats_of, number_at, word_of, words_at
from csattn.cpu.jit import exact_kernel
from csattn.models.recurrent_spec import ConvSpec, DeltaSpec, RecurrentSpec, ScanSpec
from csattn.models.weights import RecurrentWeights
from workers.model.cpu.row_stages import sigmoid, softplus
from workers.model.cpu.stage_recorder import StageRecorder
from workers.model.ops import RecurrentBuffers, RecurrentState

# Arguments of the stages: sizes, and addresses of float32 arrays unless stated otherwise. A state has two versions: a
# step reads the one that the request's version selects and writes the other.
_COMMON = (
    "num_rows",  # address of the number of rows
    "tail_ids",  # [num_rows] int64
    "tail_lens",  # [num_rows] int64: a request's rows are processed in this order, whatever their order in the step
    "versions",  # [num_tails] int64
    "inputs",  # [num_rows, in_width]: the channels come first
    "in_width",
    "num_channels",
    "mixed",  # [num_rows, num_channels]
)
MIX = (
    *_COMMON,  # mixed is written
    "is_gated",  # 1: channels are multiplied by the next inputs before the convolution, and by those after them behind
    "conv",  # [num_channels, conv_len]
    "conv_bias",  # [num_channels] or 0
    "conv_len",
    "conv_state",  # [num_tails, 2, num_channels, conv_len - 1]
)
DELTA_RULE = (
    *_COMMON,  # inputs: after the channels come the gates, then how much is written and forgotten
    "num_k_heads",
    "num_v_heads",
    "k_dim",
    "v_dim",
    "decay",  # [num_v_heads]
    "step_bias",
    "norm",  # [v_dim]
    "eps",  # address of a float64
    "memory",  # [num_tails, 2, num_v_heads, k_dim, v_dim]
    "out",  # [num_rows, num_v_heads * v_dim], written
)
SCAN = (
    *_COMMON,  # inputs: after the channels come the gates, then steps; mixed: values, where each group writes and reads
    "num_heads",
    "num_groups",
    "head_dim",
    "state_dim",
    "decay",  # [num_heads]
    "step_bias",
    "skip",
    "least_step",  # address of a float64
    "memory",  # [num_tails, 2, num_heads, state_dim, head_dim]
    "out",  # [num_rows, num_heads * head_dim], written: before gates and norm
)
GATED_NORM = (
    "inputs",
    "in_width",
    "gates_at",  # the first gate's place among a row's inputs
    "norm",  # [num_groups * group_width]
    "eps",  # address of a float64
    "num_groups",
    "group_width",
    "out",  # [num_rows, num_groups * group_width], in place
)
BLOCK = 64  # channels
_mix_at, _delta_rule_at, _scan_at, _gated_norm_at = map(words_at, (MIX, DELTA_RULE, SCAN, GATED_NORM))


class TapeRecurrentOps(StageRecorder):
    """The part of `TapeOps` for layers of `RecurrentSpec`."""

    def recurrent(
        self,
        weights: RecurrentWeights,
        spec: RecurrentSpec,
        rows: StepRows,
        state: RecurrentState,
        buffers: RecurrentBuffers,
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
        }
        is_gated = isinstance(spec, ConvSpec)
        common["mixed"] = mixed = buffers.out if is_gated else buffers.mixed
        self._record(
            mix_stage,
            MIX,
            writes=[mixed],
            per_row=-(-spec.num_channels // BLOCK),
            is_gated=is_gated,
            conv=weights.conv,
            conv_bias=weights.conv_bias,
            conv_len=spec.conv_len,
            conv_state=state.conv,
            **common,
        )
        if (memory := weights.memory) is None:
            return
        common |= {"decay": memory.decay, "step_bias": memory.step_bias, "memory": state.memory, "out": buffers.out}
        if isinstance(spec, DeltaSpec):
            self._record(
                delta_rule_stage,
                DELTA_RULE,
                writes=[buffers.out],
                per_row=spec.num_v_heads,
                num_k_heads=spec.num_k_heads,
                num_v_heads=spec.num_v_heads,
                k_dim=spec.k_dim,
                v_dim=spec.v_dim,
                norm=memory.norm,
                eps=self._eps,
                **common,
            )
        elif isinstance(spec, ScanSpec):
            self._record(
                scan_stage,
                SCAN,
                writes=[buffers.out],
                per_row=spec.num_heads,
                num_heads=spec.num_heads,
                num_groups=spec.num_groups,
                head_dim=spec.head_dim,
                state_dim=spec.state_dim,
                skip=memory.skip,
                least_step=self._number(spec.least_step),
                **common,
            )
            self._record(
                gated_norm_stage,
                GATED_NORM,
                writes=[buffers.out],
                per_row=spec.num_groups,
                inputs=buffers.inputs,
                in_width=spec.in_width,
                gates_at=spec.num_channels,
                norm=memory.norm,
                eps=self._eps,
                num_groups=spec.num_groups,
                group_width=spec.out_width // spec.num_groups,
                out=buffers.out,
            )


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
    bias = array_at(args.conv_bias, num_channels if args.conv_bias else 0, np.float32(0))
    before = floats_of(args.conv_state, 2 * tail + version, places)
    after = floats_of(args.conv_state, 2 * tail + 1 - version, places)
    seen = np.empty(size, np.float32)
    for channel in range(first, first + count):
        for i in range(size - 1):
            seen[i] = before[channel * (size - 1) + i]
        for other in rows:
            inputs = floats_of(args.inputs, other, in_width)
            seen[size - 1] = inputs[channel] * (inputs[num_channels + channel] if args.is_gated else np.float32(1.0))
            total = bias[channel] if len(bias) else np.float32(0.0)
            for i in range(size):
                total += seen[i] * conv[channel * size + i]
            mixed = floats_of(args.mixed, other, num_channels)
            mixed[channel] = total * (inputs[2 * num_channels + channel] if args.is_gated else sigmoid(total))
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
    step_bias = array_at(args.step_bias, num_v_heads, np.float32(0))[head]
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
        decay_factor = np.exp(-decay * softplus(inputs[numbers_at + num_v_heads + head] + step_bias))
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


def scan_stage(arguments: int, piece: int, thread: int, unused: int) -> int:
    """Update and read the memory. A piece is a head of a row; a request's first row does the work of all its rows."""
    args = _scan_at(arguments)
    row, head = piece // args.num_heads, piece % args.num_heads
    rows = _rows_of(args, row)
    if len(rows) == 0:
        return 0
    in_width, num_channels, num_heads = args.in_width, args.num_channels, args.num_heads
    head_dim, state_dim, width = args.head_dim, args.state_dim, num_heads * args.head_dim
    tail = word_of(args.tail_ids, row)
    version, size = word_of(args.versions, tail), head_dim * state_dim
    decay = array_at(args.decay, num_heads, np.float32(0))[head]
    step_bias = array_at(args.step_bias, num_heads, np.float32(0))[head]
    skip = array_at(args.skip, num_heads, np.float32(0))[head]
    least_step = number_at(args.least_step)
    memory = floats_of(args.memory, (2 * tail + 1 - version) * num_heads + head, size)
    memory[:] = floats_of(args.memory, (2 * tail + version) * num_heads + head, size)
    write_at = width + head // (num_heads // args.num_groups) * state_dim
    read_at, step_at = write_at + args.num_groups * state_dim, num_channels + width + head
    written, read = np.empty(head_dim, np.float32), np.empty(head_dim, np.float32)
    for other in rows:
        mixed = floats_of(args.mixed, other, num_channels)
        step = max(softplus(floats_of(args.inputs, other, in_width)[step_at] + step_bias), least_step)
        decay_factor = np.exp(-decay * step)
        out, values = floats_of(args.out, other * num_heads + head, head_dim), mixed[head * head_dim :]
        for j in range(head_dim):
            written[j], read[j] = step * values[j], skip * values[j]
        for i in range(state_dim):
            write_factor, read_factor = mixed[write_at + i], mixed[read_at + i]
            for j in range(head_dim):
                memory[i * head_dim + j] = memory[i * head_dim + j] * decay_factor + written[j] * write_factor
                read[j] += memory[i * head_dim + j] * read_factor
        out[:] = read
    return 0


def gated_norm_stage(arguments: int, piece: int, thread: int, unused: int) -> int:
    """out <- norm(out * silu(gates)) over each group. A piece is a group of a row."""
    args = _gated_norm_at(arguments)
    width, row, group = args.group_width, piece // args.num_groups, piece % args.num_groups
    inputs, out = floats_of(args.inputs, row, args.in_width), floats_of(args.out, piece, width)
    norm, total = floats_of(args.norm, group, width), np.float32(0.0)
    for i in range(width):
        z = inputs[args.gates_at + group * width + i]
        out[i] *= z * sigmoid(z)
        total += out[i] * out[i]
    rms = np.float32(1.0) / np.sqrt(total / np.float32(width) + number_at(args.eps))
    for i in range(width):
        out[i] *= rms * norm[i]
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
