"""Records the mixing of several residual streams (hyper-connections) on a tape, and its stages."""

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.arguments import floats_of, number_at, words_at
from csattn.cpu.jit import exact_kernel
from csattn.cpu.lanes import fma
from csattn.cpu.simd import LANES, F32x16, fill, load, store
from csattn.models.spec import StreamsSpec
from csattn.models.weights import Linear, StreamWeights
from workers.model.cpu.row_stages import inverse_rms, sigmoid, write_scaled
from workers.model.cpu.stage_recorder import StageRecorder
from workers.model.ops import Readers, Stream, StreamsBuffers

# Arguments of the stages: sizes, and addresses of float32 arrays unless stated otherwise.
ADD = (
    "streams",  # [num_rows, num, width], written
    "num",
    "width",
    "branch_out",  # [num_rows, width]: the output of a branch
    "post",  # [num_rows, num]; 0: every stream becomes branch_out
    "comb",  # [num_rows, num, num]
)
READ = (
    "streams",  # [num_rows, num, width]
    "num",
    "width",
    "products",  # [num_rows, num_mixes], of the streams before their norm; only the first num if they are joined
    "num_mixes",
    "bias",  # [num_mixes]; [num] if the streams are joined
    "scales",  # [3]; [1] if the streams are joined
    "iterations",  # of Sinkhorn's algorithm
    "least",  # address of a float64, added to weights and their sums to keep them from 0
    "post",  # [num_rows, num], written; 0: the streams are joined
    "comb",  # [num_rows, num, num], written
    "hidden",  # [num_rows, width] <- the mixture if the streams are joined, else 0
    "norm",  # [width], or 0
    "out",  # [num_rows, width] <- norm(the mixture)
    "eps",  # address of a float64
)
_add_at, _read_at = words_at(ADD), words_at(READ)


class TapeRemixOps(StageRecorder):
    """The part of `TapeOps` for several streams. Products of all streams are normed afterwards, by a factor."""

    def remix(
        self,
        weights: StreamWeights,
        spec: StreamsSpec,
        is_first: bool,
        buffers: StreamsBuffers,
        stream: Stream,
        readers: Readers,
    ) -> None:
        assert not stream.centred and readers.ahead is None, "several streams are not centred, nor read ahead"
        _, num, width = buffers.streams.shape
        self._record(
            add_stage,
            ADD,
            writes=[buffers.streams],
            streams=buffers.streams,
            num=num,
            width=width,
            branch_out=stream.hidden,
            post=None if is_first else buffers.post,
            comb=None if is_first else buffers.comb,
        )
        self._linear(buffers.streams.flatten(1), Linear(weights.matrix), buffers.products)
        self._record(
            read_stage,
            READ,
            writes=[buffers.post, buffers.comb, stream.hidden, stream.scaled],
            streams=buffers.streams,
            num=num,
            width=width,
            products=buffers.products,
            num_mixes=spec.num_mixes,
            bias=weights.bias,
            scales=weights.scales,
            iterations=spec.iterations,
            least=self._number(spec.eps),
            post=None if weights.joins else buffers.post,
            comb=None if weights.joins else buffers.comb,
            hidden=stream.hidden,
            norm=readers.norm,
            out=stream.scaled,
            eps=self._eps,
        )


def add_stage(arguments: int, row: int, thread: int, unused: int) -> int:
    """Mix the streams and add a branch's output to them. A piece is a row, as in the other stage."""
    args = _add_at(arguments)
    num, width = args.num, args.width
    streams, branch_out = floats_of(args.streams, row, num * width), floats_of(args.branch_out, row, width)
    if args.post == 0:
        for j in range(num):
            streams[j * width : (j + 1) * width] = branch_out
        return 0
    post, comb = floats_of(args.post, row, num), floats_of(args.comb, row, num * num)
    before = np.empty(num * LANES, np.float32)  # old values of some columns, whose streams are overwritten one by one
    whole = width - width % LANES
    for first in range(0, whole, LANES):
        for i in range(num):
            store(before, i * LANES, load(F32x16, streams, i * width + first))
        added = load(F32x16, branch_out, first)
        for j in range(num):
            total = fill(F32x16, post[j]) * added
            for i in range(num):
                total = fma(fill(F32x16, comb[i * num + j]), load(F32x16, before, i * LANES), total)
            store(streams, j * width + first, total)
    for column in range(whole, width):
        for i in range(num):
            before[i] = streams[i * width + column]
        for j in range(num):
            last = post[j] * branch_out[column]
            for i in range(num):
                last += comb[i * num + j] * before[i]
            streams[j * width + column] = last
    return 0


