"""Steps that attend to all rows of their contexts where that is faster than to select some of them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from csattn.attention.every_row import MAX_GROUP, MAX_HEAD_DIM, supports_heads
from csattn.batch import StepRows
from csattn.config import SearchConfig
from csattn.errors import ConfigError
from csattn.models.spec import ModelSpec
from offload.codecs.formats import KvFormat
from workers.engine.gpu.shape import EngineShape
from workers.engine.model_choice import cached_row_kind, model_selects_rows
from workers.model.attention import StepAttention

# Measured on an H100 over `default`, 2 %, four query heads to a KV head (bench/log.md, "Many requests on one context"):
# the time of a layer's selection, as the bytes of a context's rows that are read in that time. Lists take about as
# long. With more query heads per KV head, reading all rows takes longer, because it takes several passes.
SELECTION_BYTES = 54 << 20
SELECTION_BYTES_PER_ROW = 6 << 20  # for each row of the step
HEADS_LIKE_FULL = 38  # selecting for so many query heads of a KV head takes as long as reading all rows once


class SparseOrFull(StepAttention):
    """Both kinds of steps, over the same tails. `rows.reads_all` says which kind is captured."""

    def __init__(self, some: StepAttention, every: StepAttention) -> None:
        assert some.in_graph and not some.lookahead
        self._some, self._every = some, every
        self.tails = some.tails

    def begin_step(self, rows: StepRows) -> None:
        self._of(rows).begin_step(rows)

    def attend(self, layer_idx: int, q: Tensor, rows: StepRows, out: Tensor) -> None:
        self._of(rows).attend(layer_idx, q, rows, out)

    def end_step(self, rows: StepRows) -> None:
        self._of(rows).end_step(rows)

    def _of(self, rows: StepRows) -> StepAttention:
        return self._every if rows.reads_all else self._some


def full_attention_shape(shape: EngineShape) -> EngineShape:
    """Return the shape of the steps that attend to all rows, beside those of `shape`."""
    heads = shape.num_kv_heads
    return replace(shape, attends_all=True, rest="none", growth=None, reads_keys=False, num_index_heads=heads)


def all_are_faster(shape: EngineShape, contexts: Sequence[tuple[int, int]], own_lens: Sequence[int]) -> bool:
    """Whether a step is faster if it reads all rows of its contexts, each context once for all rows that continue it.

    contexts: (context id, length) for each row of the step that has a context. own_lens: for each row, the rows in its
    own segments, which are not shared. The result depends on the step alone, so it is the same on every device.
    """
    if shape.search.keep >= 1:
        return True
    row_bytes, group_size = shape.num_kv_heads * shape.context_row_bytes, shape.num_q_heads // shape.num_kv_heads
    more = float(sum(own_lens) * row_bytes)
    for (_, context_len), number in Counter(contexts).items():
        more += context_len * row_bytes * (1 - number * group_size / HEADS_LIKE_FULL) - number * SELECTION_BYTES_PER_ROW
    return more < SELECTION_BYTES


def require_both(placement: str, selector: str, search: SearchConfig, kv_format: KvFormat | None) -> None:
    """Raise ConfigError for settings with which steps cannot be of both kinds, whatever the model."""
    if placement != "device" or selector != "csattn":
        raise ConfigError(
            "all_where_faster works only in placement device, where the GPU has all rows, and with selector csattn, "
            f"not with placement {placement} and selector {selector}; leave it out"
        )
    if search.lookahead or search.search_period > 1:
        raise ConfigError(
            f"all_where_faster decides at each step, but lookahead is {search.lookahead} and search_period "
            f"{search.search_period}; leave out all_where_faster, or the other two"
        )
    if kv_format is not None:
        raise ConfigError("all_where_faster reads rows as they were built; leave it out, or leave the KV codec out")


def require_model(spec: ModelSpec, dtype: torch.dtype) -> None:
    """Raise ConfigError for models whose heads the kernel that reads all rows does not support."""
    heads, has_heads = (spec.num_q_heads, spec.num_kv_heads, spec.head_dim), not model_selects_rows(spec)
    if not has_heads or not supports_heads(*heads, dtype):
        kind = f"{heads[0]} over {heads[1]} heads of {heads[2]} in {dtype}" if has_heads else cached_row_kind(spec)
        raise ConfigError(
            f"all_where_faster reads a context once for all requests, in 16 bits, with heads of up to {MAX_HEAD_DIM} "
            f"dimensions and {MAX_GROUP} query heads per KV head, and this model has {kind}; leave it out"
        )
