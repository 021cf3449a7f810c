"""Launches of the kernels of layers of `RecurrentSpec`."""

import triton

from csattn.batch import StepRows
from csattn.models.recurrent_spec import ConvSpec, DeltaSpec, RecurrentSpec, ScanSpec
from csattn.models.weights import RecurrentWeights
from workers.model.gpu.recurrent_kernels import delta_rule_kernel, gated_norm_kernel, mix_kernel, scan_kernel
from workers.model.gpu.stream_ops import Launches
from workers.model.ops import RecurrentBuffers, RecurrentState

_MIX_BLOCK = 128
_STATE_BLOCK = 4096  # numbers of a memory for each program of `scan_kernel`


class TritonRecurrentOps(Launches):
    """The part of `TritonOps` for layers of `RecurrentSpec`."""

    def recurrent(
        self,
        weights: RecurrentWeights,
        spec: RecurrentSpec,
        rows: StepRows,
        state: RecurrentState,
        buffers: RecurrentBuffers,
    ) -> None:
        num_rows, in_width = buffers.inputs.shape
        is_gated = isinstance(spec, ConvSpec)
        requests = {"VERSIONS": state.conv.shape[1], "BLOCK_ROWS": triton.next_power_of_2(num_rows)}
        mix_kernel[(num_rows, triton.cdiv(spec.num_channels, _MIX_BLOCK))](
            buffers.inputs,
            weights.conv,
            weights.conv if weights.conv_bias is None else weights.conv_bias,
            rows.tail_lens,
            rows.tail_ids,
            state.version,
            state.conv,
            buffers.out if is_gated else buffers.mixed,
            num_rows,
            in_width,
            spec.num_channels,
            GATED=is_gated,
            HAS_BIAS=weights.conv_bias is not None,
            CONV_LEN=spec.conv_len,
            BLOCK_LEN=triton.next_power_of_2(spec.conv_len),
            BLOCK=_MIX_BLOCK,
            num_warps=4,
            **requests,
            **self._launch(),
        )
        if (memory := weights.memory) is None:
            return
        of_step = (
            *(rows.tail_lens, rows.tail_ids, state.version, state.memory, buffers.out),
            *(num_rows, in_width, spec.num_channels),
        )
        if isinstance(spec, DeltaSpec):
            delta_rule_kernel[(num_rows, spec.num_v_heads)](
                *(buffers.inputs, buffers.mixed, memory.decay, memory.step_bias, memory.norm, *of_step, self._eps),
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
        elif isinstance(spec, ScanSpec):
            block_state = triton.next_power_of_2(spec.state_dim)
            block_dim = min(triton.next_power_of_2(spec.head_dim), max(1, _STATE_BLOCK // block_state))
            scan_kernel[(num_rows, spec.num_heads, triton.cdiv(spec.head_dim, block_dim))](
                *(buffers.inputs, buffers.mixed, memory.decay, memory.step_bias, memory.skip, *of_step),
                spec.least_step,
                NUM_HEADS=spec.num_heads,
                NUM_GROUPS=spec.num_groups,
                HEAD_DIM=spec.head_dim,
                STATE_DIM=spec.state_dim,
                BLOCK_DIM=block_dim,
                BLOCK_STATE=block_state,
                num_warps=4,
                **requests,
                **self._launch(),
            )
            group_width = spec.out_width // spec.num_groups
            gated_norm_kernel[(num_rows, spec.num_groups)](
                *(buffers.inputs, memory.norm, buffers.out, in_width, spec.num_channels, group_width, self._eps),
                BLOCK=triton.next_power_of_2(group_width),
                num_warps=8,
                **self._launch(),
            )
