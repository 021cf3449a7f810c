"""A layer of a random context, and a request over it, for the tests of selectors."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from csattn.config import SearchConfig
from csattn.selection import Selection
from csattn.selectors import ContextLayer, ContextView, Selector

NUM_KV_HEADS, HEAD_DIM, SCALE = 2, 16, 0.25


def make_layer(
    context_len: int, group_size: int = 3, seed: int = 0, dtype: torch.dtype = torch.float32
) -> ContextLayer:
    """Return a layer whose keys share a large mean, as a model's do. Its attention received is random."""
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(NUM_KV_HEADS, context_len, 2, HEAD_DIM, generator=generator)
    kv[:, :, 0] += 2 * torch.randn(NUM_KV_HEADS, 1, HEAD_DIM, generator=generator)
    received = torch.rand(NUM_KV_HEADS * group_size, context_len, generator=generator)
    keys, values = kv.to(dtype).unbind(2)
    return ContextLayer(keys, values, NUM_KV_HEADS * group_size, lambda: received)


def make_view(context_len: int, keep: float = 0.2, sink_len: int = 3, window_len: int = 8) -> ContextView:
    return ContextView(context_len, SCALE, SearchConfig(keep=keep, sink_len=sink_len, window_len=window_len))


def resident_rows(view: ContextView) -> list[int]:
    return [*range(view.middle.start), *range(view.middle.stop, view.context_len)]


@dataclass(frozen=True)
class Step:
    """The decode step of one token of a request."""

    q: np.ndarray  # [num_q_heads, head_dim]
    num_left: int  # rows of the tail that have left its window
    recent: Tensor  # [num_kv_heads, num_recent, 2, head_dim]
    chosen: Selection


@dataclass(frozen=True)
class Tail:
    """The KV rows and queries of a request's own tokens."""

    kv: Tensor  # [num_kv_heads, num_tokens, 2, head_dim]
    q: Tensor  # [num_tokens, num_q_heads, head_dim]

    def __len__(self) -> int:
        return self.kv.shape[1]


def make_tail(num_tokens: int, group_size: int = 3, seed: int = 1) -> Tail:
    generator = torch.Generator().manual_seed(seed)
    return Tail(
        torch.randn(NUM_KV_HEADS, num_tokens, 2, HEAD_DIM, generator=generator),
        2 * torch.randn(num_tokens, NUM_KV_HEADS * group_size, HEAD_DIM, generator=generator),
    )


def decode(selector: Selector, view: ContextView, tail: Tail) -> Iterator[Step]:
    """Select rows for each token in turn, as decode steps do."""
    num_left = 0
    for token in range(len(tail)):
        while num_left <= token - view.config.window_len:
            selector.append(tail.kv[:, num_left, 0].numpy(), tail.kv[:, num_left, 1].numpy())
            num_left += 1
        recent, q = tail.kv[:, num_left : token + 1], tail.q[token].numpy()
        yield Step(q, num_left, recent, selector.select(q, recent))
