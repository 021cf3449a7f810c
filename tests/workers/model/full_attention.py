"""Attention to everything: the definition that sparse placements are compared with."""

from collections.abc import Sequence

import torch
from torch import Tensor

from csattn.batch import StepRows


class FullAttention:
    """`StepAttention` over contexts that lie contiguous on the device, in float32 whatever the model's dtype.

    Every row is scored against every context; what is not its own is masked. Tails are the attention's own.
    """

    lookahead = False
    in_graph = True

    def __init__(
        self,
        contexts: Sequence[Tensor],  # per layer: [num_contexts, num_kv_heads, max_context_len, 2, head_dim]
        context_lens: Sequence[int],  # rows of each context that count
        num_tails: int,
        tail_capacity: int,
        softmax_scale: float,
    ) -> None:
        self._contexts, self._softmax_scale = list(contexts), softmax_scale
        _, num_kv_heads, max_context_len, _, head_dim = contexts[0].shape
        device = contexts[0].device
        self.tails = torch.zeros(
            (len(contexts), num_tails, num_kv_heads, tail_capacity, 2, head_dim),
            dtype=contexts[0].dtype,
            device=device,
        )
        lens = torch.tensor(list(context_lens), device=device)
        self._in_context = torch.arange(max_context_len, device=device) < lens[:, None]  # [num_contexts, ...]
        self._context_ids = torch.arange(len(lens), device=device)
        self._tail_slots = torch.arange(tail_capacity, device=device)

    def begin_step(self, rows: StepRows) -> None:
        pass

    def look_ahead(self, layer_idx: int, q: Tensor, rows: StepRows) -> None:
        raise AssertionError("full attention does not look ahead")

    def attend(self, layer_idx: int, q: Tensor, rows: StepRows, out: Tensor) -> None:
        batch_size, _, head_dim = q.shape
        context, tail = self._contexts[layer_idx].float(), self.tails[layer_idx][rows.tail_ids.long()].float()
        num_contexts, num_kv_heads, max_context_len = context.shape[:3]
        grouped = q.float().view(batch_size, num_kv_heads, -1, head_dim)
        own = rows.context_ids[:, None] == self._context_ids  # [batch_size, num_contexts]
        seen_context = (own[:, :, None] & self._in_context).view(batch_size, 1, 1, -1)
        seen_tail = (self._tail_slots < rows.tail_lens[:, None]).view(batch_size, 1, 1, -1)
        by_context = torch.einsum("bhgd,chnd->bhgcn", grouped, context[..., 0, :])
        by_tail = torch.einsum("bhgd,bhnd->bhgn", grouped, tail[..., 0, :])
        scores = torch.cat(
            [
                by_context.flatten(-2).masked_fill(~seen_context, -torch.inf),
                by_tail.masked_fill(~seen_tail, -torch.inf),
            ],
            dim=-1,
        )
        weights = (scores * self._softmax_scale).softmax(-1).nan_to_num(0.0)  # idle rows see nothing
        num_scores = num_contexts * max_context_len
        on_context = weights[..., :num_scores].reshape(*grouped.shape[:3], num_contexts, max_context_len)
        on_tail = weights[..., num_scores:]
        tail_v = tail[..., 1, :].masked_fill(~seen_tail.view(batch_size, 1, -1, 1), 0.0)  # unwritten may be NaN
        attended = torch.einsum("bhgcn,chnd->bhgd", on_context, context[..., 1, :])
        attended = attended + torch.einsum("bhgn,bhnd->bhgd", on_tail, tail_v)
        out.copy_(attended.reshape(out.shape))

    def end_step(self, rows: StepRows) -> None:
        pass
