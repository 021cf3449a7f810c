"""Launches of the operations of MoE layers: in Triton, and in CUDA C for weights of 8 or 4 bits."""

import torch
import triton
from torch import Tensor

from csattn.batch import StepRows
from csattn.models.quantized_weight import QuantizedWeight
from csattn.models.spec import Activation, ExpertsSpec
from csattn.models.weights import ExpertWeights
from workers.model.gpu.expert_kernels import choose_kernel, experts_kernel, sum_parts_kernel
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
        if weights.quantized is None and weights.ups is not None:
            assert weights.ups.data_ptr() - weights.gates.data_ptr() == weights.gates[0].nbytes
        quantized = None if weights.quantized is None else weights.quantized.gate_up
        shares = "input" if spec.on_input else "none"
        matrices = weights.gates, quantized, weights.gate_bias
        self._experts(x, *matrices, spec, buffers, shares, buffers.gated, spec.activation, spec.gated)

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
        self._add_parts(buffers.parts, spec.num_chosen, None, multiplier, 1.0, stream, readers)

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
        quantized = None if weights.quantized is None else weights.quantized.down
        gated, shares = Normed(buffers.gated.flatten(0, 1)), "none" if spec.on_input else "output"
        self._experts(gated, weights.down, quantized, weights.down_bias, spec, buffers, shares, buffers.parts)

    def _experts(
        self,
        x: Normed,  # [batch_size, num_in], or [batch_size * num_chosen, num_in]
        weight: Tensor,  # [num_experts, outputs of one, num_in]
        quantized: QuantizedWeight | None,  # of all experts, one below the other: read instead
        bias: Tensor | None,  # [num_experts, outputs of one], contiguous
        spec: ExpertsSpec,
        buffers: ExpertBuffers,  # `chosen` and `shares` are read
        shares: str,  # "none", or of what the shares are factors: "input" or "output"
        out: Tensor,  # [batch_size, num_chosen, outputs, or half as many if gated] <-
        activation: Activation | None = None,
        gated: bool = False,
    ) -> None:
        if quantized is not None:
            in_shares, out_shares = (buffers.shares if shares == of else None for of in ("input", "output"))
            chosen_early = out is buffers.parts  # products with gates have waited for the kernel that wrote it
            return self._multiply_experts(
                x, quantized, bias, buffers.chosen, chosen_early, in_shares, out_shares, out, activation, gated
            )
        squares, (batch_size, num_chosen, num_out) = x.squares, out.shape
        num_squares = 1 if squares is None else len(squares)
        experts_kernel[(triton.cdiv((1 + gated) * num_out, BLOCK_N), spec.num_experts)](
            x.x,
            x.x if squares is None else squares,
            weight,
            weight if bias is None else bias,
            buffers.chosen,
            buffers.shares,
            out,
            batch_size,
            num_out,
            x.x.shape[1],
            num_squares,
            self._eps,
            NORMED=squares is not None,
            BY_PAIR=out is buffers.parts,
            SHARES=shares,
            ACTIVATION=activation or "none",
            GATED=gated,
            HAS_BIAS=bias is not None,
            NUM_CHOSEN=num_chosen,
            BLOCK_PAIRS=triton.next_power_of_2(batch_size * num_chosen),
            BLOCK_SQUARES=triton.next_power_of_2(num_squares),
            BLOCK_M=16,
            BLOCK_N=BLOCK_N,
            BLOCK_K=256 // weight.element_size(),
            DOT_PRECISION="ieee" if weight.dtype == torch.float32 else "tf32",
            num_warps=4,
            num_stages=4,
            **self._launch(),
        )
