"""How other methods choose rows on a device, for whole steps beside csattn's.

other_methods.cu computes their scores. The choice among these is that of csattn's lists (other_choice.cu): among
float32 scores, query head by query head, which takes longer than `default`'s. Attention is csattn's own. Left out, to
the methods' advantage: SparQ's mean value and its share, and H2O's record of attention received. Quest reads whole
pages: up to 15 rows fewer than K. Definitions: `csattn.selectors`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench.decode.workload import Workload
from csattn.batch import DeviceSelection, make_device_selection
from csattn.config import SearchConfig
from csattn.cuda import CudaKernel, cuda_kernel
from csattn.search.device import DeviceIndexes, ListsShape
from csattn.search.device.compiling import QUERY_TYPES, multiprocessors
from csattn.search.device.lists_pass import ListsPass, places_of
from csattn.selectors.key_clusters import kmeans, nearest_centroids
from csattn.selectors.pqcache import split_parts
from workers.engine.gpu.on_device import StepSearch

SCORES, CHOICE = (Path(__file__).with_name(name) for name in ("other_methods.cu", "other_choice.cu"))
THREADS, BLOCKS_PER_MULTIPROCESSOR = 256, 8
CROWDED = 512  # a bin with more keys is divided further; in others, keys are compared one by one
# as in `csattn.selectors`
PAGE_LEN = 16  # Quest's
SUBSPACES, CENTROIDS, ITERATIONS, SEED = 2, 256, 15, 1234  # PQCache's
CLUSTERED_KEYS = 4096  # about so many, for k-means: the quality of centroids does not change a search's time


def components(head_dim: int) -> int:
    """Return the number of components of q that SparQ's scores use."""
    return max(1, head_dim // 4)


@dataclass(frozen=True, slots=True)
class MethodIndex:
    """What a method's search reads of one layer of a context: four tensors, for the four addresses of `DeviceLists`."""

    parts: tuple[Tensor, Tensor, Tensor, Tensor]
    length: int  # keys, or pages


def _padded(*parts: Tensor, length: int) -> MethodIndex:
    first, second, third, fourth = (*parts, *3 * parts)[:4]
    return MethodIndex((first, second, third, fourth), length)


def quest_index(keys: Tensor) -> MethodIndex:
    """Return bounds of pages [num_kv_heads, num_pages, 2, head_dim]. keys: [num_kv_heads, context_len, head_dim]."""
    num_pages = keys.shape[1] // PAGE_LEN
    pages = keys[:, : num_pages * PAGE_LEN].view(keys.shape[0], num_pages, PAGE_LEN, keys.shape[2])
    return _padded(torch.stack([pages.amin(2), pages.amax(2)], dim=2), length=num_pages)


def sparq_index(keys: Tensor) -> MethodIndex:
    """Return a copy of the keys in which each component is contiguous: [num_kv_heads, head_dim, context_len]."""
    return _padded(keys.transpose(1, 2).contiguous(), length=keys.shape[1])


def pqcache_index(keys: Tensor) -> MethodIndex:
    """Return codes [num_kv_heads, context_len, SUBSPACES] uint8, and centroids in the keys' dtype."""
    step = max(1, keys.shape[1] // CLUSTERED_KEYS)
    parts = split_parts(keys[:, ::step].float().cpu(), SUBSPACES).transpose(0, 1)
    centroids = kmeans(parts.flatten(0, 1), CENTROIDS, ITERATIONS, SEED)
    centroids = centroids.view(*parts.shape[:2], CENTROIDS, -1).to(keys)
    own = split_parts(keys, SUBSPACES)
    codes = [nearest_centroids(part.float(), centroids[:, b].float()) for b, part in enumerate(own)]
    return _padded(torch.stack(codes, dim=-1).to(torch.uint8), centroids, length=keys.shape[1])


def h2o_index(keys: Tensor) -> MethodIndex:
    """Return a placeholder: H2O searches nothing."""
    return _padded(keys.new_zeros(16), length=keys.shape[1])


INDEXES: Mapping[str, Callable[[Tensor], MethodIndex]] = {
    "quest": quest_index,
    "sparq": sparq_index,
    "pqcache": pqcache_index,
    "h2o": h2o_index,
}


def index_bytes(method: str, work: Workload) -> int:
    """Return the bytes that a method keeps besides the KV, for one layer of one context."""
    heads, item = work.heads, 2
    keys = heads.num_kv_heads * work.context_len
    return {
        "quest": keys // PAGE_LEN * 2 * heads.head_dim * item,
        "sparq": keys * heads.head_dim * item,
        "pqcache": keys * SUBSPACES + heads.num_kv_heads * CENTROIDS * heads.head_dim * item,
        "h2o": 0,
    }[method]


def read_bytes(method: str, work: Workload) -> int:
    """Return the bytes that a search reads of the index of one layer of one context."""
    share = components(work.heads.head_dim) / work.heads.head_dim if method == "sparq" else 1.0
    return round(share * index_bytes(method, work))


class MethodSearch(ListsPass):
    """Chooses rows for a batch by the scores of one of the methods, with the interface of `DeviceSearch`."""

    def __init__(self, method: str, work: Workload, dtype: torch.dtype) -> None:
        heads = work.heads
        self.method = method
        # a group's queries are combined at the choice, by their shares (Quest, PQCache), or in the scores (SparQ)
        group_size = 1 if method == "sparq" else heads.group_size
        super().__init__(
            ListsShape(
                num_index_heads=heads.num_kv_heads,
                group_size=group_size,
                head_dim=heads.head_dim,
                num_subspaces=heads.head_dim // 8,  # unused: no list is searched
                num_centroids=1,
            ),
            batch_size=work.batch_size,
            max_context_len=work.context_len // PAGE_LEN if method == "quest" else work.context_len,
            softmax_scale=heads.softmax_scale,
            query_dtype=dtype,
            device=work.device,
        )
        self._defines = {
            "GROUP_SIZE": heads.group_size,
            "NUM_HEADS": heads.num_kv_heads,
            "HEAD_DIM": heads.head_dim,
            "THREADS": THREADS,
            "QUERY": QUERY_TYPES[dtype],
            "QUERY_IS_HALF": int(dtype == torch.float16),
            "PAGE_LEN": PAGE_LEN,
            "COMPONENTS": components(heads.head_dim),
            "SUBSPACES": SUBSPACES,
            "CENTROIDS": CENTROIDS,
        }
        self._choices = torch.zeros(2, *self._choices.shape, dtype=torch.uint8, device=work.device)
        self._most_blocks = BLOCKS_PER_MULTIPROCESSOR * multiprocessors(work.device)
        self._kernels: dict[str, CudaKernel] = {}
        slots = work.batch_size * heads.num_kv_heads
        self._products = torch.zeros(slots, SUBSPACES, CENTROIDS, heads.group_size, device=work.device)

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
        self.run(q, indexes, layer_idx, context_ids)
        self.choose(indexes, layer_idx, context_ids, out, top_ks)

    def run(self, q: Tensor, indexes: DeviceIndexes, layer_idx: int, context_ids: Tensor) -> None:
        """See `ListsPass.run`."""
        table, scores = indexes.tables[layer_idx], (self.max_keys, self._scores)
        if self.method == "quest":
            lanes = self.shape.head_dim // 8
            self._score("score_pages", self.max_keys * lanes, q, table, context_ids, *scores, self._choices)
        elif self.method == "sparq":
            self._score("score_components", self.max_keys // 8, q, table, context_ids, *scores, self._choices)
        else:
            products = SUBSPACES * CENTROIDS * 32
            self._score("multiply_centroids", products, q, table, context_ids, self._products, self._choices)
            self._score("add_products", self.max_keys // 4, table, context_ids, self._products, *scores)
        statistics = self._scores, self.max_keys, self._statistics
        places = *places_of(indexes, context_ids), self._softmax_scale
        self._choice("sum_tiles").launch(self._grid, THREADS, *places, *statistics)

    def _mark(self, places: tuple[Tensor | int | None, ...], out: DeviceSelection) -> None:
        """See `ListsPass._mark`; here crowded bins are refined first."""
        scores = self._group_scores, self.max_keys
        for name in ("refine_bins", "count_ties"):
            self._choice(name).launch(self._choosing_grid, THREADS, *places, *scores, self._choices)
        marked = self._marks, self._choices, out.kv_indices, out.kv_indices.shape[2]
        self._choice("find_among_fine").launch(self._choosing_grid, THREADS, *places, *scores, *marked)

    def _choice(self, name: str) -> CudaKernel:
        """Return a kernel of other_choice.cu, for the number of queries that the choice combines."""
        if name not in self._kernels:
            defines = {**self._defines, "GROUP_SIZE": self.shape.group_size, "CROWDED": CROWDED}
            self._kernels[name] = cuda_kernel(CHOICE, name, defines, early_start=True)
        return self._kernels[name]

    def _score(self, name: str, num_threads: int, *args: Tensor | int) -> None:
        """Enqueue a kernel of other_methods.cu, with `num_threads` for each slot, or as many as there is room for."""
        if name not in self._kernels:
            self._kernels[name] = cuda_kernel(SCORES, name, self._defines, early_start=True)
        heads = self.shape.num_index_heads
        blocks = max(1, min(-(-num_threads // THREADS), self._most_blocks // (heads * self._batch_size)))
        self._kernels[name].launch((blocks, heads, self._batch_size), THREADS, *args)


class PageSearch(MethodSearch):
    """Chooses whole pages: as many as fit into K rows, and none that has resident rows."""

    def __init__(self, work: Workload, dtype: torch.dtype, search: SearchConfig) -> None:
        super().__init__("quest", work, dtype)
        num_rows = search.top_k(work.context_len)
        config = SearchConfig(sink_len=-(-search.sink_len // PAGE_LEN), window_len=-(-search.window_len // PAGE_LEN))
        self._pages = DeviceIndexes(0, work.num_contexts, config, work.device)
        self._pages.context_lens.fill_(work.context_len // PAGE_LEN)
        self._pages.top_ks.fill_(num_rows // PAGE_LEN)
        sizes = work.batch_size, work.heads.num_kv_heads, num_rows // PAGE_LEN
        self._chosen = make_device_selection(*sizes, work.device)

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
        self._pages.tables, pages, num_rows = indexes.tables, self._chosen, out.kv_indices.shape[2]
        super().search(q, self._pages, layer_idx, context_ids, pages)
        rows = out.kv_indices, out.valid_len, num_rows
        self._score("rows_of_pages", num_rows, pages.kv_indices, pages.valid_len, pages.kv_indices.shape[2], *rows)


class KeptRows:
    """The rows that H2O has kept: the same for all tokens, here the first rows after the sinks."""

    def __init__(self, work: Workload, search: SearchConfig) -> None:
        self._rows = torch.arange(search.sink_len, search.sink_len + search.top_k(work.context_len))
        self._written = set[int]()

    def search(
        self,
        q: Tensor,
        indexes: DeviceIndexes,
        layer_idx: int,
        context_ids: Tensor,
        out: DeviceSelection,
        top_ks: Tensor | None = None,
    ) -> None:
        """Write the rows to `out` once, before a step is captured."""
        if out.kv_indices.data_ptr() not in self._written:
            self._written.add(out.kv_indices.data_ptr())
            out.kv_indices.copy_(self._rows)
            out.valid_len.fill_(len(self._rows))


def search_of(method: str, work: Workload, dtype: torch.dtype, search: SearchConfig) -> StepSearch:
    """Return the search by which a method chooses rows for the batch."""
    if method == "h2o":
        return KeptRows(work, search)
    return PageSearch(work, dtype, search) if method == "quest" else MethodSearch(method, work, dtype)
