"""`StepOps` as Triton kernels: launches, and the block sizes that measured best."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from csattn.batch import StepRows
from workers.model_runner.head_kernels import embed_kernel, predict_query_kernel, rotate_append_kernel
from workers.model_runner.linear_kernels import linear_add_kernel, normed_linear_kernel
from workers.model_runner.ops import SQUARES_BLOCK, HeadNorms, Rotation, Stream

MAX_BATCH_SIZE = 64
_BLOCK_N = SQUARES_BLOCK  # rows of the weights that a program owns: a tile of `linear_add` is a part of the squares
# Programs among which one product is split: two fit on each multiprocessor of an H200. A constant, not a property of
# the device at hand: it decides the order of sums.
_MAX_SPLIT_PROGRAMS = 264


class TritonOps:
    """Owns the scratch memory of split sums, so its operations must follow each other on one stream.

    Each kernel starts while the one before it ends, if that one is ours too: it waits on the device before it reads
    what that one writes, and lets the next one start only after it has waited itself.

    A row's results do not depend on the rows beside it, nor, up to 16 of them, on their number: sums are taken in the
    same order. In larger steps the last bits may differ.
    """

    def __init__(self, device: torch.device) -> None:
        sums = _MAX_SPLIT_PROGRAMS * _BLOCK_N * MAX_BATCH_SIZE
        self._partials = torch.empty(sums, dtype=torch.float32, device=device)
        self._counters = torch.zeros(_MAX_SPLIT_PROGRAMS, dtype=torch.int32, device=device)
        self._on_gpu = device.type == "cuda"  # else Triton's interpreter runs the kernels
        self._chained = False

    def break_chain(self) -> None:
        self._chained = False

    def embed(
        self, token_ids: Tensor, embedding: Tensor, stream: Stream, norm: Tensor, norm_ahead: Tensor | None
    ) -> None:
        batch_size, hidden_size = stream.hidden.shape
        embed_kernel[(batch_size,)](
            token_ids,
            embedding,
            stream.hidden,
            norm,
            stream.scaled,
            norm if norm_ahead is None else norm_ahead,
            stream.scaled_ahead,
            stream.squares,
            stream.squares.shape[0],
            hidden_size,
            AHEAD=norm_ahead is not None,
            BLOCK=max(SQUARES_BLOCK, triton.next_power_of_2(hidden_size)),
            SQUARES_BLOCK=SQUARES_BLOCK,
            num_warps=8,
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
        tiles = _Tiles.of(weight)
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
        tiles = _Tiles.of(weight)
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


@dataclass(frozen=True, slots=True)
class _Tiles:
    """How a weight matrix is dealt out to programs: by its shape and element size alone."""

    num_tiles: int
    split_k: int  # programs that share a tile's columns
    block_k: int
    even_k: bool
    exact: bool  # float32

    @classmethod
    def of(cls, weight: Tensor) -> "_Tiles":
        num_rows, num_k = weight.shape
        block_k = 256 // weight.element_size()
        num_tiles = -(-num_rows // _BLOCK_N)
        split_k = 1
        while num_tiles * split_k * 2 <= _MAX_SPLIT_PROGRAMS and split_k * 2 * block_k <= num_k and split_k < 8:
            split_k *= 2
        even_k = num_k % (block_k * split_k) == 0
        return cls(num_tiles, split_k, block_k, even_k, weight.dtype == torch.float32)

    def constants(self, batch_size: int) -> dict[str, Any]:
        assert batch_size <= MAX_BATCH_SIZE, f"{batch_size} rows, at most {MAX_BATCH_SIZE} fit a program"
        return {
            "BLOCK_M": max(16, triton.next_power_of_2(batch_size)),
            "BLOCK_N": _BLOCK_N,
            "BLOCK_K": self.block_k,
            "SPLIT_K": self.split_k,
            "EVEN_K": self.even_k,
            "DOT_PRECISION": "ieee" if self.exact else "tf32",
            "num_warps": 4,
            "num_stages": 4,
        }
