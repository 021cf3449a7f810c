"""Full attention: the definition that sparse attention is compared with."""

from collections.abc import Sequence

import torch
from torch import Tensor

from csattn.batch import StepRows
from csattn.models.latent import attend_latents, choose_rows
from csattn.models.latent_spec import LatentSpec
from csattn.models.query import Queries
from csattn.models.spec import AttentionSpec
from csattn.reach import Reach
from workers.model.ops import RecurrentState


class FullAttention:
    """`StepAttention` over contexts that lie contiguous on the device, in float32 whatever the model's dtype.

    Every row is scored against every context; contexts other than its own are masked. This object owns the tails.
    """

    lookahead = False
    in_graph = True

    def __init__(
        self,
        contexts: Sequence[Tensor],  # per layer: [num_contexts, num_kv_heads, max_context_len, 2, head_dim]
        context_lens: Sequence[int],  # valid rows of each context
        num_tails: int,
        tail_capacity: int,
        softmax_scale: float,
        kinds: Sequence[AttentionSpec] | None = None,  # one for each layer; default: plain attention
        sinks: Sequence[Tensor | None] | None = None,  # per layer: [num_q_heads] sink logits, or None
    ) -> None:
        self.states: list[RecurrentState | None] = [None] * len(contexts)
        self.latents: list[LatentSpec | None] = [None] * len(contexts)
        self._chosen: dict[int, Tensor] = {}  # by row of the step: the choice of the last layer that has an indexer
        self._kinds, self._sinks = kinds or len(contexts) * [AttentionSpec()], sinks or len(contexts) * [None]
        self._contexts, self._softmax_scale = list(contexts), softmax_scale
        device, max_context_len = contexts[0].device, contexts[0].shape[2]
        self.tails = [kv.new_zeros(num_tails, kv.shape[1], tail_capacity, *kv.shape[3:]) for kv in contexts]
        lens = torch.tensor(list(context_lens), device=device)
        self._in_context = torch.arange(max_context_len, device=device) < lens[:, None]  # [num_contexts, ...]
        self._context_ids = torch.arange(len(lens), device=device)
        self._tail_slots = torch.arange(tail_capacity, device=device)

    def begin_step(self, rows: StepRows) -> None:
        pass

    def look_ahead(self, layer_idx: int, q: Tensor, rows: StepRows) -> None:
        raise AssertionError("full attention does not look ahead")

    def attend(self, layer_idx: int, q: Tensor, rows: StepRows, out: Tensor) -> None:
        if self.states[layer_idx] is not None:
            return
        batch_size, _, head_dim = q.shape
        context, tail = self._contexts[layer_idx].float(), self.tails[layer_idx][rows.tail_ids.long()].float()
        num_contexts, num_kv_heads, max_context_len = context.shape[:3]
        grouped = q.float().view(batch_size, num_kv_heads, -1, head_dim)
        kind, sinks = self._kinds[layer_idx], self._sinks[layer_idx]
        first = _first_seen(kind.reach, rows.positions)
        of_context = torch.arange(max_context_len, device=q.device) >= first[:, None]
        own = rows.context_ids[:, None] == self._context_ids  # [batch_size, num_contexts]
        seen_context = (own[:, :, None] & self._in_context & of_context[:, None]).view(batch_size, 1, 1, -1)
        before_tail = rows.positions + 1 - rows.tail_lens
        in_tail = (self._tail_slots < rows.tail_lens[:, None]) & (self._tail_slots >= (first - before_tail)[:, None])
        seen_tail = in_tail.view(batch_size, 1, 1, -1)
        by_context = torch.einsum("bhgd,chnd->bhgcn", grouped, context[..., 0, :])
        by_tail = torch.einsum("bhgd,bhnd->bhgn", grouped, tail[..., 0, :])
        scores = torch.cat([by_context.flatten(-2), by_tail], dim=-1) * self._softmax_scale
        if kind.logit_cap is not None:
            scores = kind.logit_cap * (scores / kind.logit_cap).tanh()
        seen = torch.cat([seen_context, seen_tail], dim=-1)
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            sink_logits = sinks.float().view(1, num_kv_heads, -1, 1).expand(batch_size, -1, -1, -1)
            scores = torch.cat([scores, sink_logits], dim=-1)
        weights = scores.softmax(-1).nan_to_num(0.0)[..., : seen.shape[-1]]  # idle rows: NaN without sinks
        num_scores = num_contexts * max_context_len
        on_context = weights[..., :num_scores].reshape(*grouped.shape[:3], num_contexts, max_context_len)
        on_tail = weights[..., num_scores:]
        tail_v = tail[..., 1, :].masked_fill(~seen_tail.view(batch_size, 1, -1, 1), 0.0)  # unwritten rows may be NaN
        attended = torch.einsum("bhgcn,chnd->bhgd", on_context, context[..., 1, :])
        attended = attended + torch.einsum("bhgn,bhnd->bhgd", on_tail, tail_v)
        out.copy_(attended.reshape(out.shape))

    def attend_latents(self, layer_idx: int, queries: Queries, rows: StepRows, out: Tensor) -> None:
        spec = self.latents[layer_idx]
        assert spec is not None
        for row in (rows.tail_lens > 0).nonzero()[:, 0].tolist():
            context_id, num_own = int(rows.context_ids[row]), int(rows.tail_lens[row])
            context = self._contexts[layer_idx][context_id, 0, self._in_context[context_id]]
            own = self.tails[layer_idx][int(rows.tail_ids[row]), 0, :num_own]
            seen, one = torch.cat([context, own]).flatten(1).float(), slice(row, row + 1)
            if spec.indexer is not None:
                parts = (
                    None if part is None else part[one] for part in (queries.q, queries.index_q, queries.index_weights)
                )
                lens = torch.tensor([len(seen)], dtype=torch.int32, device=seen.device)
                self._chosen[row] = choose_rows(Queries(*parts), seen, lens, spec)
            chosen = None if spec.top_k is None else self._chosen[row]
            out[one] = attend_latents(queries.q[one], seen, chosen, spec, self._softmax_scale)

    def end_step(self, rows: StepRows) -> None:
        pass


def _first_seen(reach: Reach | None, positions: Tensor) -> Tensor:
    """`Reach.first_seen` of all positions, without reading them on the host: CUDA graphs capture it."""
    if reach is None:
        return torch.zeros_like(positions)
    return positions - positions % reach.num_rows if reach.chunked else (positions + 1 - reach.num_rows).clamp(min=0)
