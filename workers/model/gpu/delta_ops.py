"""Launches of the kernels of layers of linear attention (Gated DeltaNet)."""

import triton

from csattn.batch import StepRows
from csattn.models.spec import DeltaSpec
from csattn.models.weights import DeltaWeights
from workers.model.gpu.delta_kernels import delta_rule_kernel, mix_kernel
from workers.model.gpu.stream_ops import Launches
from workers.model.ops import DeltaBuffers, DeltaState

_MIX_BLOCK = 128


class TritonDeltaOps(Launches):
    """The part of `TritonOps` for layers of linear attention."""

    def delta(
        self,
        weights: DeltaWeights,
        spec: DeltaSpec,
        eps: float,
        rows: StepRows,
        state: DeltaState,
        buffers: DeltaBuffers,
    ) -> None:
        num_rows, in_width = buffers.inputs.shape
        requests = {"VERSIONS": state.conv.shape[1], "BLOCK_ROWS": triton.next_power_of_2(num_rows)}
        mix_kernel[(num_rows, triton.cdiv(spec.num_channels, _MIX_BLOCK))](
            buffers.inputs,
            weights.conv,
            rows.tail_lens,
            rows.tail_ids,
            state.version,
            state.conv,
            buffers.mixed,
            num_rows,
            in_width,
            spec.num_channels,
            CONV_LEN=spec.conv_len,
            BLOCK_LEN=triton.next_power_of_2(spec.conv_len),
            BLOCK=_MIX_BLOCK,
            num_warps=4,
            **requests,
            **self._launch(),
        )
        delta_rule_kernel[(num_rows, spec.num_v_heads)](
            buffers.inputs,
            buffers.mixed,
            weights.decay,
            weights.decay_bias,
            weights.norm,
            rows.tail_lens,
            rows.tail_ids,
            state.version,
            state.memory,
            buffers.out,
            num_rows,
            in_width,
            spec.num_channels,
            eps,
            NUM_K_HEADS=spec.num_k_heads,
            NUM_V_HEADS=spec.num_v_heads,
            K_DIM=spec.k_dim,
            V_DIM=spec.v_dim,
            BLOCK_K=triton.next_power_of_2(spec.k_dim),
            BLOCK_V=triton.next_power_of_2(spec.v_dim),
            num_warps=8,
            **requests,
            **self._launch(),
        )
