"""Records the operations of MoE layers on a tape, and their stages, which work on each row by itself."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from csattn.batch import StepRows
from csattn.cpu.addresses import KindStage, array_at
from csattn.cpu.arguments import bytes_of, floats_of, number_at, word_of, words_at
from csattn.cpu.floats import load_float
from csattn.cpu.jit import exact_kernel
from csattn.cpu.simd import LANES
from csattn.models.quantized_weight import QuantizedWeight
from csattn.models.spec import ExpertsSpec
from csattn.models.weights import ExpertWeights
from workers.model.cpu.linear import TILE
from workers.model.cpu.linear_stage import ACTIVATIONS, activate, num_groups
from workers.model.cpu.quantized_products import FLOATS, FORMATS, multiply
from workers.model.cpu.row_stages import sigmoid, softplus
from workers.model.cpu.stage_recorder import StageRecorder
from workers.model.ops import LEAST_SUM, ExpertBuffers, Normed, Readers, Stream

# Arguments of the stages: sizes, and addresses of float32 arrays unless stated otherwise.
CHOOSE = (
    "logits",  # [num_rows, num_experts]
    "bias",  # [num_experts], or 0
    "num_experts",
    "num_chosen",
    "scores",  # an index of SCORES
    "num_groups",
    "num_kept",  # groups whose experts may be chosen
    "normed",  # 1: shares are divided by their sum
    "scale",  # address of a float64
    "scales",  # [num_experts], or 0
    "by_token",  # [vocab_size, num_chosen] int32, or 0
    "vocab_size",
    "token_ids",  # [num_rows] int64
    "chosen",  # [num_rows, num_chosen] int32, written
    "shares",  # [num_rows, num_chosen], written
)
SCORES = ("softmax", "sigmoid", "softmax_of_chosen", "root_softplus")
_OF_EXPERTS = (
    "x",  # [num_rows, num_in], or [num_rows, num_chosen, num_in]
    "num_in",
    "chosen",  # [num_rows, num_chosen] int32
    "shares",  # [num_rows, num_chosen]: factors of x or of outputs; or 0
    "num_chosen",
    "format",  # of weights, an index of FORMATS
    "group_size",  # of quantized weights
    "num_weights",  # outputs of all experts' weights together
    "num_out",
    "out",  # written
)
EXPERTS = (
    *_OF_EXPERTS,  # shares are factors of x; out: [num_rows, num_chosen, num_out]
    "gates",  # the first expert's, of the model's dtype, or a `QuantizedWeight`'s words
    "ups",
    "gate_scales",  # of quantized weights, or 0
    "up_scales",
    "expert_bytes",  # from an expert's weights to the next one's; 0 if quantized
    "expert_outputs",  # outputs from an expert to the next if quantized, else 0
    "row_stride",  # elements
    "gate_bias",  # of the model's dtype, elements bias_step apart, experts bias_stride apart; or 0
    "up_bias",
    "bias_stride",
    "bias_step",
    "activation",  # an index of ACTIVATIONS
)
ADD_EXPERTS = (
    *_OF_EXPERTS,  # x: a row for each expert; shares are factors of outputs; out: [num_rows, num_out]
    "down",  # [num_experts, num_out, num_in] of the model's dtype, or a `QuantizedWeight`'s words
    "scales",  # of quantized weights, or 0
    "bias",  # [num_experts, num_out] of the model's dtype, or 0
    "multiplier",  # address of a float64: a factor of the sum over experts
    "adds",  # 1: the sum is added to out; 0: it replaces out
)
_choose_at, _experts_at, _add_at = words_at(CHOOSE), words_at(EXPERTS), words_at(ADD_EXPERTS)


class TapeExpertOps(StageRecorder):
    """The part of `TapeOps` for MoE layers."""

    def choose_experts(self, weights: ExpertWeights, spec: ExpertsSpec, rows: StepRows, buffers: ExpertBuffers) -> None:
        num_groups, num_kept = spec.groups
        self._record(
            choose_stage,
            CHOOSE,
            writes=[buffers.chosen, buffers.shares],
            logits=buffers.logits,
            bias=weights.choice_bias,
            num_experts=spec.num_experts,
            num_chosen=spec.num_chosen,
            scores=SCORES.index(spec.scores),
            num_groups=num_groups,
            num_kept=num_kept,
            normed=spec.normed,
            scale=self._number(spec.scale),
            scales=weights.scales,
            by_token=weights.by_token,
            vocab_size=0 if weights.by_token is None else len(weights.by_token),
            token_ids=rows.token_ids,
            chosen=buffers.chosen,
            shares=buffers.shares,
        )

    def experts(self, x: Normed, weights: ExpertWeights, spec: ExpertsSpec, buffers: ExpertBuffers) -> None:
        bias = weights.gate_bias
        self._record(
            KindStage(experts_stage, self._kind),
            EXPERTS,
            writes=[buffers.gated],
            per_row=spec.num_chosen * num_groups(spec.intermediate_size),
            x=x.x,
            num_in=x.x.shape[1],
            chosen=buffers.chosen,
            shares=buffers.shares if spec.on_input else None,
            num_chosen=spec.num_chosen,
            **_gates_and_ups(weights, spec),
            gate_bias=0 if bias is None else bias.data_ptr(),
            up_bias=0 if weights.up_bias is None else weights.up_bias.data_ptr(),
            bias_stride=0 if bias is None else bias.stride(0),
            bias_step=0 if bias is None else bias.stride(1),
            activation=ACTIVATIONS.index(spec.activation),
            num_out=spec.intermediate_size,
            out=buffers.gated,
        )

    def experts_add(
        self,
        weights: ExpertWeights,
        spec: ExpertsSpec,
        buffers: ExpertBuffers,
        multiplier: float,
        stream: Stream,
        readers: Readers,
    ) -> None:
        self._add_experts(weights, spec, buffers, stream.hidden, multiplier)
        self._prepare(stream, readers)

    def experts_out(
        self, weights: ExpertWeights, spec: ExpertsSpec, buffers: ExpertBuffers, out: Tensor, adds: bool = False
    ) -> None:
        self._add_experts(weights, spec, buffers, out, 1.0 if adds else None)

    def _add_experts(
        self,
        weights: ExpertWeights,
        spec: ExpertsSpec,
        buffers: ExpertBuffers,
        out: Tensor,
        multiplier: float | None,  # None: the sum over experts replaces out; else it is added, times multiplier
    ) -> None:
        hidden_size = out.shape[1]
        quantized = None if weights.quantized is None else weights.quantized.down
        self._record(
            KindStage(add_experts_stage, self._kind),
            ADD_EXPERTS,
            writes=[out],
            per_row=num_groups(hidden_size),
            x=buffers.gated,
            num_in=spec.intermediate_size,
            chosen=buffers.chosen,
            shares=None if spec.on_input else buffers.shares,
            num_chosen=spec.num_chosen,
            **_format_of(quantized),
            down=weights.down if quantized is None else quantized.words,
            scales=None if quantized is None else quantized.scales.contiguous(),
            num_weights=spec.num_experts * hidden_size,
            bias=weights.down_bias,
            num_out=hidden_size,
            out=out,
            multiplier=self._number(1.0 if multiplier is None else multiplier),
            adds=multiplier is not None,
        )


def _gates_and_ups(weights: ExpertWeights, spec: ExpertsSpec) -> dict[str, Any]:
    """Return the arguments of `EXPERTS` that say where gates and ups lie."""
    of_expert = (1 + spec.gated) * spec.intermediate_size
    quantized = None if weights.quantized is None else weights.quantized.gate_up
    common = {**_format_of(quantized), "num_weights": spec.num_experts * of_expert}
    if quantized is None:
        gates, ups = weights.gates, weights.ups
        assert (ups is None or gates.stride() == ups.stride()) and gates.stride(2) == 1
        return common | {
            "gates": gates.data_ptr(),
            "ups": 0 if ups is None else ups.data_ptr(),
            "gate_scales": None,
            "up_scales": None,
            "expert_bytes": gates.stride(0) * gates.itemsize,
            "expert_outputs": 0,
            "row_stride": gates.stride(1),
        }
    scales = quantized.scales.contiguous()
    return common | {
        "gates": quantized.words,
        "ups": quantized.words[spec.intermediate_size :].data_ptr() if spec.gated else 0,
        "gate_scales": scales,
        "up_scales": scales[:, spec.intermediate_size :].data_ptr(),
        "expert_bytes": 0,
        "expert_outputs": of_expert,
        "row_stride": 0,
    }


def _format_of(quantized: QuantizedWeight | None) -> dict[str, Any]:
    if quantized is None:
        return {"format": FLOATS, "group_size": 0}
    return {"format": FORMATS.index(quantized.format), "group_size": quantized.group_size}


def choose_stage(arguments: int, row: int, thread: int, unused: int) -> int:
    """Choose a row's experts and compute their shares. A piece is a row."""
    args = _choose_at(arguments)
    num_experts, num_chosen, kind = args.num_experts, args.num_chosen, args.scores
    logits = floats_of(args.logits, row, num_experts)
    scores, ranked = np.empty(num_experts, np.float32), np.empty(num_experts, np.float32)
    if kind == 0:
        _softmax(logits, scores)
    elif kind == 3:
        for i in range(num_experts):
            scores[i] = np.sqrt(softplus(logits[i]))
    else:
        for i in range(num_experts):
            scores[i] = sigmoid(logits[i]) if kind == 1 else logits[i]
    for i in range(num_experts):
        ranked[i] = scores[i]
    if args.bias != 0:
        ranked += array_at(args.bias, num_experts, np.float32(0))
    if args.num_groups > 1:
        _mask_groups(ranked, args.num_groups, args.num_kept)
    chosen = array_at(args.chosen + 4 * row * num_chosen, num_chosen, np.int32(0))
    shares = floats_of(args.shares, row, num_chosen)
    if args.by_token != 0:
        of_all = array_at(args.by_token, args.vocab_size * num_chosen, np.int32(0))
        first = word_of(args.token_ids, row) * num_chosen
        for k in range(num_chosen):
            chosen[k], shares[k] = of_all[first + k], scores[of_all[first + k]]
    else:
        for k in range(num_chosen):
            best = _largest(ranked)
            chosen[k], shares[k], ranked[best] = best, scores[best], -np.inf
    if kind == 2:
        _softmax(shares, shares)
    total, scale = np.float32(1.0), number_at(args.scale)
    if args.normed != 0:
        total = shares.sum() + np.float32(LEAST_SUM)
    for k in range(num_chosen):
        shares[k] = shares[k] / total * scale
    if args.scales != 0:
        scales = array_at(args.scales, num_experts, np.float32(0))
        for k in range(num_chosen):
            shares[k] *= scales[chosen[k]]
    return 0


