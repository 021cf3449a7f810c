"""`StepOps` as Triton kernels: their launches."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from csattn.batch import StepRows
from csattn.models.spec import Activation
from csattn.models.weights import HeadNorms, Linear
from workers.model.gpu.head_kernels import predict_query_kernel, rotate_append_kernel
from workers.model.gpu.linear_kernels import linear_add_kernel, linear_kernel
from workers.model.gpu.tiles import BLOCK_N, MAX_BATCH_SIZE, MAX_SPLIT_PROGRAMS, Tiles
from workers.model.gpu.token_kernels import (
    add_normed_kernel,
    advance_kernel,
    begin_kernel,
    finish_logits_kernel,
    likeliest_kernel,
    likeliest_of_part_kernel,
)
from workers.model.ops import SQUARES_BLOCK, Normed, Readers, Rotation, Stream

_LOGITS_BLOCK = 4096  # that a program looks through


class TritonOps:
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
        inverse_frequencies: Tensor,
        rope_scale: float,
        rotation: Rotation,
    ) -> None:
        batch_size, hidden_size = stream.hidden.shape
        begin_kernel[(batch_size,)](
            rows.token_ids,
            rows.positions,
            embedding,
            *_written(stream, readers),
            inverse_frequencies,
            rotation.cos,
            rotation.sin,
            stream.squares.shape[0],
            hidden_size,
            len(inverse_frequencies),
            multiplier,
            rope_scale,
            **_row_constants(stream, readers),
            HALF_BLOCK=triton.next_power_of_2(len(inverse_frequencies)),
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
            rows.context_ids,
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
        weight, squares = linear.weight, x.squares
        tiles = Tiles.of(weight)
        num_squares = 1 if squares is None else len(squares)
        linear_kernel[(tiles.num_tiles, tiles.split_k)](
            x.x,
            x.x if squares is None else squares,
            weight,
            weight if linear.bias is None else linear.bias,
            out,
            self._partials,
            self._counters,
            len(x.x),
            out.shape[1],
            weight.shape[1],
            num_squares,
            x.eps,
            NORMED=squares is not None,
            GATED=gated,
            ACTIVATION=activation,
            HAS_BIAS=linear.bias is not None,
            BLOCK_SQUARES=triton.next_power_of_2(num_squares),
            **tiles.constants(len(x.x)),
            **self._launch(),
        )

    def linear_add(self, x: Tensor, linear: Linear, multiplier: float, stream: Stream, readers: Readers) -> None:
        weight = linear.weight
        tiles = Tiles.of(weight)
        linear_add_kernel[(tiles.num_tiles, tiles.split_k)](
            x,
            weight,
            weight if linear.bias is None else linear.bias,
            *_written(stream, readers),
            self._partials,
            self._counters,
            len(x),
            weight.shape[0],
            weight.shape[1],
            multiplier,
            HAS_BIAS=linear.bias is not None,
            HAS_NORM=readers.norm is not None,
            AHEAD=readers.ahead is not None,
            **tiles.constants(len(x)),
            **self._launch(),
        )

    def add_normed(
        self, x: Tensor, norm: Tensor, eps: float, multiplier: float, stream: Stream, readers: Readers
    ) -> None:
        batch_size, hidden_size = x.shape
        add_normed_kernel[(batch_size,)](
            x,
            norm,
            *_written(stream, readers),
            stream.squares.shape[0],
            hidden_size,
            eps,
            multiplier,
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
            rows.context_ids,
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
            rows.context_ids,
            q,
            maps.stride(0),
            eps,
            **_head_constants(norms, rotation, q),
            num_warps=8,
            **self._launch(),
        )

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


def _row_constants(stream: Stream, readers: Readers) -> dict[str, Any]:
    """Of kernels whose programs own a row of the stream each."""
    return {
        "HAS_NORM": readers.norm is not None,
        "AHEAD": readers.ahead is not None,
        "BLOCK": max(SQUARES_BLOCK, triton.next_power_of_2(stream.hidden.shape[1])),
        "SQUARES_BLOCK": SQUARES_BLOCK,
        "num_warps": 8,
    }


def _head_constants(norms: HeadNorms | None, rotation: Rotation | None, q: Tensor) -> dict[str, Any]:
    _, num_q_heads, head_dim = q.shape
    norm = "none" if norms is None else "head" if len(norms.q) == head_dim else "projection"
    return {
        "NORM": norm,
        "HALF": 0 if rotation is None else rotation.cos.shape[1],
        "INTERLEAVED": rotation is not None and rotation.interleaved,
        "NUM_Q_HEADS": num_q_heads,
        "HEAD_DIM": head_dim,
        "BLOCK": triton.next_power_of_2(head_dim // 2),
    }
