"""Where rows of latents (MLA) lie for steps on a device: all on the device, or contexts' rows in host memory, with only
their index keys on the device and chosen rows in a slot cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod
from pathlib import Path

import torch
from torch import Tensor

from csattn.batch import StepRows
from csattn.cuda import cuda_kernel
from csattn.models.latent_spec import LatentSpec
from offload.pinned import PinnedRows
from offload.slot_cache import SlotCache
from offload.staging import copy_to_device
from workers.engine.gpu.far_rows import ContextRows, cache_shape
from workers.engine.gpu.shape import EngineShape
from workers.engine.model_choice import least_slots

_SOURCE = Path(__file__).with_name("latent_places.cu")
_THREADS = 256
_ALIGNMENT = 16  # bytes, of rows that the device copies


@dataclass(frozen=True, slots=True)
class SeenRows:
    """What the rows of a step see, for one batch size: first the row's context, then its tail."""

    places: Tensor  # [batch_size, num_seen] int32: of index keys, or of rows without an indexer; -1 padded
    lens: Tensor  # [batch_size] int32
    scores: Tensor  # [batch_size, num_seen] float32
    chosen: Tensor  # [batch_size, top_k] int32, -1 padded, written by the choice as `LatentPlaces.pages_of` says

    @classmethod
    def of(cls, shape: EngineShape, batch_size: int, device: torch.device) -> "SeenRows":
        num_seen, num_chosen = _num_seen(shape), _latents(shape).top_k or 0
        return cls(
            torch.full((batch_size, num_seen), -1, dtype=torch.int32, device=device),
            torch.zeros(batch_size, dtype=torch.int32, device=device),
            torch.zeros(batch_size, num_seen if num_chosen else 0, dtype=torch.float32, device=device),
            torch.full((batch_size, num_chosen), -1, dtype=torch.int32, device=device),
        )


class LatentPlaces(ContextRows):
    """All rows on the device, in one array. A place is a row's number in it, the same in every layer."""

    def __init__(self, shape: EngineShape, device: torch.device) -> None:
        self._shape, of_contexts = shape, shape.num_contexts * shape.max_context_len
        num_rows = of_contexts + shape.num_tails * shape.tail_capacity
        num_layers, row = shape.num_layers, (2, shape.head_dim)
        self.rows = torch.zeros(num_layers, num_rows, prod(row), dtype=shape.dtype, device=device)
        contexts, own = self.rows[:, :of_contexts], self.rows[:, of_contexts:]
        self._contexts = contexts.view(num_layers, shape.num_contexts, shape.max_context_len, prod(row))
        self.tails = own.view(num_layers, shape.num_tails, 1, shape.tail_capacity, *row)
        self.numbers = Numbers(shape, _Stride(), _Stride(first=of_contexts), device)

    def load(self, context_id: int, layers: Sequence[Tensor]) -> None:
        """Copy a context's rows, [1, context_len, 2, head_dim] of each layer. No step may be in flight."""
        context_len = self._shape.require_context(layers)
        for place, rows in zip(self._contexts[:, context_id], layers, strict=True):
            copy_to_device(rows, place[:context_len])
        self.numbers.lens[context_id] = context_len

    def unload(self, context_id: int) -> None:
        """Forget a context. No step may be in flight."""
        self.numbers.lens[context_id] = 0

    def index_keys(self, layer_idx: int) -> Tensor:
        """Return the layer's index keys by place: [num_places, 1, index_head_dim]."""
        spec = _latents(self._shape)
        return self.rows[layer_idx, :, None, spec.key_width : spec.row_width]

    def pages_of(self, seen: SeenRows) -> Tensor | None:
        """Return the table that translates a choice's numbers among the seen rows to places; None: it keeps numbers."""
        return seen.places

    def attended(self, layer_idx: int, rows: StepRows, seen: SeenRows) -> tuple[Tensor, Tensor]:
        """Return rows [num_rows, width], and which of them each row of the step attends to: [batch_size, top_k] int32,
        -1 padded."""
        return self.rows[layer_idx], seen.places if _latents(self._shape).top_k is None else seen.chosen