@exact_kernel
def _softmax(x: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    top, total = x.max(), np.float32(0.0)
    for i in range(len(x)):
        out[i] = np.exp(x[i] - top)
        total += out[i]
    for i in range(len(x)):
        out[i] /= total


@exact_kernel
def _largest(x: NDArray[np.float32]) -> int:
    """Return the argmax, the first of equals."""
    best = 0
    for i in range(1, len(x)):
        if x[i] > x[best]:
            best = i
    return best


@exact_kernel
def _mask_groups(ranked: NDArray[np.float32], num_groups: int, num_kept: int) -> None:
    """Set experts to -inf outside the num_kept groups with the largest sums of their two best scores."""
    size = len(ranked) // num_groups
    group_scores, kept = np.empty(num_groups, np.float32), np.zeros(num_groups, np.bool_)
    for group in range(num_groups):
        first, second = np.float32(-np.inf), np.float32(-np.inf)
        for i in range(group * size, (group + 1) * size):
            if ranked[i] > first:
                first, second = ranked[i], first
            elif ranked[i] > second:
                second = ranked[i]
        group_scores[group] = first + second
    for _ in range(num_kept):
        best = _largest(group_scores)
        kept[best], group_scores[best] = True, -np.inf
    for i in range(len(ranked)):
        if not kept[i // size]:
            ranked[i] = -np.inf


def experts_stage(arguments: int, piece: int, thread: int, like: Any) -> int:
    """Compute activation(gate) * up, or activation(gate). A piece is 16 outputs of one of a row's experts, or fewer.

    like: an element of the model's weights.
    """
    args, itemsize = _experts_at(arguments), bytes_of(like)
    num_in, num_chosen, num_out = args.num_in, args.num_chosen, args.num_out
    blocks = -(-num_out // LANES)
    pair, first = piece // blocks, piece % blocks * LANES  # a pair is a row and one of its experts
    count, row = min(LANES, num_out - first), pair // num_chosen
    expert = np.int64(array_at(args.chosen + 4 * pair, 1, np.int32(0))[0])
    share = np.float32(1.0) if args.shares == 0 else array_at(args.shares + 4 * pair, 1, np.float32(0))[0]
    x = floats_of(args.x, row, num_in)
    gates, ups = np.empty(LANES + TILE, np.float32), np.ones(LANES + TILE, np.float32)
    at, of_all = expert * args.expert_bytes, expert * args.expert_outputs + first
    for sums, matrix, scales, bias in (
        (gates, args.gates, args.gate_scales, args.gate_bias),
        (ups, args.ups, args.up_scales, args.up_bias),
    ):
        if matrix == 0:  # experts are not gated
            continue
        multiply(
            x, 1, args.format, args.group_size, matrix + at, scales, args.num_weights, args.row_stride, of_all, count,
            num_in, like, sums,
        )  # fmt: skip
        for i in range(count):
            sums[i] *= share
        if bias != 0:
            of_expert = array_at(bias + expert * args.bias_stride * itemsize, (num_out - 1) * args.bias_step + 1, like)
            for i in range(count):
                sums[i] += load_float(of_expert, (first + i) * args.bias_step)
    activate(args.activation, gates, ups, 0, count)
    out = floats_of(args.out, pair, num_out)
    for i in range(count):
        out[first + i] = gates[i]
    return 0


def add_experts_stage(arguments: int, piece: int, thread: int, like: Any) -> int:
    """Sum the down projections of a row's experts. A piece is 16 outputs of a row, or the last fewer.

    like: an element of the model's weights.
    """
    args, itemsize = _add_at(arguments), bytes_of(like)
    num_in, num_chosen, num_out = args.num_in, args.num_chosen, args.num_out
    blocks = -(-num_out // LANES)
    row, first = piece // blocks, piece % blocks * LANES
    count = min(LANES, num_out - first)
    total, sums = np.zeros(LANES, np.float32), np.empty(LANES + TILE, np.float32)
    for k in range(num_chosen):
        pair = row * num_chosen + k
        expert = np.int64(array_at(args.chosen + 4 * pair, 1, np.int32(0))[0])
        share = np.float32(1.0) if args.shares == 0 else array_at(args.shares + 4 * pair, 1, np.float32(0))[0]
        x = floats_of(args.x, pair, num_in)
        multiply(
            x, 1, args.format, args.group_size, args.down, args.scales, args.num_weights, num_in,
            expert * num_out + first, count, num_in, like, sums,
        )  # fmt: skip
        if args.bias != 0:
            bias = array_at(args.bias + expert * num_out * itemsize, num_out, like)
            for i in range(count):
                sums[i] += load_float(bias, first + i)
        for i in range(count):
            total[i] += share * sums[i]
    multiplier = number_at(args.multiplier)
    out = floats_of(args.out, row, num_out)
    for i in range(count):
        before = out[first + i] if args.adds != 0 else np.float32(0.0)
        out[first + i] = before + multiplier * total[i]
    return 0
