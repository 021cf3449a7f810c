"""What the CPU engine knows of a context and of a request."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from copy import copy
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.artifact import Artifact, ModelGeometry
from csattn.config import SearchConfig
from csattn.cpu.arguments import word
from csattn.errors import ConfigError
from csattn.index import ListIndex
from csattn.lightning import CompressedState
from csattn.models.compressed import compressed_states, empty_state
from csattn.models.loader import DTYPES
from csattn.rest import Moments, moments_of
from csattn.selection import Selection
from csattn.selector_names import SelectorName
from csattn.selectors import ContextView, Prepared, Selector, selector_for
from csattn.sketch import SketchIndex
from offload.budget import require_host_memory
from offload.codecs.formats import KvFormat
from offload.coded_store import CodedStore, coded_bytes
from offload.host_store import HostStore, distinct
from offload.kv_store import STREAM_ROWS, KvStore
from offload.row_files import FileSpan
from offload.tiered_store import TieredStore
from workers.engine.fidelity import Observer
from workers.engine.lossy_keys import warn_of_lossy_keys
from workers.engine.open_requests import OpenRequest
from workers.engine.own_segments import OwnSegments

WITHOUT_ALL_KEYS = ("csattn", "full", "window")  # selectors that do not read all keys to choose
_SELECTED_STREAM_ROWS = 64  # few where only resident rows are streamed, to leave the budget for rows


@dataclass(frozen=True, slots=True)
class HostBudget:
    """A budget of host memory for each context's rows, which are read from its files: for contexts larger than memory.

    Which rows stay in memory depends on how requests read, so all requests have to read alike.
    """

    num_bytes: int
    config: SearchConfig
    selector: str

    def open_store(self, artifact: Artifact) -> TieredStore:
        """Open the store of a context, to be closed with it. Raises TierError if the budget is too small."""
        geometry, context_len = artifact.spec.model, artifact.spec.context_len
        view = ContextView(context_len, 0.0, self.config)
        middle, reads_all = view.middle, selector_for(self.selector, view) == "full"
        return TieredStore(
            [FileSpan(*artifact.layer_kv_place(layer_idx)) for layer_idx in geometry.indexed_layers],
            (geometry.num_kv_heads, context_len, geometry.head_dim),
            DTYPES[artifact.spec.kv_dtype],
            self.num_bytes,
            resident=[slice(0, middle.start), slice(middle.stop, context_len)],
            # a stream reads all rows, so whole pages are reused; rows that a search selects are scattered
            page_rows=STREAM_ROWS if reads_all else None,
            stream_rows=STREAM_ROWS if reads_all else _SELECTED_STREAM_ROWS,
        )

    def require_alike(self, selector: SelectorName, view: ContextView) -> None:
        """Raise ConfigError for a request that reads other rows than those that stay in memory."""
        loaded_view = ContextView(view.context_len, view.softmax_scale, self.config)
        if (selector_for(self.selector, loaded_view), loaded_view.middle) != (selector, view.middle):
            config = self.config
            raise ConfigError(
                f"within its host budget this engine reads with selector {self.selector}, keep {config.keep}, "
                f"sink_len {config.sink_len} and window_len {config.window_len}; use those, or start another engine"
            )


@dataclass(frozen=True, slots=True)
class CpuContext:
    """A loaded context. Steps attend to its rows as the store keeps them, maybe coded; selectors read them as built.

    "Per layer" means, here and in all searches, per layer that has an index. `indexed_idx` is a layer's place among
    these, `layer_idx` its place among all layers.
    """

    artifact: Artifact | None  # None: for requests without a context
    kv: list[Tensor]  # per layer [num_kv_heads, context_len, 2, head_dim], mapped from the artifact
    context_len: int
    local_kv: list[Tensor]  # per layer without an index: its last rows, or its latents, also mapped
    store: KvStore  # of the rows that steps attend to
    in_place: bool  # whether steps read rows where they lie; otherwise rows are gathered and streamed
    indexes: list[ListIndex | SketchIndex]  # per layer
    states: Sequence[Mapping[str, NDArray[np.float32]]]  # per layer that keeps a state: conv and memory
    compressed: Sequence[CompressedState] = ()  # per layer of compressed attention, whose windows are in `local_kv`
    # per layer, what a selector has computed from the context: before the first request with it, then kept for all
    prepared: dict[SelectorName, list[Prepared]] = field(default_factory=dict)
    # per layer, for `rest` moments, by the range of rows that may be chosen; also made once and kept
    moments: dict[tuple[int, int], list[Moments]] = field(default_factory=dict)

    @property
    def num_index_heads(self) -> int:
        return self.indexes[0].num_heads

    @property
    def sketches(self) -> list[SketchIndex]:
        """The sketch of each layer; empty if the index is lists."""
        return [index for index in self.indexes if isinstance(index, SketchIndex)]

    def moments_of(self, rows: slice) -> list[Moments]:
        """Compute the moments of these rows, as steps attend to them, per layer."""
        moments = []
        for indexed_idx in range(len(self.kv)):
            with closing(self.store.stream(indexed_idx, rows)) as pieces:
                moments.append(moments_of(pieces))
        return moments

    @property
    def kv_bytes(self) -> int:
        if isinstance(self.store, TieredStore):
            return self.store.held_bytes
        made = [part for of in self.compressed for part in (of.rows, of.keys)]
        return sum(layer.nbytes for layer in distinct((*self._layers, *self.local_kv, *made)))

    @property
    def kv_words(self) -> NDArray[np.int64]:
        """[num_layers]: the address of each layer's rows."""
        return np.array([word(layer) for layer in self._layers], np.int64)

    @property
    def row_layout(self) -> tuple[int, int, int, int]:
        """Bytes of a row, the offset of its value, and the addresses of the readers of keys and values (0: plain)."""
        if isinstance(self.store, CodedStore):
            codec = self.store.codec
            return codec.row_bytes, codec.v_offset, *codec.readers
        row = (*self.kv, *self.local_kv)[0]
        key_bytes = row.shape[-1] * row.element_size()
        return 2 * key_bytes, key_bytes, 0, 0

    @property
    def _layers(self) -> list[Tensor]:
        """The rows that steps attend to in place, per layer."""
        return self.store.layers if isinstance(self.store, CodedStore) else self.kv

    @property
    def map_words(self) -> NDArray[np.int64]:
        """[all layers]: the address of the map that predicts each layer's queries; 0: they are not predicted."""
        if self.artifact is None:
            return np.zeros(1, np.int64)
        artifact, model = self.artifact, self.artifact.spec.model
        maps = (artifact.next_query(i - 1) if model.is_predicted(i) else None for i in range(model.num_layers))
        return np.array([word(of_layer) for of_layer in maps], np.int64)


