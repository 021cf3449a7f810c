"""Layers, queries and rooms for tests of the rivals."""

import numpy as np
import torch

from csattn.config import SearchConfig
from csattn.selectors import ContextLayer, ContextView
from csattn.selectors.pqcache import PreparedPqcache

NUM_KV_HEADS, HEAD_DIM = 2, 64
SCALE = HEAD_DIM**-0.5
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # of Triton's kernels, or its interpreter


def make_layer(context_len: int, group_size: int, seed: int = 0) -> ContextLayer:
    """Keys with a mean of their own, in bfloat16 as in host memory."""
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(NUM_KV_HEADS, context_len, 2, HEAD_DIM, generator=generator)
    kv[:, :, 0] += torch.randn(NUM_KV_HEADS, 1, HEAD_DIM, generator=generator)
    keys, values = kv.bfloat16().unbind(2)
    return ContextLayer(keys, values, NUM_KV_HEADS * group_size, lambda: torch.zeros(0))


def make_view(context_len: int, keep: float) -> ContextView:
    return ContextView(context_len, SCALE, SearchConfig(keep=keep, sink_len=4, window_len=16))


def make_queries(group_size: int) -> torch.Tensor:
    return torch.randn(NUM_KV_HEADS * group_size, HEAD_DIM, generator=torch.Generator().manual_seed(5)) * 3


def give_room(told, top_k: int) -> None:
    told["kv_indices"] = np.full((NUM_KV_HEADS, top_k), -7, np.int32)
    told["valid_len"] = np.zeros(NUM_KV_HEADS, np.int32)


def bits_of(x: torch.Tensor) -> np.ndarray:
    return x.contiguous().view(torch.int16).numpy().view(np.uint16)


def assert_best_by_codes(prepared: PreparedPqcache, view: ContextView, q: torch.Tensor, kv_indices, valid_len) -> None:
    """As many rows as the selector takes, and no other is worth more, rounding aside; ascending, -1 padded."""
    chosen = prepared.selector(view).select(q.numpy(), torch.empty(NUM_KV_HEADS, 0, 2, HEAD_DIM))
    np.testing.assert_array_equal(valid_len, chosen.valid_len)
    centroids = prepared.centroids.double()
    told = [centroids[:, b][torch.arange(NUM_KV_HEADS)[:, None], prepared.codes[:, :, b].long()] for b in range(2)]
    grouped = q.double().view(NUM_KV_HEADS, -1, HEAD_DIM)
    worth = (grouped @ torch.cat(told, dim=2).mT * SCALE).softmax(-1).sum(1).numpy()
    for head, num_chosen in enumerate(valid_len):
        rows = kv_indices[head, :num_chosen]
        assert (np.diff(rows) > 0).all() and (kv_indices[head, num_chosen:] == -1).all()
        others = np.setdiff1d(np.arange(view.middle.start, view.middle.stop), rows)
        assert len(others) == view.middle.stop - view.middle.start - num_chosen
        assert worth[head, rows].min() >= worth[head, others].max(initial=0) * (1 - 1e-4)
