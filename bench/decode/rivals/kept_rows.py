"""Attention to rows that stay on the device: all that H2O has left, or the resident rows beside MagicPIG's samples."""

import torch
import triton
from torch import Tensor

from bench.decode.rivals.row_kernels import attend_parts, finish
from csattn.batch import StepRows

PART_ROWS, BLOCK = 256, 64  # rows of a program, and of one of its rounds
BOOK_BLOCK = 512
TENSOR_CORE_ROWS = 16  # the least that a product may have


class KeptRows:
    """A layer's rows of all contexts, and attention to them and to the tail. Layers share the workspace, in order."""

    def __init__(
        self,
        batch_size: int,
        num_q_heads: int,
        num_kept: int,
        tails: Tensor,  # [num_layers, num_tails, num_kv_heads, tail_capacity, 2, head_dim]
        softmax_scale: float,
        keeps_book: bool,  # whether what rows receive is counted
    ) -> None:
        num_kv_heads, tail_capacity, _, head_dim = tails.shape[2:]
        self._scale, self._keeps_book = softmax_scale, keeps_book
        self._group_size = num_q_heads // num_kv_heads
        self._kept_parts = -(-num_kept // PART_ROWS)
        self._num_parts = self._kept_parts + -(-tail_capacity // PART_ROWS)
        shape = batch_size, num_q_heads, self._num_parts, head_dim + 2
        self._parts = torch.zeros(shape, dtype=torch.float32, device=tails.device)
        room = num_kept if keeps_book else 1
        self._logits = torch.zeros(batch_size, num_q_heads, room, dtype=torch.float32, device=tails.device)

    def attend(self, q: Tensor, kept: Tensor, tail: Tensor, rows: StepRows) -> None:
        """Enqueue the first half.

        kept: [num_contexts, num_kv_heads, num_kept, 2, head_dim]; tail: one layer's tails.
        """
        num_kv_heads, num_kept, _, head_dim = kept.shape[1:]
        attend_parts[(self._num_parts, num_kv_heads, len(q))](
            q,
            kept,
            tail,
            rows.context_ids,
            rows.tail_ids,
            rows.tail_lens,
            self._parts,
            self._logits,
            self._scale,
            num_kept,
            tail.shape[2],
            self._num_parts,
            self._kept_parts,
            num_kv_heads,
            GROUP=self._group_size,
            PADDED_GROUP=max(TENSOR_CORE_ROWS, triton.next_power_of_2(self._group_size)),
            HEAD_DIM=head_dim,
            PART_ROWS=PART_ROWS,
            BLOCK=BLOCK,
            KEEP_LOGITS=self._keeps_book,
            num_warps=4,
        )

    def finish(self, kept: Tensor, received: Tensor | None, far: Tensor | None, rows: StepRows, out: Tensor) -> None:
        """Enqueue the second half.

        received: [num_contexts, num_kv_heads, num_kept] float32, with a book. far: [batch_size, num_q_heads,
        head_dim + 2] float32, one more part.
        """
        assert (received is not None) == self._keeps_book
        num_kv_heads, num_kept, _, head_dim = kept.shape[1:]
        blocks = -(-num_kept // BOOK_BLOCK) if self._keeps_book else 1
        finish[(max(blocks, self._group_size), num_kv_heads, len(out))](
            self._parts,
            self._parts if far is None else far,
            self._logits,
            self._logits if received is None else received,
            rows.context_ids,
            out,
            num_kept,
            self._num_parts,
            num_kv_heads,
            GROUP=self._group_size,
            HEAD_DIM=head_dim,
            PADDED_PARTS=triton.next_power_of_2(self._num_parts),
            BLOCK=BOOK_BLOCK,
            HAS_FAR=far is not None,
            KEEP_LOGITS=self._keeps_book,
            num_warps=4,
        )
