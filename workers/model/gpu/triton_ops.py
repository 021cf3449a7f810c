"""`StepOps` as Triton kernels: their launches."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from csattn.batch import StepRows
from csattn.models.spec import Activation, DeltaSpec, ExpertsSpec, Temper
from csattn.models.weights import DeltaWeights, ExpertWeights, Frequencies, HeadNorms, Linear
from workers.model.gpu.delta_kernels import gate_kernel, mix_kernel, remember_kernel
from workers.model.gpu.expert_kernels import choose_kernel, experts_down_kernel, experts_kernel
from workers.model.gpu.head_kernels import predict_query_kernel, rotate_append_kernel
from workers.model.gpu.latent_ops import TritonLatentOps
from workers.model.gpu.linear_kernels import linear_add_kernel, linear_kernel
from workers.model.gpu.tiles import BLOCK_N, MAX_BATCH_SIZE, MAX_SPLIT_PROGRAMS, Tiles
from workers.model.gpu.token_kernels import (
    add_normed_kernel,
    advance_kernel,
    begin_kernel,
    finish_logits_kernel,
    likeliest_kernel,
    likeliest_of_part_kernel,
    turn_kernel,
)
from workers.model.ops import SQUARES_BLOCK, DeltaRoom, DeltaState, ExpertRoom, Normed, Readers, Rotation, Stream

_GATE_BLOCK, _MIX_BLOCK = 1024, 128
_LOGITS_BLOCK = 4096  # that a program looks through


class TritonOps(TritonLatentOps):
    """Owns the scratch memory of split sums, so its operations must follow each other on one stream.

    Each kernel starts while the one before it ends, if that one is ours too: it waits on the device before it reads
    what that one writes, and lets the next one start only after it has waited itself.

    A row's results do not depend on the rows beside it, nor, up to 16 of them, on their number: sums are taken in the
    same order. In larger steps the last bits may differ.
    """

    def __init__(self, device: torch.device) -> None:
        sums = MAX_SPLIT_PROGRAMS * BLOCK_N * MAX_BATCH_SIZE
        self._partials = torch.empty(sums, dtype=torch.float32, device=device)
        self._counters = torch.zeros(MAX_SPLIT_PROGRAMS, dtype=torch.int32, device=device)
        self._on_gpu = device.type == "cuda"  # else Triton's interpreter runs the kernels
        self._chained = False

    def break_chain(self) -> None:
        self._chained = False

    def begin(
        self,
        rows: StepRows,
        embedding: Tensor,
        multiplier: float,
        stream: Stream,
        readers: Readers,
    ) -> None:
        batch_size, hidden_size = stream.hidden.shape
        begin_kernel[(batch_size,)](
            rows.token_ids,
            embedding,
            *_written(stream, readers),
            stream.squares.shape[0],
            hidden_size,
            multiplier,
            CENTRED=stream.centred,
            **_row_constants(stream, readers),
        )

    def turn(self, rows: StepRows, frequencies: Frequencies, temper: Temper | None, rotation: Rotation) -> None:
        half, of_temper = len(frequencies.angles), temper or Temper(beta=0.0, every=1)
        turn_kernel[(rows.batch_size,)](
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

    def likeliest(self, logits: Tensor, next_ids: Tensor) -> None:
        batch_size, vocab_size = logits.shape
        num_parts = -(-vocab_size // _LOGITS_BLOCK)
        best = self._partials[: batch_size * num_parts]
        best_ids = self._partials[len(best) : 2 * len(best)].view(torch.int32)
        likeliest_of_part_kernel[(batch_size, num_parts)](
            logits, best, best_ids, vocab_size, BLOCK=_LOGITS_BLOCK, num_warps=8, **self._launch()
        )
        block = triton.next_power_of_2(num_parts)
        likeliest_kernel[(batch_size,)](best, best_ids, next_ids, num_parts, BLOCK=block, num_warps=1, **self._launch())

    def advance(self, rows: StepRows, next_ids: Tensor) -> None:
        block = triton.next_power_of_2(rows.batch_size)
        advance_kernel[(1,)](
            rows.token_ids,
            rows.positions,
            rows.tail_lens,
            next_ids,
            rows.batch_size,
            BLOCK=block,
            num_warps=1,
        )

    def linear(self, x: Normed, linears: Sequence[Linear], out: Tensor) -> None:
        self._linear(x, linears, out, gated=False, activation="none")

    def mlp(self, x: Normed, gate_up: Sequence[Linear], gated: bool, activation: Activation, out: Tensor) -> None:
        self._linear(x, gate_up, out, gated, activation)

    def _linear(self, x: Normed, linears: Sequence[Linear], out: Tensor, gated: bool, activation: str) -> None:
        (linear,) = linears  # as `take_weights` joins them
        weight, squares, tiles = linear.weight, x.squares, Tiles.of(linear)
        num_squares = 1 if squares is None else len(squares)
        inputs = self._in_order(x.x, linear)
        linear_kernel[(tiles.num_tiles, tiles.split_k)](
            inputs,
            inputs if squares is None else squares,
            weight,
            weight if linear.quantized is None else linear.quantized.scales,
            weight if linear.bias is None else linear.bias,
            out,
            self._partials,
            self._counters,
            len(x.x),
            out.shape[1],
            linear.num_in,
            *_strides(linear),
            num_squares,
            x.eps,
            NORMED=squares is not None,
            GATED=gated,
            ACTIVATION=activation,
            HAS_BIAS=linear.bias is not None,
            BLOCK_SQUARES=triton.next_power_of_2(num_squares),
            **tiles.constants(x.x),
            **self._launch(),
        )

    def choose_experts(self, bias: Tensor | None, spec: ExpertsSpec, room: ExpertRoom) -> None:
        num_groups, num_kept = spec.groups
        choose_kernel[(len(room.logits),)](
            room.logits,
            room.logits if bias is None else bias,
            room.chosen,
            room.shares,
            spec.num_experts,
            spec.scale,
            SCORES=spec.scores,
            HAS_BIAS=bias is not None,
            NUM_GROUPS=num_groups,
            NUM_KEPT=num_kept,
            NUM_CHOSEN=spec.num_chosen,
            NORMED=spec.normed,
            BLOCK=triton.next_power_of_2(spec.num_experts),
            BLOCK_CHOSEN=triton.next_power_of_2(spec.num_chosen),
            num_warps=1,
            **self._launch(),
        )

    def experts(self, x: Normed, weights: ExpertWeights, spec: ExpertsSpec, room: ExpertRoom) -> None:
        """gates and ups: parts of one matrix, as `take_weights` joins them."""
        width, squares, bias = spec.intermediate_size, x.squares, weights.gate_bias
        num_squares = 1 if squares is None else len(squares)
        assert weights.ups.data_ptr() - weights.gates.data_ptr() == weights.gates[0].nbytes
        experts_kernel[(triton.cdiv(2 * width, BLOCK_N), spec.num_experts)](
            x.x,
            x.x if squares is None else squares,
            weights.gates,
            weights.gates if bias is None else bias,
            room.chosen,
            room.shares,
            room.gated,
            len(x.x),
            width,
            x.x.shape[1],
            num_squares,
            x.eps,
            NORMED=squares is not None,
            ON_INPUT=spec.on_input,
            ACTIVATION=spec.activation,
            HAS_BIAS=bias is not None,
            BLOCK_SQUARES=triton.next_power_of_2(num_squares),
            **_expert_constants(weights.gates, spec, len(x.x)),
            **self._launch(),
        )

    def experts_add(
        self,
        weights: ExpertWeights,
        spec: ExpertsSpec,
        room: ExpertRoom,
        multiplier: float,
        stream: Stream,
        readers: Readers,
    ) -> None:
        hidden_size, bias = room.parts.shape[2], weights.down_bias
        experts_down_kernel[(triton.cdiv(hidden_size, BLOCK_N), spec.num_experts)](
            room.gated,
            weights.down,
            weights.down if bias is None else bias,
            room.chosen,
            room.shares,
            room.parts,
            len(room.gated),
            hidden_size,
            spec.intermediate_size,
            ON_INPUT=spec.on_input,
            HAS_BIAS=bias is not None,
            **_expert_constants(weights.down, spec, len(room.gated)),
            **self._launch(),
        )
        self._add_parts(room.parts, spec.num_chosen, None, 0.0, multiplier, stream, readers)

    def linear_add(self, x: Tensor, linear: Linear, multiplier: float, stream: Stream, readers: Readers) -> None:
        weight, tiles = linear.weight, Tiles.of(linear)
        linear_add_kernel[(tiles.num_tiles, tiles.split_k)](
            self._in_order(x, linear),
            weight,
            weight if linear.quantized is None else linear.quantized.scales,
            weight if linear.bias is None else linear.bias,
            *_written(stream, readers),
            self._partials,
            self._counters,
            len(x),
            len(weight),
            linear.num_in,
            *_strides(linear),
            multiplier,
            HAS_BIAS=linear.bias is not None,
            HAS_NORM=readers.norm is not None,
            AHEAD=readers.ahead is not None,
            **tiles.constants(x),
            **self._launch(),
        )

    def add_normed(
        self, x: Tensor, norm: Tensor | None, eps: float, multiplier: float, stream: Stream, readers: Readers
    ) -> None:
        self._add_parts(x, 1, norm, eps, multiplier, stream, readers)

    def _add_parts(
        self,
        x: Tensor,  # [batch_size, num_parts, hidden_size], or without the middle
        num_parts: int,
        norm: Tensor | None,
        eps: float,
        multiplier: float,
        stream: Stream,
        readers: Readers,
    ) -> None:
        batch_size, hidden_size = stream.hidden.shape
        add_normed_kernel[(batch_size,)](
            x,
            x if norm is None else norm,
            *_written(stream, readers),
            stream.squares.shape[0],
            hidden_size,
            eps,
            multiplier,
            NUM_PARTS=num_parts,
            IS_NORMED=norm is not None,
            **_row_constants(stream, readers),
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
        eps: float,
        rotation: Rotation | None,
        rows: StepRows,
        tail: Tensor,
        q: Tensor,
    ) -> None:
        batch_size, num_q_heads, _ = q.shape
        num_kv_heads, tail_capacity = tail.shape[1:3]
        rotate_append_kernel[(batch_size, num_q_heads + num_kv_heads)](
            qkv,
            qkv if norms is None else norms.q,
            qkv if norms is None else norms.k,
            qkv if rotation is None else rotation.cos,
            qkv if rotation is None else rotation.sin,
            qkv if rotation is None else rotation.q_scale,
            rows.tail_ids,
            rows.tail_lens,
            tail,
            q,
            tail_capacity,
            eps,
            NUM_KV_HEADS=num_kv_heads,
            **_head_constants(norms, rotation, q),
            num_warps=1,
            **self._launch(),
        )

    def gate(self, x: Tensor, gates: Tensor) -> None:
        programs = triton.cdiv(x.numel(), _GATE_BLOCK)
        gate_kernel[(programs,)](x, gates, x.numel(), BLOCK=_GATE_BLOCK, num_warps=4, **self._launch())

    def delta(
        self,
        weights: DeltaWeights,
        spec: DeltaSpec,
        eps: float,
        rows: StepRows,
        state: DeltaState,
        room: DeltaRoom,
    ) -> None:
        num_rows, in_width = room.inputs.shape
        requests = {"VERSIONS": state.conv.shape[1], "BLOCK_ROWS": triton.next_power_of_2(num_rows)}
        mix_kernel[(num_rows, triton.cdiv(spec.num_channels, _MIX_BLOCK))](
            room.inputs,
            weights.conv,
            rows.tail_lens,
            rows.tail_ids,
            state.turn,
            state.conv,
            room.mixed,
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
        remember_kernel[(num_rows, spec.num_v_heads)](
            room.inputs,
            room.mixed,
            weights.decay,
            weights.decay_bias,
            weights.norm,
            rows.tail_lens,
            rows.tail_ids,
            state.turn,
            state.memory,
            room.out,
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

    def predict_query(
        self,
        early: Tensor,
        norms: HeadNorms | None,
        eps: float,
        maps: Tensor,
        rotation: Rotation | None,
        rows: StepRows,
        q: Tensor,
    ) -> None:
        batch_size, num_q_heads, _ = q.shape
        predict_query_kernel[(batch_size, num_q_heads)](
            early,
            early if norms is None else norms.q,
            maps,
            early if rotation is None else rotation.cos,
            early if rotation is None else rotation.sin,
            early if rotation is None else rotation.q_scale,
            rows.context_ids,
            q,
            maps.stride(0),
            eps,
            **_head_constants(norms, rotation, q),
            num_warps=8,
            **self._launch(),
        )

    def _in_order(self, x: Tensor, linear: Linear) -> Tensor:
        """x as the weights have their inputs."""
        if linear.quantized is None or linear.quantized.order is None:
            return x
        self.break_chain()
        return x.index_select(1, linear.quantized.order)

    def _launch(self) -> dict[str, Any]:
        """How the next kernel starts; the one after it follows one of ours."""
        chained, self._chained = self._chained, True
        if not self._on_gpu:
            return {"PDL": False}
        return {"PDL": True, "launch_pdl": chained}


def _written(stream: Stream, readers: Readers) -> tuple[Tensor, ...]:
    """What a kernel that writes the stream is told; of a norm that is not there, anything."""
    norm, ahead = (stream.hidden if norm is None else norm for norm in (readers.norm, readers.ahead))
    return stream.hidden, norm, stream.scaled, ahead, stream.scaled_ahead, stream.squares


def _strides(linear: Linear) -> tuple[int, int]:
    """From a row of the weights to the next, and from a group's scales."""
    return linear.weight.stride(0), 0 if linear.quantized is None else linear.quantized.scales.stride(0)


def _row_constants(stream: Stream, readers: Readers) -> dict[str, Any]:
    """Of kernels whose programs own a row of the stream each."""
    return {
        "HAS_NORM": readers.norm is not None,
        "AHEAD": readers.ahead is not None,
        "BLOCK": max(SQUARES_BLOCK, triton.next_power_of_2(stream.hidden.shape[1])),
        "SQUARES_BLOCK": SQUARES_BLOCK,
        "num_warps": 8,
    }


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


def _head_constants(norms: HeadNorms | None, rotation: Rotation | None, q: Tensor) -> dict[str, Any]:
    _, num_q_heads, head_dim = q.shape
    norm = "none" if norms is None else "head" if len(norms.q) == head_dim else "projection"
    return {
        "NORM": norm,
        "ROTATED": rotation is not None,
        "HALF": 0 if rotation is None else rotation.cos.shape[1],
        "INTERLEAVED": rotation is not None and rotation.interleaved,
        "NUM_Q_HEADS": num_q_heads,
        "HEAD_DIM": head_dim,
        "BLOCK": triton.next_power_of_2(head_dim // 2),
    }