class CachedLatents(ContextRows):
    """Like `LatentPlaces`, for contexts in pinned host memory: the device has their index keys, cache slots, and tails.

    In each layer, all three are one array, so that a kernel with a single base address reads contexts' and own rows.
    Places count in units that divide the sizes of index keys and rows. Layers are alike: one without an indexer also
    has room for index keys, which is never read.
    """

    on_host = True
    cache: SlotCache

    def __init__(self, shape: EngineShape, num_cache_slots: int, device: torch.device) -> None:
        """num_cache_slots: per layer and context, at least `least_slots`."""
        spec, width = _latents(shape), 2 * shape.head_dim
        least = least_slots(spec, shape.max_context_len, max(shape.batch_sizes))
        assert spec.indexer is not None and num_cache_slots >= least, (
            f"{num_cache_slots} cache slots, at least {least} are needed"
        )
        self._shape, self._index_dim, num_cached = shape, spec.indexer.head_dim, shape.num_contexts * num_cache_slots
        keys = _key_numbers(shape)
        num_numbers = (num_cached + shape.num_tails * shape.tail_capacity) * width
        memory = torch.zeros(shape.num_layers, keys + num_numbers, dtype=shape.dtype, device=device)
        of_keys, of_rows = memory[:, :keys], memory[:, keys:]
        self._keys = of_keys[:, : shape.num_contexts * shape.max_context_len * self._index_dim].view(
            shape.num_layers, shape.num_contexts, shape.max_context_len, self._index_dim
        )
        self._rows = of_rows.view(shape.num_layers, -1, width)
        own = self._rows[:, num_cached:]
        self.tails = own.view(shape.num_layers, shape.num_tails, 1, shape.tail_capacity, 2, shape.head_dim)
        slots = self._rows[:, :num_cached].view(torch.uint8)
        slots = slots.view(shape.num_layers, shape.num_contexts, 1, num_cache_slots, shape.row_bytes)
        self.cache = SlotCache(cache_shape(shape, num_cache_slots), device, slots)
        if num_cache_slots < shape.max_context_len:  # all that a step's rows choose has to have slots at the same time
            self.rows_at_once = num_cache_slots // shape.max_top_k

        unit = gcd(self._index_dim, spec.key_width, width, keys)
        self.memory, self._unit = memory, unit
        first_own = keys + num_cached * width + spec.key_width
        self.numbers = Numbers(
            shape, _Stride(self._index_dim // unit), _Stride(width // unit, first_own // unit), device
        )
        self._places = {size: _Chosen.of(shape, size, device) for size in shape.batch_sizes}
        self._first_own = num_cached
        self._kv: dict[int, PinnedRows] = {}
        define = {"THREADS": _THREADS}
        self._count, self._place = (cuda_kernel(_SOURCE, name, define) for name in ("count_far", "place_chosen"))

    def load(self, context_id: int, kv: PinnedRows) -> None:
        """Register a context, whose rows stay on the host, and copy its index keys. No step may be in flight."""
        context_len, spec = self._shape.require_context(kv.layers), _latents(self._shape)
        self.cache.load_context(context_id, kv.addresses, context_len)
        for keys, rows in zip(self._keys[:, context_id], kv.layers, strict=True):
            keys[:context_len].copy_(rows.view(context_len, -1)[:, spec.key_width : spec.row_width])
        self.numbers.lens[context_id] = context_len
        self._kv[context_id] = kv

    def unload(self, context_id: int) -> None:
        """Forget a context; the owner of its memory unpins it. No step may be in flight."""
        self.cache.reset(context_id)
        self.numbers.lens[context_id] = 0
        del self._kv[context_id]

    def index_keys(self, layer_idx: int) -> Tensor:
        of_layer, dim = self.memory[layer_idx], self._index_dim
        num_places = (len(of_layer) - dim) // self._unit + 1
        return of_layer.as_strided((num_places, 1, dim), (self._unit, dim, 1), of_layer.storage_offset())

    def pages_of(self, seen: SeenRows) -> Tensor | None:
        return None

    def attended(self, layer_idx: int, rows: StepRows, seen: SeenRows) -> tuple[Tensor, Tensor]:
        """Fetch the chosen rows of contexts that have no slot, then return as `LatentPlaces.attended`.

        At most `rows_at_once` rows of the step may have the same context.
        """
        to, lens = self._places[rows.batch_size], self.numbers.lens
        batch_size, top_k = to.places.shape
        contexts, tails = rows.context_ids, rows.tail_ids
        self._count.launch((batch_size, 1, 1), _THREADS, seen.chosen, contexts, lens, to.num_far, top_k)
        slots = self.cache.fetch(layer_idx, seen.chosen[:, None], to.num_far, contexts)
        shape = self._shape
        self._place.launch(
            (-(-top_k // _THREADS), batch_size, 1),
            _THREADS,
            *(seen.chosen, slots, contexts, tails, lens, to.places, top_k),
            *(self.cache.shape.num_slots, self._first_own, shape.tail_capacity),
        )
        return self._rows[layer_idx], to.places


@dataclass(frozen=True, slots=True)
class _Stride:
    """Places at equal distances: first + i * step."""

    step: int = 1
    first: int = 0


class Numbers:
    """Computes the places of what a step's rows see: the context's rows by one stride, the request's own by another."""

    def __init__(self, shape: EngineShape, contexts: _Stride, own: _Stride, device: torch.device) -> None:
        assert own.first + shape.num_tails * shape.tail_capacity * own.step < 1 << 31, "places are 32 bits"
        self._shape, self._contexts, self._own = shape, contexts, own
        # [num_contexts + 1] int32: rows of each context; the last, which context id -1 indexes, stays 0
        self.lens = torch.zeros(shape.num_contexts + 1, dtype=torch.int32, device=device)
        self._seen = torch.arange(_num_seen(shape), dtype=torch.int32, device=device)

    def find(self, rows: StepRows, seen: SeenRows) -> None:
        """Write `seen.places` and `seen.lens`. An idle row sees nothing."""
        context_lens = self.lens[rows.context_ids.long()]
        torch.add(context_lens, rows.tail_lens, out=seen.lens)
        of_context = rows.context_ids * self._shape.max_context_len
        of_tail = rows.tail_ids * self._shape.tail_capacity - context_lens
        far = (self._seen + of_context[:, None]) * self._contexts.step + self._contexts.first
        near = (self._seen + of_tail[:, None]) * self._own.step + self._own.first
        at = torch.where(self._seen < context_lens[:, None], far, near)
        seen.places.copy_(at.masked_fill_(self._seen >= seen.lens[:, None], -1))


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What `attended` computes from one layer's choice, for one batch size."""

    num_far: Tensor  # [batch_size, 1] int32: how many chosen rows are of the context
    places: Tensor  # [batch_size, top_k] int32: in slots and tails, -1 padded

    @classmethod
    def of(cls, shape: EngineShape, batch_size: int, device: torch.device) -> "_Chosen":
        num_far = torch.zeros(batch_size, 1, dtype=torch.int32, device=device)
        return cls(num_far, torch.full((batch_size, shape.max_top_k), -1, dtype=torch.int32, device=device))


def latents_bytes(shape: EngineShape) -> int:
    """Device memory of all contexts' rows, which is allocated from the start."""
    return shape.num_contexts * shape.kv_bytes(shape.max_context_len)


def index_key_bytes(shape: EngineShape) -> int:
    """Device memory of the index keys of `CachedLatents`."""
    return shape.num_layers * _key_numbers(shape) * shape.dtype.itemsize


def latents_working_bytes(shape: EngineShape) -> int:
    """Device memory of `SeenRows` of all batch sizes, and of temporaries of `find`: numbers of 4 bytes."""
    return 4 * _num_seen(shape) * (2 * sum(shape.batch_sizes) + 3 * max(shape.batch_sizes))


def _key_numbers(shape: EngineShape) -> int:
    """How many numbers a layer's index keys of all contexts take, padded so that the rows after them are aligned."""
    unit = _ALIGNMENT // shape.dtype.itemsize
    return -(-shape.num_contexts * shape.max_context_len * _latents(shape).index_dim // unit) * unit


def _num_seen(shape: EngineShape) -> int:
    """The most rows that a row of a step may see."""
    return shape.max_context_len + shape.tail_capacity


def _latents(shape: EngineShape) -> LatentSpec:
    assert shape.latents is not None, "other models keep no latents"
    return shape.latents
