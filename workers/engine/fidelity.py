"""Compares what a row attends to in one layer with exact attention: in evaluations, and while a service answers."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from csattn.selection import Selection
from csattn.selectors import ContextView
from workers.serving.step_engine import Fidelity


@dataclass(frozen=True, slots=True)
class Seen:
    """One row of a step in one layer."""

    layer_idx: int  # among those that have an index
    view: ContextView
    q: Tensor  # [num_q_heads, head_dim] float32
    tail: Tensor  # [num_kv_heads, tail_len, 2, head_dim]: the rows of it that the row sees
    num_outside_window: int  # the first rows of the tail: they have left its window, and are attended to only if chosen
    chosen: Selection | slice  # besides the resident rows
    out: Tensor | None = None  # [num_q_heads, head_dim] float32: attention's output
    sinks: Tensor | None = None  # [num_q_heads] float32: sink logits


Observer = Callable[[Seen], None]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Exact attention and what was read. Sizes are [num_kv_heads, group_size, kv_len] unless stated otherwise."""

    weights: Tensor  # exact attention's, float32
    fetched: Tensor  # bool: rows besides the resident ones
    attended: Tensor  # bool: all that were read
    recall: Tensor  # [num_kv_heads]: share of the exact Top-K rows that were read
    lse: Tensor  # [num_kv_heads, group_size]: log-sum-exp of the logits, without sinks

    @property
    def mass(self) -> Tensor:
        """[num_kv_heads]: share of exact attention's weights on rows that were read."""
        return (self.weights * self.attended).sum(-1).mean(1)


def compare(seen: Seen, context: Tensor) -> Comparison:
    """Compare with exact attention; reads all keys. context: that layer's [num_kv_heads, context_len, 2, head_dim]."""
    view, context_len = seen.view, context.shape[1]
    grouped = seen.q.view(context.shape[0], -1, seen.q.shape[-1])
    # in two parts, because concatenating context and tail would cost more
    parts = [grouped @ rows[:, :, 0].float().transpose(1, 2) for rows in (context, seen.tail)]
    logits = torch.cat(parts, dim=2) * view.softmax_scale
    if view.logit_cap is not None:
        logits = view.logit_cap * (logits / view.logit_cap).tanh()
    resident = torch.ones(logits.shape[2], dtype=torch.bool, device=logits.device)
    resident[view.middle] = resident[context_len : context_len + seen.num_outside_window] = False
    fetched = _fetched(seen.chosen, logits)
    attended = fetched | resident
    indexed = context_len + seen.num_outside_window  # rows whose keys a selector has
    group_score = logits[..., :indexed].softmax(-1).sum(1).masked_fill(resident[:indexed], -1)  # summed over a group
    best = group_score.topk(min(view.top_k, int((~resident).sum())), dim=1).indices
    found = attended.gather(2, best[:, None].expand(-1, logits.shape[1], -1)).float()
    recall = found.mean((1, 2)) if best.shape[1] else found.new_ones(len(found))
    return Comparison(logits.softmax(-1), fetched, attended, recall, logits.logsumexp(-1))


def fidelity(seen: Seen, context: Tensor) -> Fidelity:
    """Return the means over heads of `compare`, which takes the same arguments."""
    compared = compare(seen, context)
    return Fidelity(recall=float(compared.recall.mean()), mass=float(compared.mass.mean()))


def _fetched(chosen: Selection | slice, like: Tensor) -> Tensor:
    """Return which rows were fetched for each query head: bool, in the shape of the logits `like`."""
    mask = torch.zeros_like(like, dtype=torch.bool)
    if isinstance(chosen, slice):
        mask[:, :, chosen] = True
        return mask
    by_index_head = mask.view(len(chosen.valid_len), -1, like.shape[2])
    for head, valid in enumerate(chosen.valid_len):
        by_index_head[head][:, torch.from_numpy(chosen.kv_indices[head, :valid]).long().to(like.device)] = True
    return mask
