"""Attention of whole steps with the search on the device: placements `device` and `hybrid`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from csattn.batch import DeviceSelection, StepRows
from csattn.search.device import (
    DeviceIndexes,
    DeviceSearch,
    ExactSearch,
    IndexShape,
    SketchPass,
    SketchShape,
)
from workers.engine.gpu.attend_chosen import AttendChosen, make_passes
from workers.engine.gpu.far_rows import FarRows
from workers.engine.gpu.shape import EngineShape

if TYPE_CHECKING:
    from workers.engine.gpu.own_on_device import OwnOnDevice


class StepSearch(Protocol):
    """The search of steps of one batch size: a `DeviceSearch`, or a stand-in."""

    def search(
        self,
        q: Tensor,
        indexes: DeviceIndexes,
        layer_idx: int,
        context_ids: Tensor,
        out: DeviceSelection,
        top_ks: Tensor | None = None,
    ) -> None:
        """See `DeviceSearch.search`."""
        ...


class SearchOnDevice(AttendChosen):
    """Selects and attends in steps that are one CUDA graph each.

    With `lookahead`, a layer's search and the copies of its rows to the device run beside the layer before it, each on
    a stream of its own: the next layer is searched while this one's rows are still being copied. Attention to the rest
    then takes another pass over the codes, by the layer's own query; otherwise the search's pass serves for both.
    """

    def __init__(
        self,
        shape: EngineShape,
        index: IndexShape,
        far: FarRows,
        device: torch.device,
        tails: Tensor | None = None,
        own: "OwnOnDevice | None" = None,
        sinks: Tensor | None = None,
        searches: Mapping[int, StepSearch] | None = None,  # by batch size; None: in the index, or in all keys
    ) -> None:
        copies_beside = far.on_host and device.type == "cuda"  # an emulated device runs everything in order
        super().__init__(shape, far, device, tails, own, sinks, copies_beside)
        if searches is None and shape.reads_keys:
            searches = make_exact_searches(shape, far, device)
        self._searches = make_searches(shape, index, device) if searches is None else searches
        if shape.has_separate_rest_pass:
            assert isinstance(index, SketchShape)
            self._passes = make_passes(shape, index, device)
        elif shape.rest == "sketch":
            for size, search in self._searches.items():
                assert isinstance(search, DeviceSearch) and isinstance(search.scores, SketchPass)
                self._passes[size] = search.scores
        # copies rows beside attention to the rest by its codes; None: no rows are copied
        self._copy_stream: torch.cuda.Stream | None = None
        if copies_beside:
            self._copy_stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        # all searches share one workspace, so with lookahead all of them run on this stream, also the first layer's
        self._search_stream: torch.cuda.Stream | None = None
        if self.lookahead and device.type == "cuda":
            # high priority if rows have to be copied; otherwise it would delay the model's products, which take longer
            self._search_stream = torch.cuda.Stream(device, priority=-1 if far.on_host else 0)  # type: ignore[no-untyped-call]
        self._fetched: dict[int, _Fetched] = {}  # by layer, until it attends

    def lse(self, rows: StepRows) -> Tensor:
        """[batch_size, num_q_heads]: see `DeviceAttention`."""
        return self._attention[rows.batch_size].lse

    def begin_step(self, rows: StepRows) -> None:
        self._fetched.clear()  # a failed step may have left some
        super().begin_step(rows)

    def look_ahead(self, layer_idx: int, q: Tensor, rows: StepRows) -> None:
        assert layer_idx not in self._fetched, f"layer {layer_idx} is on its way already"
        if self._search_stream is not None:
            self._search_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._search_stream):  # None changes nothing
            self._fetched[layer_idx] = self._search(layer_idx, q, rows)
        if (own := self._own(rows)) is not None:
            own.look_ahead(layer_idx, q, rows)

    def attend(self, layer_idx: int, q: Tensor, rows: StepRows, out: Tensor) -> None:
        if self.lookahead and layer_idx not in self._fetched:  # the first layer's query is not predicted
            self.look_ahead(layer_idx, q, rows)
        if (own := self._own(rows)) is not None:
            own.begin(layer_idx, q, rows)
        if self.shape.has_separate_rest_pass:
            self._passes[rows.batch_size].run(q, self.indexes, layer_idx, rows.context_ids)
        fetched = self._fetched.pop(layer_idx) if self.lookahead else self._search(layer_idx, q, rows)
        if fetched.searched is not None:
            torch.cuda.current_stream().wait_event(fetched.searched)
        self._post_rest(layer_idx, rows)
        if fetched.copied is not None:
            torch.cuda.current_stream().wait_event(fetched.copied)
        self._attend(layer_idx, q, fetched.rows, rows, out)

    def _search(self, layer_idx: int, q: Tensor, rows: StepRows) -> "_Fetched":
        """Enqueue the search on the current stream, and the copies of the rows that it selects."""
        selection, search_ids = self.chosen(layer_idx, rows), self._schedule.search_ids(rows)
        self._searches[rows.batch_size].search(q, self.indexes, layer_idx, search_ids, selection, rows.top_ks)
        self._schedule.distribute_choices(layer_idx, selection, rows)
        fetched = self.far.fetch(layer_idx, selection, rows.context_ids, self._copy_stream)
        copied = self._copy_stream.record_event() if self._copy_stream else None
        return _Fetched(fetched, self._search_stream.record_event() if self._search_stream else None, copied)


@dataclass(frozen=True, slots=True)
class _Fetched:
    """A layer's selection, whose rows are being copied."""

    rows: DeviceSelection  # ids of far rows
    searched: torch.cuda.Event | None  # after the search; None: it is on the stream that attends
    copied: torch.cuda.Event | None  # after the copies; None: they are on that stream, or there are none


def make_searches(shape: EngineShape, index: IndexShape, device: torch.device) -> dict[int, DeviceSearch]:
    """Make a search in the index for each batch size."""
    return {
        batch_size: DeviceSearch(
            index,
            batch_size=batch_size,
            max_context_len=shape.max_context_len,
            softmax_scale=shape.softmax_scale,
            query_dtype=shape.dtype,
            device=device,
            max_segments=shape.max_segments,
            sums_rest=shape.rest == "sketch" and not shape.has_separate_rest_pass,
            beside=shape.searches_beside,
        )
        for batch_size in shape.batch_sizes
    }


def make_exact_searches(shape: EngineShape, far: FarRows, device: torch.device) -> dict[int, ExactSearch]:
    """Make a search in all keys for each batch size."""
    sources = [far.source(layer_idx) for layer_idx in range(shape.num_layers)]
    return {
        batch_size: ExactSearch(
            shape.rows,
            sources,
            batch_size=batch_size,
            max_context_len=shape.max_context_len,
            softmax_scale=shape.softmax_scale,
            query_dtype=shape.dtype,
            device=device,
        )
        for batch_size in shape.batch_sizes
    }
