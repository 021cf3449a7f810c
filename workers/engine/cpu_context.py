"""What the CPU engine knows of a context and of a request."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from csattn.artifact import Artifact
from csattn.rest import Moments, moments_of
from csattn.selector_names import SelectorName
from csattn.selectors import ContextView, Prepared, Selector
from csattn.sketch import SketchIndex
from offload.budget import require_host_memory
from offload.codecs.formats import KvFormat
from offload.coded_store import CodedStore, coded_bytes
from offload.host_store import HostStore
from offload.kv_store import KvStore
from workers.cpu_model.tape_ops import word


@dataclass(frozen=True, slots=True)
class CpuContext:
    """A loaded context. Steps attend to its rows as they are kept; who looks for the best rows reads them as built."""

    artifact: Artifact
    kv: list[Tensor]  # per layer [num_kv_heads, context_len, 2, head_dim], where the artifact maps it
    coded: CodedStore | None  # None: steps attend to kv
    next_queries: list[NDArray[np.float32] | None]  # per layer: what predicts the layer's queries; none for the first
    num_index_heads: int
    sketches: list[SketchIndex]  # per layer; none: the index is of lists
    # per layer, what selectors have made of the context: made before the first request with one, kept for all
    prepared: dict[SelectorName, list[Prepared]] = field(default_factory=dict)
    # per layer, for estimates of rows that are not read: by which rows may be chosen, made likewise
    moments: dict[tuple[int, int], list[Moments]] = field(default_factory=dict)

    @property
    def store(self) -> KvStore:
        """The rows that steps attend to."""
        return HostStore(self.kv) if self.coded is None else self.coded

    @property
    def context_len(self) -> int:
        return int(self.kv[0].shape[1])

    def moments_of(self, rows: slice) -> list[Moments]:
        """Of these rows, as steps attend to them, per layer."""
        store = self.store
        return [moments_of(store.stream(layer_idx, rows)) for layer_idx in range(len(self.kv))]

    @property
    def kv_bytes(self) -> int:
        return sum(layer.nbytes for layer in self._layers)

    @property
    def kv_words(self) -> NDArray[np.int64]:
        """[num_layers]: where each layer's rows begin."""
        return np.array([word(layer) for layer in self._layers], np.int64)

    @property
    def row_layout(self) -> tuple[int, int, int, int]:
        """Bytes of a row, bytes before its value, and what reads keys and values (0: they are plain)."""
        if self.coded is not None:
            codec = self.coded.codec
            return codec.row_bytes, codec.v_offset, *codec.readers
        row = self.kv[0][0, 0]
        return row.nbytes, row[0].nbytes, 0, 0

    @property
    def _layers(self) -> list[Tensor]:
        """What steps attend to."""
        return self.kv if self.coded is None else self.coded.layers

    @property
    def map_words(self) -> NDArray[np.int64]:
        """[num_layers]: where each layer's `next_queries` begin, 0: nowhere."""
        return np.array([word(matrix) for matrix in self.next_queries], np.int64)


def open_context(artifact: Artifact, kv_format: KvFormat | None) -> CpuContext:
    """kv_format: how its rows are kept; None: as the artifact maps them, which takes no memory.

    Raises MemoryPlanError where there is none for a copy.
    """
    num_layers = artifact.spec.model.num_layers
    kv = [artifact.layer_kv(layer_idx) for layer_idx in range(num_layers)]
    if kv_format is not None:
        remedy = "choose a KV codec of fewer bytes, or none: rows are then read where the artifact maps them"
        require_host_memory(f"the context in {kv_format}", coded_bytes(kv, kv_format), remedy)
    indexes = [artifact.layer_index(layer_idx) for layer_idx in range(num_layers)]
    return CpuContext(
        artifact,
        kv,
        None if kv_format is None else CodedStore(kv, kv_format),
        [None, *(index.next_query for index in indexes[:-1])],
        indexes[0].num_heads,
        [index for index in indexes if isinstance(index, SketchIndex)],
    )


@dataclass(frozen=True, slots=True)
class KeptChoice:
    """What a request's last search has chosen, for the tokens until the next one."""

    kv_indices: NDArray[np.int32]  # [num_layers, num_index_heads, top_k]
    valid_len: NDArray[np.int32]  # [num_layers, num_index_heads]


@dataclass(slots=True)
class CpuRequest:
    """A request in its slot."""

    slot: int
    context_id: int
    context: CpuContext
    view: ContextView
    selector: SelectorName  # full where everything is kept anyway
    selectors: list[Selector] | None = None  # per layer; None: csattn, whose searches are made together, full, window
    # per layer, what tells of the rows that are not chosen: one of these, or neither, and then they count nothing
    sketches: list[SketchIndex] = field(default_factory=list)
    moments: list[Moments] = field(default_factory=list)
    tail_len: int = 0
    near: tuple[int, int] = field(init=False)  # context rows [0, first) and [second, context_len) are attended to
    kept: KeptChoice | None = field(init=False, default=None)  # where not every token searches

    def __post_init__(self) -> None:
        middle, context_len = self.view.middle, self.view.context_len
        self.near = (context_len, context_len) if self.selector == "full" else (middle.start, middle.stop)
        if self.search_period > 1:
            sizes = len(self.context.kv), self.num_index_heads
            self.kept = KeptChoice(np.full((*sizes, self.top_k), -1, np.int32), np.zeros(sizes, np.int32))

    @property
    def search_period(self) -> int:
        """Tokens 0, so many, twice so many, ... of the request are searched for; 1 where nothing is."""
        return self.view.config.search_period if self.top_k > 0 else 1

    @property
    def top_k(self) -> int:
        """Rows that csattn selects for each index head."""
        middle = self.view.middle
        return min(self.view.top_k, middle.stop - middle.start) if self.selector == "csattn" else 0

    @property
    def num_index_heads(self) -> int:
        return self.context.num_index_heads if self.selector == "csattn" else int(self.context.kv[0].shape[0])

    @property
    def longest_list(self) -> int:
        """Rows that a token attends to, all but the tail."""
        first, second = self.near
        return first + self.top_k + self.view.context_len - second

    @property
    def looks_ahead(self) -> bool:
        return (self.top_k > 0 or self.selectors is not None) and bool(self.view.config.lookahead)

    @property
    def searches_attend(self) -> bool:
        """Whether searches attend to what they do not choose, with the query that they choose by: the layer's own."""
        return bool(self.sketches) and self.top_k > 0 and not self.looks_ahead

    @property
    def together(self) -> tuple[object, ...]:
        """Requests for which this is equal are searched for together."""
        config = self.view.config
        searched_for = self.context_id, self.top_k, config.sink_len, config.window_len, self.searches_attend
        return self.selector, self.looks_ahead, *searched_for
