"""Segments of requests' own rows on a GPU: searched and attended to as contexts that belong to one request each."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from csattn.attention.device import row_sources
from csattn.batch import DeviceSelection, StepRows, make_step_rows
from csattn.config import SearchConfig
from csattn.search.device import DeviceLayerIndex, DeviceSketch, SketchShape, to_device
from csattn.sketch import SketchIndex
from csattn.sketch.codes import BLOCK_KEYS
from csattn.sketch.index import BY_HEAD
from csattn.sketch.own import making_bytes, own_keep, own_top_k
from workers.engine.gpu.far_rows import CachedRows, FarRows, cache_bytes
from workers.engine.gpu.on_device import SearchOnDevice
from workers.engine.gpu.shape import EngineShape
from workers.engine.gpu.stream_thread import synchronize_stream

LAYERS_AT_ONCE = 4  # of a segment: so few do not delay steps, and limit the memory that making a segment takes


class OwnOnDevice:
    """Runs beside the search in contexts, on a stream of its own; attention merges its result with the contexts'.

    Chosen rows are read in the tails, or come from the host. Sketches are loaded and unloaded between steps, as
    contexts are.
    """

    def __init__(
        self,
        shape: EngineShape,
        index: SketchShape,
        tails: Tensor,
        device: torch.device,
        far: CachedRows | None = None,  # own rows in host memory; None: all are in tails
    ) -> None:
        own, rows = own_shape(shape), far if far is not None else _rows_in(tails)
        self._search = SearchOnDevice(own, index, rows, device, tails=tails)
        self._rows = {size: make_step_rows(size, device) for size in shape.batch_sizes}
        sizes = shape.num_q_heads, shape.head_dim
        self._out = {size: torch.zeros(size, *sizes, dtype=shape.dtype, device=device) for size in shape.batch_sizes}
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":  # an emulated device runs everything in order
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def load(self, tail_id: int, config: SearchConfig, num_rows: int, layers: Sequence[DeviceLayerIndex]) -> None:
        """Replace the segments of that tail's request. No step may be in flight."""
        indexes = self._search.indexes
        indexes.load(tail_id, num_rows, list(layers))
        indexes.top_ks[tail_id] = own_top_k(config, num_rows)

    def unload(self, tail_id: int) -> None:
        """Remove the segments of that tail's request. No step may be in flight."""
        self._search.indexes.unload(tail_id)

    def begin_step(self, rows: StepRows) -> None:
        own = self._rows[rows.batch_size]
        own.context_ids.copy_(torch.where(rows.own_lens > 0, rows.tail_ids, -1))

    def look_ahead(self, layer_idx: int, q: Tensor, rows: StepRows) -> None:
        self._search.look_ahead(layer_idx, q, self._rows[rows.batch_size])

    def begin(self, layer_idx: int, q: Tensor, rows: StepRows) -> None:
        """Enqueue a layer's attention to own segments."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):  # None changes nothing
            self._search.attend(layer_idx, q, self._rows[rows.batch_size], self._out[rows.batch_size])

    def attended(self, rows: StepRows) -> tuple[Tensor, Tensor]:
        """Return out and lse of the attention that `begin` has enqueued. Work that is enqueued later waits for it."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        return self._out[rows.batch_size], self._search.lse(rows)

    def chosen(self, layer_idx: int, rows: StepRows) -> DeviceSelection:
        """Return what is selected, as `SearchOnDevice.chosen` does: rows of the tails."""
        return self._search.chosen(layer_idx, self._rows[rows.batch_size])


def _rows_in(tails: Tensor) -> FarRows:
    rows_per_head = torch.full((tails.shape[1],), tails.shape[3], dtype=torch.int32, device=tails.device)
    return FarRows(row_sources(tails, rows_per_head))


def place_segment(segment: Sequence[SketchIndex], device: torch.device) -> list[DeviceLayerIndex]:
    """Copy one segment's sketch of each layer to the device, ready to be read by any stream."""
    layers = [to_device(sketch, device) for sketch in segment]
    synchronize_stream(device)
    return layers


def join_on_device(before: Sequence[DeviceSketch], segment: Sequence[DeviceSketch]) -> list[DeviceSketch]:
    """Concatenate segments with the one that follows them. The arguments may be freed at once."""
    layers = []
    for sketch, more in zip(before, segment, strict=True):
        num_rows = sketch.codes.shape[1] * BLOCK_KEYS  # of whole blocks
        parts = {name: torch.cat([getattr(sketch, name), getattr(more, name)], dim=1) for name in BY_HEAD}
        starts = torch.cat([sketch.segment_starts, more.segment_starts + num_rows])
        layers.append(DeviceSketch(segment_starts=starts, **parts))
    synchronize_stream(layers[0].codes.device)  # hazard: freed memory is reused on the stream that allocated it
    return layers


@dataclass(frozen=True, slots=True, kw_only=True)
class _NothingNear(SearchConfig):
    """Configuration of searches in segments: near rows are attended to together with the context's."""

    sink_len: int = 0
    window_len: int = 0

    def __post_init__(self) -> None:
        pass


def own_shape(shape: EngineShape) -> EngineShape:
    """Return the shape of the search in own segments, which are a context for each tail."""
    return replace(
        shape,
        search=_NothingNear(keep=own_keep(shape.search), lookahead=shape.search.lookahead),
        max_context_len=shape.own_capacity or shape.max_own_len,
        num_contexts=shape.num_tails,
        max_segments=shape.max_own_segments,
        own_capacity=None,
        kv_format=None,
        growth=None,
        has_sinks=False,  # they are joined once, with the context's attention
        reads_keys=False,
        searches_beside=True,
    )


def own_cache(shape: EngineShape, device: torch.device) -> CachedRows:
    """Make the slot cache of own rows in host memory."""
    return CachedRows(own_shape(shape), shape.own_slots, device)


def own_cache_bytes(shape: EngineShape) -> int:
    """Device memory of `own_cache`; 0 if own rows stay in tails."""
    return cache_bytes(own_shape(shape), shape.own_slots) if shape.own_capacity is not None else 0


def own_bytes(shape: EngineShape, num_words: int, num_coords: int) -> int:
    """Device memory of all requests' sketches, of one more while it takes an older one's place, and of making one."""
    of_rows = shape.max_own_len * (4 * num_words + 8 / BLOCK_KEYS)
    of_segments = shape.max_own_segments * (2 * 4 * shape.head_dim + 2 * 2 * shape.head_dim * num_coords)
    kept = int((shape.num_tails + 1) * shape.num_layers * shape.num_kv_heads * (of_rows + of_segments))
    assert shape.growth is not None, "without growth there are no segments"
    made = min(LAYERS_AT_ONCE, shape.num_layers), shape.num_kv_heads, shape.growth.segment_len, 2, shape.head_dim
    return kept + making_bytes(made, shape.dtype.itemsize)
