"""Launches of the operations of MoE layers: in Triton, and in CUDA C for weights of 8 or 4 bits."""

from typing import Any

import torch
import triton
from torch import Tensor

from csattn.batch import StepRows
from csattn.models.spec import ExpertsSpec
from csattn.models.weights import ExpertWeights
from workers.model.gpu.expert_kernels import choose_kernel, experts_down_kernel, experts_kernel, sum_parts_kernel
from workers.model.gpu.quantized_ops import QuantizedOps
from workers.model.gpu.stream_ops import TritonStreamOps
from workers.model.gpu.tiles import BLOCK_N
from workers.model.ops import LEAST_SUM, ExpertBuffers, Normed, Readers, Stream


class TritonExpertOps(TritonStreamOps, QuantizedOps):
    """The part of `TritonOps` for MoE layers."""

    def choose_experts(self, weights: ExpertWeights, spec: ExpertsSpec, rows: StepRows, buffers: ExpertBuffers) -> None:
        (num_groups, num_kept), bias, scales = spec.groups, weights.choice_bias, weights.scales
        choose_kernel[(len(buffers.logits),)](
            buffers.logits,
            buffers.logits if bias is None else bias,
            buffers.logits if scales is None else scales,
            buffers.chosen if weights.by_token is None else weights.by_token,
            rows.token_ids,
            buffers.chosen,
            buffers.shares,
            spec.num_experts,
            spec.scale,
            SCORES=spec.scores,
            HAS_BIAS=bias is not None,
            HAS_SCALES=scales is not None,
            BY_TOKEN=weights.by_token is not None,
            NUM_GROUPS=num_groups,
            NUM_KEPT=num_kept,
            NUM_CHOSEN=spec.num_chosen,
            NORMED=spec.normed,
            LEAST_SUM=LEAST_SUM,
            BLOCK=triton.next_power_of_2(spec.num_experts),
            BLOCK_CHOSEN=triton.next_power_of_2(spec.num_chosen),
            num_warps=1,
            **self._launch(),
        )

    def experts(self, x: Normed, weights: ExpertWeights, spec: ExpertsSpec, buffers: ExpertBuffers) -> None:
        """Gates and ups, if there are any, must be parts of one matrix, as `take_weights` joins them."""
        width, squares, bias = spec.intermediate_size, x.squares, weights.gate_bias
        if (quantized := weights.quantized) is not None:
            shares = buffers.shares if spec.on_input else None
            self._multiply_experts(
                x,
                quantized.gate_up,
                bias,
                buffers.chosen,
                False,
                shares,
                None,
                buffers.gated,
                spec.gated,
                spec.activation,
            )
            return
        num_squares = 1 if squares is None else len(squares)
        if weights.ups is not None:
            assert weights.ups.data_ptr() - weights.gates.data_ptr() == weights.gates[0].nbytes
        experts_kernel[(triton.cdiv((1 + spec.gated) * width, BLOCK_N), spec.num_experts)](
            x.x,
            x.x if squares is None else squares,
            weights.gates,
            weights.gates if bias is None else bias,
            buffers.chosen,
            buffers.shares,
            buffers.gated,
            len(x.x),
            width,
            x.x.shape[1],
            num_squares,
            x.eps,
            NORMED=squares is not None,
            ON_INPUT=spec.on_input,
            ACTIVATION=spec.activation,
            GATED=spec.gated,
            HAS_BIAS=bias is not None,
            BLOCK_SQUARES=triton.next_power_of_2(num_squares),
            **_expert_constants(weights.gates, spec, len(x.x)),
            **self._launch(),
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
        self._write_parts(weights, spec, buffers)
        self._add_parts(buffers.parts, spec.num_chosen, None, 0.0, multiplier, 1.0, stream, readers)

    def experts_out(
        self, weights: ExpertWeights, spec: ExpertsSpec, buffers: ExpertBuffers, out: Tensor, adds: bool = False
    ) -> None:
        self._write_parts(weights, spec, buffers)
        batch_size, hidden_size = out.shape
        sum_parts_kernel[(batch_size,)](
            buffers.parts,
            out,
            hidden_size,
            NUM_PARTS=spec.num_chosen,
            ADDS=adds,
            BLOCK=triton.next_power_of_2(hidden_size),
            num_warps=8,
            **self._launch(),
        )

    def _write_parts(self, weights: ExpertWeights, spec: ExpertsSpec, buffers: ExpertBuffers) -> None:
        """Write the output of each of a row's experts to `buffers.parts`."""
        hidden_size, bias = buffers.parts.shape[2], weights.down_bias
        if (quantized := weights.quantized) is not None:
            gated = Normed(buffers.gated.flatten(0, 1))
            shares = None if spec.on_input else buffers.shares
            self._multiply_experts(
                gated, quantized.down, bias, buffers.chosen, True, None, shares, buffers.parts, False, "none"
            )
            return
        experts_down_kernel[(triton.cdiv(hidden_size, BLOCK_N), spec.num_experts)](
            buffers.gated,
            weights.down,
            weights.down if bias is None else bias,
            buffers.chosen,
            buffers.shares,
            buffers.parts,
            len(buffers.gated),
            hidden_size,
            spec.intermediate_size,
            ON_INPUT=spec.on_input,
            HAS_BIAS=bias is not None,
            **_expert_constants(weights.down, spec, len(buffers.gated)),
            **self._launch(),
        )


def _expert_constants(weight: Tensor, spec: ExpertsSpec, batch_size: int) -> dict[str, Any]:
    return {
        "NUM_CHOSEN": spec.num_chosen,
        "BLOCK_PAIRS": triton.next_power_of_2(batch_size * spec.num_chosen),
        "BLOCK_M": 16,
        "BLOCK_N": BLOCK_N,
        "BLOCK_K": 256 // weight.element_size(),
        "DOT_PRECISION": "ieee" if weight.dtype == torch.float32 else "tf32",
        "num_warps": 4,
        "num_stages": 4,
    }
