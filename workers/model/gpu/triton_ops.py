"""The operations of a step on a GPU: launches of Triton kernels, and of CUDA C kernels for weights of 8 or 4 bits."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from csattn.batch import StepRows
from csattn.models.query import Rotation
from csattn.models.spec import Activation, Temper
from csattn.models.weights import Frequencies, HeadNorms, InputWeights, Linear
from workers.model.gpu.expert_ops import TritonExpertOps
from workers.model.gpu.head_kernels import copy_rows_kernel, gate_kernel, predict_query_kernel, rotate_append_kernel
from workers.model.gpu.latent_ops import TritonLatentOps
from workers.model.gpu.linear_kernels import linear_add_kernel, linear_kernel
from workers.model.gpu.recurrent_ops import TritonRecurrentOps
from workers.model.gpu.remix_ops import TritonRemixOps
from workers.model.gpu.stream_ops import exchange_arguments, stream_arguments
from workers.model.gpu.tiles import BLOCK_N, MAX_BATCH_SIZE, MAX_SPLIT_PROGRAMS, tiles
from workers.model.gpu.token_kernels import (
    argmax_kernel,
    argmax_of_part_kernel,
    compute_rotation_kernel,
    finish_logits_kernel,
    make_inputs_kernel,
)
from workers.model.ops import QUANTIZED_ROWS, SQUARES_BLOCK, Normed, Readers, Stream

_GATE_BLOCK = 1024
# Pairs of a predicted query that a program computes: all, or some of a wide head, whose matrix does not fit registers.
_PREDICTED_PAIRS, _WIDE_PREDICTED_PAIRS = 128, 32
_LOGITS_BLOCK = 4096  # logits of a program


class TritonOps(TritonExpertOps, TritonRecurrentOps, TritonLatentOps, TritonRemixOps):
    """Enqueues the operations that `TorchOps` defines. It owns the scratch memory of split-K sums, so they must all be
    enqueued on one stream.

    A row's results do not depend on the rows beside it, nor on their number up to ALIKE_ROWS: sums are taken in the
    same order.
    In larger steps the last bits may differ; with weights of 8 or 4 bits, in steps of more than 8 rows.
    """

    def __init__(self, device: torch.device, eps: float) -> None:
        super().__init__(device, eps)
        sums = MAX_SPLIT_PROGRAMS * BLOCK_N * MAX_BATCH_SIZE
        self._partials = torch.empty(sums, dtype=torch.float32, device=device)
        self._counters = torch.zeros(MAX_SPLIT_PROGRAMS, dtype=torch.int32, device=device)

    def compute_rotation(
        self, rows: StepRows, frequencies: Frequencies, temper: Temper | None, rotation: Rotation
    ) -> None:
        half, of_temper = len(frequencies.angles), temper or Temper(beta=0.0, every=1)
        compute_rotation_kernel[(rows.batch_size,)](
            rows.positions,
            frequencies.angles,
            rotation.cos,
            rotation.sin,
            rotation.q_scale,
            half,
            frequencies.scale,
            of_temper.beta,
            of_temper.every,
            of_temper.offset,
            BLOCK=triton.next_power_of_2(max(1, half)),
            num_warps=1,
        )

    def argmax(self, logits: Tensor, next_ids: Tensor) -> None:
        batch_size, vocab_size = logits.shape
        num_parts = -(-vocab_size // _LOGITS_BLOCK)
        best = self._partials[: batch_size * num_parts]
        best_ids = self._partials[len(best) : 2 * len(best)].view(torch.int32)
        argmax_of_part_kernel[(batch_size, num_parts)](
            logits, best, best_ids, vocab_size, BLOCK=_LOGITS_BLOCK, num_warps=8, **self._launch()
        )
        block = triton.next_power_of_2(num_parts)
        argmax_kernel[(batch_size,)](best, best_ids, next_ids, num_parts, BLOCK=block, num_warps=1, **self._launch())

    def linear(
        self,
        x: Normed,
        linears: Sequence[Linear],
        out: Tensor,
        activation: Activation | None = None,
        gated: bool = False,
    ) -> None:
        (linear,) = linears  # as `take_weights` joins them
        if linear.quantized is not None and len(x.x) <= QUANTIZED_ROWS:
            return self._multiply(x, linear, linear.quantized, out, activation, gated)
        squares, (programs, constants) = x.squares, tiles(linear, x.x)
        num_squares = 1 if squares is None else len(squares)
        inputs = self._in_order(x.x, linear.quantized)
        linear_kernel[programs](
            inputs,
            inputs if squares is None else squares,
            *_weights(linear),
            out,
            self._partials,
            self._counters,
            len(x.x),
            out.shape[1],
            linear.num_in,
            *_strides(linear),
            num_squares,
            self._eps,
            NORMED=squares is not None,
            GATED=gated,
            ACTIVATION=activation or "none",
            HAS_BIAS=linear.bias is not None,
            BLOCK_SQUARES=triton.next_power_of_2(num_squares),
            **constants,
            **self._launch(),
        )

    def grouped(self, x: Tensor, linear: Linear, out: Tensor) -> None:
        num_groups, batch_size, num_in = x.shape
        num_out = out.shape[1] // num_groups
        if linear.quantized is None:
            parts = torch.bmm(x, linear.weight.view(num_groups, num_out, num_in).mT)
        else:
            parts = out.new_empty(num_groups, batch_size, num_out)
            for group, of_group in enumerate(x):
                start = group * num_out
                self.linear(Normed(of_group), [linear.outputs(start, start + num_out)], parts[group])
        out.view(batch_size, num_groups, num_out).copy_(parts.transpose(0, 1))
        self.break_chain()

    def linear_add(self, x: Tensor, linear: Linear, multiplier: float, stream: Stream, readers: Readers) -> None:
        if linear.quantized is not None and len(x) <= QUANTIZED_ROWS:
            return self._multiply_and_add(x, linear, linear.quantized, multiplier, stream, readers)
        programs, constants = tiles(linear, x)
        memory, exchange_constants = exchange_arguments(stream.tile_sums, x)
        linear_add_kernel[programs](
            self._in_order(x, linear.quantized),
            *_weights(linear),
            *stream_arguments(stream, readers),
            self._partials,
            self._counters,
            len(x),
            len(linear.weight),
            linear.num_in,
            *_strides(linear),
            multiplier,
            *memory,
            HAS_BIAS=linear.bias is not None,
            HAS_NORM=readers.norm is not None,
            AHEAD=readers.ahead is not None,
            SQUARES_BLOCK=SQUARES_BLOCK,
            **exchange_constants,
            **constants,
            **self._launch(),
        )

    def finish_logits(self, logits: Tensor, multiplier: float, cap: float | None) -> None:
        finish_logits_kernel[(triton.cdiv(logits.numel(), _LOGITS_BLOCK),)](
            logits,
            logits.numel(),
            multiplier,
            1.0 if cap is None else cap,
            HAS_CAP=cap is not None,
            BLOCK=_LOGITS_BLOCK,
            num_warps=8,
            **self._launch(),
        )

    def rotate_append(
        self,
        qkv: Tensor,
        norms: HeadNorms | None,
        rotation: Rotation | None,
        rows: StepRows,
        tail: Tensor | None,
        q: Tensor,
    ) -> None:
        batch_size, num_q_heads, _ = q.shape
        num_kv_heads, tail_capacity = (0, 0) if tail is None else tail.shape[1:3]
        rotate_append_kernel[(batch_size, num_q_heads + num_kv_heads)](
            qkv,
            qkv if norms is None else norms.q,
            qkv if norms is None else norms.k,
            qkv if norms is None or norms.v is None else norms.v,
            qkv if rotation is None else rotation.cos,
            qkv if rotation is None else rotation.sin,
            qkv if rotation is None else rotation.q_scale,
            rows.tail_ids,
            rows.tail_lens,
            rows.tail_starts,
            q if tail is None else tail,
            q,
            tail_capacity,
            self._eps,
            V_NORMED=norms is not None and norms.v is not None,
            NUM_KV_HEADS=num_kv_heads,
            **_head_constants(norms, rotation, q),
            num_warps=1,
            **self._launch(),
        )

    def copy_rows(self, source: Tensor, tail: Tensor, rows: StepRows) -> None:
        _, num_kv_heads, tail_capacity, _, head_dim = tail.shape
        copy_rows_kernel[(rows.batch_size, num_kv_heads)](
            source,
            tail,
            rows.tail_ids,
            rows.tail_lens,
            rows.tail_starts,
            tail_capacity,
            2 * head_dim,
            BLOCK=triton.next_power_of_2(2 * head_dim),
            num_warps=1,
            **self._launch(),
        )

    def make_inputs(self, projected: Tensor, weights: InputWeights, rows: StepRows, out: Tensor) -> None:
        num_layers, batch_size, width = out.shape
        make_inputs_kernel[(batch_size, num_layers)](
            projected,
            weights.norm,
            rows.token_ids,
            weights.table,
            out,
            width,
            self._eps,
            weights.scale,
            weights.table_scale,
            BLOCK=triton.next_power_of_2(width),
            num_warps=1,
            **self._launch(),
        )

    def gate(self, x: Tensor, gates: Tensor, activation: Activation | None = None) -> None:
        constants = {"ACTIVATION": activation or "sigmoid", "BLOCK": _GATE_BLOCK, "num_warps": 4}
        gate_kernel[(triton.cdiv(x.numel(), _GATE_BLOCK),)](x, gates, x.numel(), **constants, **self._launch())

    def predict_query(
        self,
        early: Tensor,
        norms: HeadNorms | None,
        maps: Tensor,
        rotation: Rotation | None,
        rows: StepRows,
        q: Tensor,
    ) -> None:
        batch_size, num_q_heads, head_dim = q.shape
        block = triton.next_power_of_2(head_dim // 2)
        of_program = block if block <= _PREDICTED_PAIRS else _WIDE_PREDICTED_PAIRS
        predict_query_kernel[(batch_size, num_q_heads, block // of_program)](
            early,
            early if norms is None else norms.q,
            maps,
            early if rotation is None else rotation.cos,
            early if rotation is None else rotation.sin,
            early if rotation is None else rotation.q_scale,
            rows.context_ids,
            q,
            maps.stride(0),
            self._eps,
            BLOCK_OUT=of_program,
            **_head_constants(norms, rotation, q),
            num_warps=8,
            **self._launch(),
        )


def _weights(linear: Linear) -> tuple[Tensor, Tensor, Tensor]:
    """Return a kernel's weights, scales and bias; in place of those that there are not, any tensor."""
    scales = linear.weight if linear.quantized is None else linear.quantized.scales
    return linear.weight, scales, linear.weight if linear.bias is None else linear.bias


def _strides(linear: Linear) -> tuple[int, int]:
    """Return the strides from a row of the weights to the next, and from a group's scales to the next group's."""
    return linear.weight.stride(0), 0 if linear.quantized is None else linear.quantized.scales.stride(0)


def _head_constants(norms: HeadNorms | None, rotation: Rotation | None, q: Tensor) -> dict[str, Any]:
    _, num_q_heads, head_dim = q.shape
    norm = "none" if norms is None else "head" if len(norms.q) == head_dim else "projection"
    if norms is not None and norms.after_rope:
        norm = "after_rope"
    return {
        "NORM": norm,
        "ROTATED": rotation is not None,
        "HALF": 0 if rotation is None else rotation.cos.shape[1],
        "INTERLEAVED": rotation is not None and rotation.interleaved,
        "NUM_Q_HEADS": num_q_heads,
        "HEAD_DIM": head_dim,
        "BLOCK": triton.next_power_of_2(head_dim // 2),
    }
