"""Searches of one layer at a time in threads of this process. They select what search workers would select."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from csattn.artifact import Artifact
from csattn.cpu.team import Team
from csattn.index import ListIndex
from csattn.search import LayerSearch, SearchPool
from csattn.search.workspace import TokenSelections
from csattn.sketch import SketchIndex


@dataclass(frozen=True, slots=True, eq=False)
class RowSearch:
    """Rows of one step that continue the same context and search it in the same way."""

    context_id: int
    q: NDArray[np.float32]  # [num_rows, num_q_heads, head_dim], after RoPE
    sink_len: int
    window_len: int
    softmax_scale: float
    out: TokenSelections  # kv_indices [num_rows, num_index_heads, top_k]
    of_layers: dict[int, LayerSearch] = field(default_factory=dict)  # filled by a PoolSearcher, while its context stays


class PoolSearcher:
    """Owns the pool. The LayerSearch of each layer of a RowSearch is made once."""

    def __init__(self, threads: int | Team) -> None:
        self._pool = SearchPool(threads)
        self._indexes: dict[int, list[ListIndex | SketchIndex]] = {}
        self._waiting: list[LayerSearch] = []  # of the current layer, last first; the pool runs one at a time

    def load(self, context_id: int, artifact: Artifact) -> None:
        self._indexes[context_id] = artifact.indexes()

    def unload(self, context_id: int) -> None:
        del self._indexes[context_id]

    def start(self, layer_idx: int, searches: Sequence[RowSearch]) -> None:
        """Start searches of one layer. Their arrays must not be touched until `finish` has returned."""
        assert not self._waiting, "searches are under way; finish them first"
        waiting = [self._search(layer_idx, search) for search in reversed(searches)]
        if waiting:
            self._pool.start(waiting[-1])
        self._waiting = waiting

    def finish(self) -> None:
        """Wait until every `out` is filled."""
        waiting, self._waiting = self._waiting, []
        while waiting:
            self._pool.finish()
            waiting.pop()
            if waiting:
                self._pool.start(waiting[-1])

    def close(self) -> None:
        self._pool.close()
        self._indexes.clear()

    def _search(self, layer_idx: int, search: RowSearch) -> LayerSearch:
        if layer_idx not in search.of_layers:
            index, resident = self._indexes[search.context_id][layer_idx], (search.sink_len, search.window_len)
            search.of_layers[layer_idx] = LayerSearch(
                search.q, index, None, *resident, search.softmax_scale, search.out
            )
        return search.of_layers[layer_idx]
