"""Gated DeltaNet as stages of a tape. Rows of a request in their order; a request by itself."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.addresses import array_at
from csattn.cpu.jit import exact_kernel

# The stages' arguments: sizes, and addresses of float32 but where something else is said. Of a state there are two
# versions: that of a request's turn is read, the other written.
MIX = (
    "num_rows",  # address of the number of rows
    "tail_ids",  # [num_rows] int64
    "turns",  # [num_tails] int64
    "inputs",  # [num_rows, in_width], the channels first
    "in_width",
    "num_channels",
    "conv",  # [num_channels, conv_len]
    "conv_len",
    "kept",  # [num_tails, 2, num_channels, conv_len - 1]
    "mixed",  # [num_rows, num_channels], written
)
REMEMBER = (
    "num_rows",
    "tail_ids",
    "turns",
    "inputs",  # [num_rows, in_width]: behind the channels gates, then what is written and forgotten
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


def mix_pieces(num_channels: int) -> int:
    """Of a row."""
    return -(-num_channels // BLOCK)


def mix_stage(arguments: int, piece: int, thread: int, unused: int) -> int:
    """The channels' convolution. A piece is a block of channels of a row: of the first of a request for all of its."""
    args = array_at(arguments, 10, np.int64(0))
    blocks = -(-args[5] // BLOCK)
    _mix(args, piece // blocks, piece % blocks * BLOCK)
    return 0


def remember_stage(arguments: int, piece: int, thread: int, unused: int) -> int:
    """The memory's part. A piece is a value head of a row: of the first of a request for all of its."""
    args = array_at(arguments, 17, np.int64(0))
    _remember(args, piece // args[8], piece % args[8])
    return 0


@exact_kernel
def _rows_of(args: NDArray[np.int64], row: int) -> NDArray[np.int64]:
    """Rows of the row's request, where it is the first of them; else none."""
    num_rows = array_at(args[0], 1, np.int64(0))[0]
    tails, found = array_at(args[1], num_rows, np.int64(0)), np.empty(num_rows, np.int64)
    count = 0
    for other in range(num_rows):
        if tails[other] == tails[row]:
            if other < row:
                return found[:0]
            found[count] = other
            count += 1
    return found[:count]


@exact_kernel
def _mix(args: NDArray[np.int64], row: int, first: int) -> None:
    rows = _rows_of(args, row)
    if len(rows) == 0:
        return
    in_width, num_channels, size = args[4], args[5], args[7]
    tail = array_at(args[1], row + 1, np.int64(0))[row]
    turn = array_at(args[2], tail + 1, np.int64(0))[tail]
    count, places = min(BLOCK, num_channels - first), num_channels * (size - 1)
    conv = array_at(args[6], num_channels * size, np.float32(0))
    before = array_at(args[8] + 4 * (2 * tail + turn) * places, places, np.float32(0))
    after = array_at(args[8] + 4 * (2 * tail + 1 - turn) * places, places, np.float32(0))
    seen = np.empty(size, np.float32)
    for channel in range(first, first + count):
        for i in range(size - 1):
            seen[i] = before[channel * (size - 1) + i]
        for other in rows:
            seen[size - 1] = array_at(args[3] + 4 * other * in_width, in_width, np.float32(0))[channel]
            total = np.float32(0.0)
            for i in range(size):
                total += seen[i] * conv[channel * size + i]
            mixed = array_at(args[9] + 4 * other * num_channels, num_channels, np.float32(0))
            mixed[channel] = total * _sigmoid(total)
            for i in range(size - 1):
                seen[i] = seen[i + 1]
        for i in range(size - 1):
            after[channel * (size - 1) + i] = seen[i]


@exact_kernel
def _remember(args: NDArray[np.int64], row: int, head: int) -> None:
    rows = _rows_of(args, row)
    if len(rows) == 0:
        return
    in_width, num_channels, num_k_heads, num_v_heads, k_dim, v_dim = (
        args[4],
        args[5],
        args[7],
        args[8],
        args[9],
        args[10],
    )
    tail = array_at(args[1], row + 1, np.int64(0))[row]
    turn, size = array_at(args[2], tail + 1, np.int64(0))[tail], k_dim * v_dim
    decay = array_at(args[11], num_v_heads, np.float32(0))[head]
    decay_bias = array_at(args[12], num_v_heads, np.float32(0))[head]
    norm, eps = array_at(args[13], v_dim, np.float32(0)), np.float32(array_at(args[14], 1, np.float64(0))[0])
    before = array_at(args[15] + 4 * ((2 * tail + turn) * num_v_heads + head) * size, size, np.float32(0))
    memory = array_at(args[15] + 4 * ((2 * tail + 1 - turn) * num_v_heads + head) * size, size, np.float32(0))
    memory[:] = before
    k_head, k_width = head // (num_v_heads // num_k_heads), num_k_heads * k_dim
    q, k = np.empty(k_dim, np.float32), np.empty(k_dim, np.float32)
    change, read = np.empty(v_dim, np.float32), np.empty(v_dim, np.float32)
    for other in rows:
        inputs = array_at(args[3] + 4 * other * in_width, in_width, np.float32(0))
        mixed = array_at(args[6] + 4 * other * num_channels, num_channels, np.float32(0))
        _unit(mixed, k_head * k_dim, q)
        _unit(mixed, k_width + k_head * k_dim, k)
        v_at, z_at = 2 * k_width + head * v_dim, num_channels + head * v_dim
        numbers_at = num_channels + num_v_heads * v_dim
        write = _sigmoid(inputs[numbers_at + head])
        kept = np.exp(-decay * _softplus(inputs[numbers_at + num_v_heads + head] + decay_bias))
        change[:], read[:] = 0.0, 0.0
        for i in range(k_dim):
            for j in range(v_dim):
                memory[i * v_dim + j] *= kept
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
        out = array_at(args[16] + 4 * (other * num_v_heads + head) * v_dim, v_dim, np.float32(0))
        for j in range(v_dim):
            z = inputs[z_at + j]
            out[j] = read[j] * rms * norm[j] * z * _sigmoid(z)


@exact_kernel
def _unit(x: NDArray[np.float32], at: int, out: NDArray[np.float32]) -> None:
    total = np.float32(1e-6)
    for i in range(len(out)):
        total += x[at + i] * x[at + i]
    scale = np.float32(1.0) / np.sqrt(total)
    for i in range(len(out)):
        out[i] = x[at + i] * scale


@exact_kernel
def _sigmoid(x: np.float32) -> Any:
    return np.float32(1.0) / (np.float32(1.0) + np.exp(-x))


@exact_kernel
def _softplus(x: np.float32) -> Any:
    return max(x, np.float32(0.0)) + np.log1p(np.exp(-abs(x)))
