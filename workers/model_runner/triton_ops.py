"""`StepOps` as Triton kernels: their launches."""

from typing import Any

import torch
import triton
from torch import Tensor

from csattn.batch import StepRows
from workers.model_runner.head_kernels import predict_query_kernel, rotate_append_kernel
from workers.model_runner.linear_kernels import linear_add_kernel, normed_linear_kernel
from workers.model_runner.ops import SQUARES_BLOCK, HeadNorms, Rotation, Stream
from workers.model_runner.tiles import BLOCK_N, MAX_BATCH_SIZE, MAX_SPLIT_PROGRAMS, Tiles
from workers.model_runner.token_kernels import (
    advance_kernel,
    begin_kernel,
    likeliest_kernel,
    likeliest_of_part_kernel,
)

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
        stream: Stream,
        norm: Tensor,
        norm_ahead: Tensor | None,
        inverse_frequencies: Tensor,
        rope_scale: float,
        rotation: Rotation,
    ) -> None:
        batch_size, hidden_size = stream.hidden.shape
        begin_kernel[(batch_size,)](
            rows.token_ids,
            rows.positions,
            embedding,
            stream.hidden,
            norm,
            stream.scaled,
            norm if norm_ahead is None else norm_ahead,
            stream.scaled_ahead,
            stream.squares,
            inverse_frequencies,
            rotation.cos,
            rotation.sin,
            stream.squares.shape[0],
            hidden_size,
            len(inverse_frequencies),
            rope_scale,
            AHEAD=norm_ahead is not None,
            BLOCK=max(SQUARES_BLOCK, triton.next_power_of_2(hidden_size)),
            SQUARES_BLOCK=SQUARES_BLOCK,
            HALF_BLOCK=triton.next_power_of_2(len(inverse_frequencies)),
            num_warps=8,
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

    def normed_linear(
        self, scaled: Tensor, squares: Tensor, eps: float, weight: Tensor, bias: Tensor | None, out: Tensor
    ) -> None:
        self._normed_linear(scaled, squares, eps, weight, bias, out, gated=False)

    def normed_gate_up(self, scaled: Tensor, squares: Tensor, eps: float, weight: Tensor, out: Tensor) -> None:
        self._normed_linear(scaled, squares, eps, weight, None, out, gated=True)

    def _normed_linear(
        self,
        scaled: Tensor,
        squares: Tensor,
        eps: float,
        weight: Tensor,
        bias: Tensor | None,
        out: Tensor,
        gated: bool,
    ) -> None:
        tiles = Tiles.of(weight)
        normed_linear_kernel[(tiles.num_tiles, tiles.split_k)](
            scaled,
            squares,
            weight,
            weight if bias is None else bias,
            out,
            self._partials,
            self._counters,
            len(scaled),
            out.shape[1],
            weight.shape[1],
            len(squares),
            eps,
            GATED=gated,
            HAS_BIAS=bias is not None,
            BLOCK_SQUARES=triton.next_power_of_2(len(squares)),
            **tiles.constants(len(scaled)),
            **self._launch(),
        )

    def linear_add(self, x: Tensor, weight: Tensor, stream: Stream, norm: Tensor, norm_ahead: Tensor | None) -> None:
        tiles = Tiles.of(weight)
        linear_add_kernel[(tiles.num_tiles, tiles.split_k)](
            x,
            weight,
            stream.hidden,
            norm,
            stream.scaled,
            norm if norm_ahead is None else norm_ahead,
            stream.scaled_ahead,
            stream.squares,
            self._partials,
            self._counters,
            len(x),
            weight.shape[0],
            weight.shape[1],
            AHEAD=norm_ahead is not None,
            **tiles.constants(len(x)),
            **self._launch(),
        )

    def rotate_append(
        self,
        qkv: Tensor,
        norms: HeadNorms | None,
        eps: float,
        rotation: Rotation,
        rows: StepRows,
        tail: Tensor,
        q: Tensor,
    ) -> None:
        batch_size, num_q_heads, head_dim = q.shape
        num_kv_heads, tail_capacity = tail.shape[1:3]
        rotate_append_kernel[(batch_size, num_q_heads + num_kv_heads)](
            qkv,
            qkv if norms is None else norms.q,
            qkv if norms is None else norms.k,
            rotation.cos,
            rotation.sin,
            rows.context_ids,
            rows.tail_ids,
            rows.tail_lens,
            tail,
            q,
            tail_capacity,
            eps,
            HAS_NORM=norms is not None,
            NUM_Q_HEADS=num_q_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            BLOCK=triton.next_power_of_2(head_dim // 2),
            num_warps=1,
            **self._launch(),
        )

    def predict_query(
        self,
        early: Tensor,
        q_norm: Tensor | None,
        eps: float,
        maps: Tensor,
        rotation: Rotation,
        rows: StepRows,
        q: Tensor,
    ) -> None:
        batch_size, num_q_heads, head_dim = q.shape
        predict_query_kernel[(batch_size, num_q_heads)](
            early,
            early if q_norm is None else q_norm,
            maps,
            rotation.cos,
            rotation.sin,
            rows.context_ids,
            q,
            maps.stride(0),
            eps,
            HAS_NORM=q_norm is not None,
            HEAD_DIM=head_dim,
            BLOCK=triton.next_power_of_2(head_dim // 2),
            num_warps=8,
            **self._launch(),
        )

    def _launch(self) -> dict[str, Any]:
        """How the next kernel starts; the one after it follows one of ours."""
        chained, self._chained = self._chained, True
        if not self._on_gpu:
            return {"PDL": False}
        return {"PDL": True, "launch_pdl": chained}
