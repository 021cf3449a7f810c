"""Attention of whole steps to rows of latents on the device: to those that the model itself chooses, or to all."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from csattn.batch import StepRows
from csattn.lightning import KeyPages, score_pages, sparse_mla, top_k
from csattn.models.latent import LatentQueries
from csattn.models.spec import ModelSpec
from workers.engine.shape import EngineShape


class AttendLatents:
    """`StepAttention` that chooses as `csattn.models.latent.choose_rows` does, whose steps are one graph.

    A layer without an indexer attends to what the last one that has one has chosen.
    """

    lookahead, in_graph = False, True

    def __init__(self, shape: EngineShape, spec: ModelSpec, far: "LatentPlaces", device: torch.device) -> None:
        self.shape, self.far, self.tails = shape, far, far.tails
        self._latents = [layer.latent for layer in spec.layers]
        sizes = {latent.top_k for latent in self._latents if latent is not None}
        (self._top_k,) = sizes  # one choice serves several layers
        self._seen = {size: _Seen.of(shape, size, self._top_k or 0, device) for size in shape.batch_sizes}

    def __repr__(self) -> str:
        return f"<AttendLatents {self.far!r}>"

    def begin_step(self, rows: StepRows) -> None:
        """Nothing is done on the host."""

    def look_ahead(self, layer_idx: int, q: Tensor, rows: StepRows) -> None:
        raise AssertionError("nothing is searched for ahead")

    def attend(self, layer_idx: int, q: Tensor, rows: StepRows, out: Tensor) -> None:
        raise AssertionError("all layers keep latents")

    def attend_latents(self, layer_idx: int, asked: LatentQueries, rows: StepRows, out: Tensor) -> None:
        spec, seen, kept = self._latents[layer_idx], self._seen[rows.batch_size], self.far.rows[layer_idx]
        assert spec is not None
        if layer_idx == 0:
            self.far.find(rows, seen.places, seen.lens)
        if spec.indexer is not None:
            self._choose(asked, kept[:, None, spec.key_width : spec.row_width], seen)
        places = seen.places if self._top_k is None else seen.chosen
        parts = asked.q[..., : spec.kv_rank].contiguous(), asked.q[..., spec.kv_rank :].contiguous()
        latents, turned = kept[:, : spec.kv_rank], kept[:, spec.kv_rank : spec.key_width]
        sparse_mla(*parts, latents, turned, places, self.shape.softmax_scale, out=out)

    def end_step(self, rows: StepRows) -> None:
        """Nothing is left to do."""

    def _choose(self, asked: LatentQueries, keys: Tensor, seen: "_Seen") -> None:
        """keys: [num_places, 1, index_head_dim]: every row is a page, wherever it lies."""
        assert asked.index_q is not None and asked.index_weights is not None and self._top_k is not None
        pages = KeyPages(keys, seen.scale.expand(len(keys), 1))
        told = asked.index_q, asked.index_weights, pages, seen.places, seen.lens
        scores = score_pages(*told, longer_than=self._top_k, out=seen.scores)
        top_k(scores, self._top_k, seen.lens, order="position", pages=seen.places, out=seen.chosen)


class LatentPlaces:
    """Owns the rows of all contexts and of all requests, side by side: a number says where one lies, in every layer."""

    def __init__(self, shape: EngineShape, device: torch.device) -> None:
        self._shape, of_contexts = shape, shape.num_contexts * shape.max_context_len
        num_rows = of_contexts + shape.num_tails * shape.tail_capacity
        num_layers, row = shape.num_layers, (2, shape.head_dim)
        self.rows = torch.zeros(num_layers, num_rows, prod(row), dtype=shape.dtype, device=device)
        contexts, own = self.rows[:, :of_contexts], self.rows[:, of_contexts:]
        self._contexts = contexts.view(num_layers, shape.num_contexts, shape.max_context_len, prod(row))
        self.tails = own.view(num_layers, shape.num_tails, 1, shape.tail_capacity, *row)  # as `StepAttention` says
        self._first_own = of_contexts
        self._lens = torch.zeros(shape.num_contexts + 1, dtype=torch.int32, device=device)  # the last: of no context
        self._numbers = torch.arange(_num_seen(shape), dtype=torch.int32, device=device)

    def __repr__(self) -> str:
        return f"<LatentPlaces of {self._shape.num_contexts} contexts>"

    def load(self, context_id: int, layers: Sequence[Tensor]) -> None:
        """Copy a context's rows, [1, context_len, 2, head_dim] of each layer. No step may be in flight."""
        context_len = self._shape.require_context(layers)
        for place, rows in zip(self._contexts[:, context_id], layers, strict=True):
            place[:context_len].copy_(rows.view(context_len, -1))
        self._lens[context_id] = context_len

    def unload(self, context_id: int) -> None:
        """Forget a context. No step may be in flight."""
        self._lens[context_id] = 0

    def find(
        self,
        rows: StepRows,
        places: Tensor,  # [batch_size, num_seen] int32, written: where the rows lie that each sees, -1 behind them
        lens: Tensor,  # [batch_size] int32, written: how many these are
    ) -> None:
        """A row's context comes first, then its tail; an idle row sees none."""
        context_lens = self._lens[rows.context_ids.long()]  # -1: the last
        torch.add(context_lens, rows.tail_lens, out=lens)
        first = (rows.context_ids * self._shape.max_context_len)[:, None]
        first_own = (self._first_own + rows.tail_ids * self._shape.tail_capacity - context_lens)[:, None]
        at = self._numbers + torch.where(self._numbers < context_lens[:, None], first, first_own)
        places.copy_(at.masked_fill_(self._numbers >= lens[:, None], -1))


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the rows of a step see, for one batch size."""

    places: Tensor  # [batch_size, num_seen] int32: see `LatentPlaces.find`
    lens: Tensor  # [batch_size] int32
    scores: Tensor  # [batch_size, num_seen] float32
    chosen: Tensor  # [batch_size, top_k] int32: places, -1 padded
    scale: Tensor  # [1, 1] float32: of every index key

    @classmethod
    def of(cls, shape: EngineShape, batch_size: int, num_chosen: int, device: torch.device) -> "_Seen":
        num_seen = _num_seen(shape)
        return cls(
            torch.full((batch_size, num_seen), -1, dtype=torch.int32, device=device),
            torch.zeros(batch_size, dtype=torch.int32, device=device),
            torch.zeros(batch_size, num_seen if num_chosen else 0, device=device),
            torch.full((batch_size, num_chosen), -1, dtype=torch.int32, device=device),
            torch.ones(1, 1, device=device),
        )


def latents_bytes(shape: EngineShape) -> int:
    """Of all contexts' rows: they have their places from the start."""
    return shape.num_contexts * shape.kv_bytes(shape.max_context_len)


def latents_working_bytes(shape: EngineShape) -> int:
    """Of what steps see of them, with scores, and while places are found: numbers of 4 bytes."""
    return 4 * _num_seen(shape) * (2 * sum(shape.batch_sizes) + 3 * max(shape.batch_sizes))


def _num_seen(shape: EngineShape) -> int:
    """Rows that a row may see."""
    return shape.max_context_len + shape.tail_capacity
