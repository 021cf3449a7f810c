"""Where a step's selected rows are read from: the context's KV on the device, or a slot cache of its KV on the host."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from csattn.attention.device import RowSource, row_sources
from csattn.batch import DeviceSelection
from offload.codecs.codec import KvCodec, encode_layer
from offload.host_memory import allocate_rows
from offload.pinned import PinnedRows
from offload.slot_cache import SlotCache, SlotCacheShape, slot_cache_bytes, stack_bytes
from offload.staging import copy_to_device
from workers.engine.gpu.shape import EngineShape


class ContextRows:
    """Where the rows of all loaded contexts lie."""

    on_host = False  # whether they stay in pinned host memory. Rows that cross the link take longest in a step
    cache: SlotCache | None = None  # on the device, of rows in host memory
    rows_at_once: int | None = None  # the most rows of a step over one context; None: any number


class FarRows(ContextRows):
    """The context rows that a step may select, of all loaded contexts and layers. This class reads them in place."""

    def __init__(self, sources: Sequence[RowSource]) -> None:
        """sources: the rows of each layer."""
        self._sources = sources

    def fetch(
        self,
        layer_idx: int,
        selection: DeviceSelection,
        context_ids: Tensor,
        link: torch.cuda.Stream | None = None,  # for the copies; None: the current stream
    ) -> DeviceSelection:
        """Enqueue the copies of the selected rows to the device. Return their ids in `source`, or in `spill`."""
        return selection

    def source(self, layer_idx: int) -> RowSource:
        return self._sources[layer_idx]

    def spill(self, layer_idx: int) -> RowSource | None:
        return None


class DeviceRows(FarRows):
    """Owns the KV of whole contexts on the device."""

    def __init__(self, shape: EngineShape, device: torch.device) -> None:
        self._shape = shape
        self._device = device
        self._addresses = torch.zeros(shape.num_layers, shape.num_contexts, dtype=torch.int64, device=device)
        self._lens = torch.zeros(shape.num_contexts, dtype=torch.int32, device=device)
        super().__init__([RowSource(addresses, self._lens) for addresses in self._addresses])
        self._kv: dict[int, list[Tensor]] = {}

    def load(
        self,
        context_id: int,
        layers: Iterable[Tensor],
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Take a context's KV, layer by layer as from `context_layers`; copy the layers that are not on the device."""
        kept, kv_sources = list[Tensor](), self._shape.kv_sources or range(self._shape.num_layers)
        for layer, kv_source in zip(layers, kv_sources, strict=True):
            kept.append(kept[kv_source] if kv_source < len(kept) else self._to_device(layer))
            on_progress(len(kept), self._shape.num_layers)
        self._kv[context_id] = kept
        self._addresses[:, context_id] = torch.tensor([layer.data_ptr() for layer in kept], dtype=torch.int64)
        self._lens[context_id] = kept[0].shape[1]

    def _to_device(self, layer: Tensor) -> Tensor:
        if layer.device == self._device:
            return layer.contiguous()
        taken = torch.empty(layer.shape, dtype=layer.dtype, device=self._device)
        copy_to_device(layer.contiguous(), taken)
        return taken

    def layers(self, context_id: int) -> list[Tensor]:
        """Return a context's KV per layer, on the device."""
        return self._kv[context_id]

    def unload(self, context_id: int) -> None:
        """Free a context's KV. No step may be in flight."""
        del self._kv[context_id]


class CachedRows(FarRows):
    """Owns a slot cache over KV in pinned host memory: rows that were selected before need not be copied again."""

    on_host = True
    cache: SlotCache

    def __init__(self, shape: EngineShape, num_cache_slots: int, device: torch.device) -> None:
        """num_cache_slots: per layer, context and KV head."""
        self.cache = SlotCache(cache_shape(shape, num_cache_slots), device)
        self._lens = torch.zeros(shape.num_contexts, dtype=torch.int32, device=device)
        slots = torch.full((shape.num_contexts,), num_cache_slots, dtype=torch.int32, device=device)
        super().__init__(row_sources(self.cache.rows, slots))
        self._spills = [RowSource(addresses, self._lens) for addresses in self.cache.host_addresses]
        self._kv: dict[int, PinnedRows] = {}

    def load(self, context_id: int, kv: PinnedRows) -> None:
        """Register a context, whose KV stays on the host."""
        self.place(context_id, kv.addresses, kv.layers[0].shape[1])
        self._kv[context_id] = kv

    def place(self, context_id: int, addresses: Sequence[int], context_len: int) -> None:
        """Register a context by addresses: of each layer's rows [num_kv_heads, context_len], owned by the caller."""
        self.cache.load_context(context_id, addresses, context_len)
        self._lens[context_id] = context_len

    def unload(self, context_id: int) -> None:
        """Forget a context; the owner of its memory unpins it. No step may be in flight."""
        self.cache.reset(context_id)
        del self._kv[context_id]

    def fetch(
        self,
        layer_idx: int,
        selection: DeviceSelection,
        context_ids: Tensor,
        link: torch.cuda.Stream | None = None,
    ) -> DeviceSelection:
        ids = self.cache.fetch(layer_idx, selection.kv_indices, selection.valid_len, context_ids, link)
        return DeviceSelection(ids, selection.valid_len)

    def spill(self, layer_idx: int) -> RowSource | None:
        return self._spills[layer_idx]


def context_layers(shape: EngineShape, layers: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield a context's layers on the host as steps read them: [num_kv_heads, context_len, 2, head_dim], or coded.

    layers: as they were built. They are coded one by one, each on memory pages of its own, and rows that several layers
    attend to only once. Raises CodecError if the format cannot keep them.
    """
    kv_sources, shared = shape.kv_sources or range(shape.num_layers), dict[int, Tensor]()
    for number, (layer, kv_source) in enumerate(zip(layers, kv_sources, strict=False)):
        if shape.kv_format is None:
            yield layer
        elif kv_source in shared:
            yield shared[kv_source]
        else:
            (room,) = allocate_rows(1, (*layer.shape[:2], shape.context_row_bytes), torch.uint8)
            coded = encode_layer(layer, KvCodec(shape.kv_format, shape.head_dim), room)
            if kv_sources.count(number) > 1:
                shared[number] = coded
            yield coded


def cache_shape(shape: EngineShape, num_cache_slots: int) -> SlotCacheShape:
    """Return the shape of a slot cache for steps of that shape."""
    return SlotCacheShape(
        num_layers=shape.num_layers,
        num_contexts=shape.num_contexts,
        num_kv_heads=shape.num_kv_heads,
        num_index_heads=shape.num_index_heads,
        context_capacity=shape.max_context_len,
        num_slots=num_cache_slots,
        max_top_k=shape.max_top_k,
        max_batch=max(shape.batch_sizes),
        row_bytes=shape.context_row_bytes,
    )


def cache_bytes(shape: EngineShape, num_cache_slots: int) -> int:
    """Device memory of `CachedRows`."""
    made = cache_shape(shape, num_cache_slots)
    return slot_cache_bytes(made) + stack_bytes(made)
