"""Steps that attend to all rows of their contexts where that takes less time than to choose from them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from csattn.attention.every_row import MAX_GROUP, MAX_HEAD_DIM, takes_heads
from csattn.batch import StepRows
from csattn.config import SearchConfig
from csattn.errors import ConfigError
from csattn.models.spec import ModelSpec
from offload.codecs.formats import KvFormat
from workers.engine.own_choice import chooses_itself, kept_instead
from workers.engine.shape import EngineShape
from workers.model.attention import StepAttention

# Measured on an H100 over `default`, 2 %, four query heads to a KV head (bench/log.md, "Many requests on one context"):
# what a layer's choice takes, in the bytes of a context's rows that are read in that time. Lists take about as long;
# where more heads share a KV head, reading all takes longer, in turns.
CHOOSING_BYTES = 54 << 20
CHOOSING_BYTES_EACH = 6 << 20  # for each row of the step
HEADS_LIKE_ALL = 38  # so many query heads of a KV head, each with a choice of its own, take as long as reading all once


class SomeOrAll(StepAttention):
    """Both kinds of steps, over the same tails: which it is, its rows say when it is captured."""

    def __init__(self, some: StepAttention, every: StepAttention) -> None:
        assert some.in_graph and not some.lookahead
        self._some, self._every = some, every
        self.tails = some.tails

    def __repr__(self) -> str:
        return f"<SomeOrAll {self._some!r}, {self._every!r}>"

    def begin_step(self, rows: StepRows) -> None:
        self._of(rows).begin_step(rows)

    def attend(self, layer_idx: int, q: Tensor, rows: StepRows, out: Tensor) -> None:
        self._of(rows).attend(layer_idx, q, rows, out)

    def end_step(self, rows: StepRows) -> None:
        self._of(rows).end_step(rows)

    def _of(self, rows: StepRows) -> StepAttention:
        return self._every if rows.reads_all else self._some


def of_all(shape: EngineShape) -> EngineShape:
    """Of the steps that attend to all rows, beside those of `shape`."""
    heads = shape.num_kv_heads
    return replace(shape, attends_all=True, rest="none", growth=None, reads_keys=False, num_index_heads=heads)


def all_are_faster(shape: EngineShape, contexts: Sequence[tuple[int, int]], own_lens: Sequence[int]) -> bool:
    """Whether a step takes less time when it reads all rows of its contexts, each once for all that continue it.

    contexts: of each row of the step its context, and how long that is; rows without one are left out.
    own_lens: rows of requests' own segments, which are not shared. The same for the same step, on every device.
    """
    if shape.search.keep >= 1:
        return True
    row_bytes, group_size = shape.num_kv_heads * shape.context_row_bytes, shape.num_q_heads // shape.num_kv_heads
    more = float(sum(own_lens) * row_bytes)
    for (_, context_len), number in Counter(contexts).items():
        more += context_len * row_bytes * (1 - number * group_size / HEADS_LIKE_ALL) - number * CHOOSING_BYTES_EACH
    return more < CHOOSING_BYTES


def require_both(placement: str, selector: str, search: SearchConfig, kv_format: KvFormat | None) -> None:
    """Raise ConfigError where steps cannot be of both kinds, whatever the model."""
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
    """Likewise, of models for which there is no kernel."""
    heads, has_heads = (spec.num_q_heads, spec.num_kv_heads, spec.head_dim), not chooses_itself(spec)
    if not has_heads or not takes_heads(*heads, dtype):
        kind = f"{heads[0]} over {heads[1]} heads of {heads[2]} in {dtype}" if has_heads else kept_instead(spec)
        raise ConfigError(
            f"all_where_faster reads a context once for all requests, in 16 bits, with heads of up to {MAX_HEAD_DIM} "
            f"dimensions and {MAX_GROUP} query heads per KV head, and this model has {kind}; leave it out"
        )