def read_stage(arguments: int, row: int, thread: int, unused: int) -> int:
    """Compute the weights of the streams from their products, mix them, and norm the mixture for the next branch."""
    args = _read_at(arguments)
    num, width, eps, least = args.num, args.width, number_at(args.eps), number_at(args.least)
    streams, hidden = floats_of(args.streams, row, num * width), floats_of(args.hidden, row, width)
    products, num_mixes = floats_of(args.products, row, args.num_mixes), args.num_mixes
    bias, scales, inverse = args.bias, args.scales, inverse_rms(streams, 0, num * width, eps)
    pre = np.empty(num, np.float32)
    _write_sigmoids(products, 0, inverse, bias, floats_of(scales, 0, 1)[0], pre)
    for i in range(num):
        pre[i] += least
    if args.post != 0:
        post, comb = floats_of(args.post, row, num), floats_of(args.comb, row, num * num)
        _write_sigmoids(products, num, inverse, bias, floats_of(scales, 1, 1)[0], post)
        for i in range(num):
            post[i] *= np.float32(2.0)
        factor, biases = inverse * floats_of(scales, 2, 1)[0], floats_of(bias, 0, num_mixes)
        for i in range(num * num):
            comb[i] = products[2 * num + i] * factor + biases[2 * num + i]
        _balance(comb, num, args.iterations, least)
    mixture = np.empty(width, np.float32)
    _write_sum(streams, pre, mixture)
    out = floats_of(args.out, row, width)
    if args.norm == 0:
        out[:] = mixture
    else:
        write_scaled(mixture, inverse_rms(mixture, 0, width, eps), floats_of(args.norm, 0, width), out)
    if args.post == 0:
        hidden[:] = mixture
    else:
        hidden[:] = np.float32(0.0)
    return 0


@exact_kernel
def _write_sigmoids(
    products: NDArray[np.float32],
    first: int,
    inverse: np.float32,  # the inverse root mean square of the product's operand
    bias: int,
    scale: np.float32,
    out: NDArray[np.float32],
) -> None:
    biases, factor = floats_of(bias, 0, first + len(out)), inverse * scale
    for i in range(len(out)):
        out[i] = sigmoid(products[first + i] * factor + biases[first + i])


@exact_kernel
def _balance(comb: NDArray[np.float32], num: int, iterations: int, least: np.float32) -> None:
    """comb = the softmax of its rows; then its columns and rows in turn are divided by their sums (Sinkhorn)."""
    for i in range(num):
        largest, total = comb[i * num], np.float32(0.0)
        for j in range(1, num):
            largest = max(largest, comb[i * num + j])
        for j in range(num):
            comb[i * num + j] = np.exp(comb[i * num + j] - largest)
            total += comb[i * num + j]
        for j in range(num):
            comb[i * num + j] = comb[i * num + j] / total + least
    _divide_lines(comb, num, 1, num, least)
    for _ in range(iterations - 1):
        _divide_lines(comb, num, num, 1, least)
        _divide_lines(comb, num, 1, num, least)


@exact_kernel
def _divide_lines(comb: NDArray[np.float32], num: int, to_next: int, within: int, least: np.float32) -> None:
    """Divide each line by its sum. For rows, to_next is num and within is 1; for columns, the other way round."""
    for line in range(num):
        total = np.float32(0.0)
        for i in range(num):
            total += comb[line * to_next + i * within]
        total += least
        for i in range(num):
            comb[line * to_next + i * within] /= total


@exact_kernel
def _write_sum(streams: NDArray[np.float32], pre: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """out = the sum of pre * stream"""
    num, width = len(pre), len(out)
    whole = width - width % LANES
    for first in range(0, whole, LANES):
        total = fill(F32x16, pre[0]) * load(F32x16, streams, first)
        for i in range(1, num):
            total = fma(fill(F32x16, pre[i]), load(F32x16, streams, i * width + first), total)
        store(out, first, total)
    for column in range(whole, width):
        last = pre[0] * streams[column]
        for i in range(1, num):
            last += pre[i] * streams[i * width + column]
        out[column] = last