def open_context(artifact: Artifact, kv_format: KvFormat | None, budget: HostBudget | None) -> CpuContext:
    """Open a context. kv_format: how its rows are kept; None: mapped from the artifact, which takes no memory.

    Logs a warning if the format does not keep keys apart. Raises MemoryPlanError if a copy does not fit into memory.
    """
    # read all that may be refused as damaged before the store opens files
    kv, rows, index, states = artifact.indexed_kv(), artifact.local_kv(), artifact.indexes(), artifact.states()
    if compressed := compressed_states(artifact):
        rows, states = _windows(compressed), []
    store: KvStore
    if budget is not None:
        store = budget.open_store(artifact)
    elif kv_format is not None:
        remedy = "choose a KV codec with fewer bytes, or none: rows are then read from the memory-mapped artifact"
        require_host_memory(f"the context in {kv_format}", coded_bytes(kv, kv_format), remedy)
        store = CodedStore(kv, kv_format)
        warn_of_lossy_keys(artifact, kv, kv_format)
    else:
        store = HostStore(kv)
    return CpuContext(artifact, kv, artifact.spec.context_len, rows, store, budget is None, index, states, compressed)


def _windows(compressed: Sequence[CompressedState]) -> list[Tensor]:
    """The windows of each layer, viewed as [1, num_kept, 2, half of a row]."""
    return [torch.unflatten(of.window, 1, (2, of.window.shape[1] // 2))[None] for of in compressed]


def no_context(geometry: ModelGeometry, dtype: torch.dtype) -> CpuContext:
    """Return the context of requests without one: it has no rows."""
    if "compressed" in geometry.kinds:
        none_of = [empty_state(geometry.compressed_sizes(i, 0), dtype) for i in range(geometry.num_layers)]
        return CpuContext(None, [], 0, _windows(none_of), HostStore([]), True, [], [], none_of)

    def none(layer_idx: int) -> Tensor:
        num_kv_heads, head_dim = geometry.row_sizes(layer_idx)
        return torch.zeros(num_kv_heads, 1, 2, head_dim, dtype=dtype)[:, :0].contiguous()

    kv = [none(i) for i in geometry.indexed_layers]
    states = [
        {"conv": np.zeros(layer.conv, np.float32), "memory": np.zeros(layer.memory, np.float32)}
        for layer in geometry.layers
        if layer.keeps == "state"
    ]
    return CpuContext(None, kv, 0, [none(i) for i in geometry.local_layers], HostStore(kv), True, [], states)


class KeptChoice:
    """What a request's last search has chosen: the tokens until the next search read it."""

    def __init__(self, num_layers: int, num_index_heads: int, top_k: int) -> None:
        sizes = num_layers, num_index_heads
        self.kv_indices, self.valid_len = np.full((*sizes, top_k), -1, np.int32), np.zeros(sizes, np.int32)
        # of the current step, whose first rows may still read the old
        self._found = self.kv_indices.copy(), self.valid_len.copy()

    def find(self, indexed_idx: int, kv_indices: NDArray[np.int32], valid_len: NDArray[np.int32]) -> None:
        """Store what tokens of later steps will read, once the step is committed."""
        self._found[0][indexed_idx], self._found[1][indexed_idx] = kv_indices, valid_len

    def commit(self) -> None:
        self.kv_indices[:], self.valid_len[:] = self._found


@dataclass(slots=True)
class LayerChoice:
    """One request's selector in one layer, with its last choice."""

    selector: Selector
    num_appended: int = 0  # rows of the tail that the selector has taken over
    last: Selection | None = None  # what tokens read until the next search

    def snapshot(self) -> "LayerChoice":
        return LayerChoice(copy(self.selector), self.num_appended, self.last)


@dataclass(slots=True)
class CpuRequest(OpenRequest):
    """An open request."""

    request_slot: int
    context: CpuContext
    view: ContextView
    selector: SelectorName  # full if all rows are kept anyway
    make_selectors: Callable[[], list[Selector]]  # one per layer, if the request chooses alone
    # per layer, what attention to the rest reads: one of the two, or neither if the rest is dropped
    sketches: list[SketchIndex]
    moments: list[Moments]
    # of all layers, except predictor_bytes
    index_bytes: int  # that its selector and attention to the rest keep beside the KV
    search_bytes: int  # that a csattn search reads, with the predictors of its queries
    predictor_bytes: int  # of the predictor of one layer's queries; 0 without lookahead
    rest_bytes: int  # that attention to the rest reads for a token
    own: OwnSegments | None = None  # codes of own rows that have left the window; None: see `num_outside_window`
    near: tuple[int, int] = field(init=False)  # context rows [0, first) and [second, context_len) are near
    kept: KeptChoice | None = field(init=False, default=None)  # unless every token searches
    choices: list[LayerChoice] | None = field(init=False, default=None)  # per layer, once it has chosen alone
    observer: Observer | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        middle, context_len = self.view.middle, self.view.context_len
        reads_all_in_place = self.selector == "full" and self.context.in_place
        self.near = (context_len, context_len) if reads_all_in_place else (middle.start, middle.stop)
        if self.search_period > 1:
            self.kept = KeptChoice(len(self.context.kv), self.num_index_heads, self.top_k)

    @property
    def search_period(self) -> int:
        """Every how many tokens of the request, from the first on, one is searched; 1 if csattn chooses nothing."""
        return self.view.config.search_period if self.top_k > 0 else 1

    @property
    def top_k(self) -> int:
        """Rows that csattn selects for each index head."""
        middle = self.view.middle
        return min(self.view.top_k, middle.stop - middle.start) if self.selector == "csattn" else 0

    @property
    def num_index_heads(self) -> int:
        if self.selector == "csattn":
            return self.context.num_index_heads
        return int((*self.context.kv, *self.context.local_kv)[0].shape[0])

    @property
    def longest_list(self) -> int:
        """Context rows that a token attends to exactly."""
        first, second = self.near
        return first + self.top_k + self.view.context_len - second

    @property
    def has_selector(self) -> bool:
        """Whether one of the selectors that csattn is compared with chooses its rows."""
        return self.selector not in WITHOUT_ALL_KEYS

    def num_outside_window(self, tail_len: int) -> int:
        """Return how many of the tail_len rows that a token sees have left the tail's window: read only if chosen.

        Always 0 in full attention and over a sketch: such requests have `own` segments, or keep all of the tail near.
        """
        over_sketch = self.selector == "csattn" and isinstance(self.context.indexes[0], SketchIndex)
        stays = over_sketch or self.selector == "full"
        return 0 if stays else max(0, tail_len - self.view.config.window_len)

    def selects_per_row(self, tail_len: int) -> bool:
        """Whether a token that sees tail_len own rows chooses by `choices`, not in a search with other rows."""
        return self.has_selector or (self.selector == "csattn" and self.num_outside_window(tail_len) > 0)

    def attends_per_row(self, tail_len: int) -> bool:
        """Whether `RowByRow` attends for a token that sees tail_len own rows."""
        return not self.context.in_place or self.has_selector or self.num_outside_window(tail_len) > 0

    @property
    def looks_ahead(self) -> bool:
        return (self.top_k > 0 or self.has_selector) and bool(self.view.config.lookahead)

    @property
    def searches_attend(self) -> bool:
        """Whether searches also attend to the rest: only with the layer's own query, not with a predicted one."""
        return bool(self.sketches) and self.top_k > 0 and not self.looks_ahead and self.context.in_place

    @property
    def together(self) -> tuple[object, ...]:
        """A key: requests with equal keys are searched together."""
        config = self.view.config
        searched_for = self.context_id, self.top_k, config.sink_len, config.window_len, self.searches_attend
        return self.selector, self.looks_ahead, *searched_for
