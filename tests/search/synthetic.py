"""Synthetic indexes of random keys, made in a few lines of numpy, and searches over them."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from csattn.index import ListIndex
from csattn.search.run import LayerSearch
from csattn.search.workspace import SearchWorkspace, TokenSelections, empty_token_selections
from csattn.selection import Selection
from csattn.sketch import SketchIndex
from csattn.sketch.codes import coord_bits, pack_codes, pack_marks
from csattn.sketch.index import MARKED_SHARE
from csattn.table.lists import ListTable, lists_of
from csattn.table.tail import ListTail


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSpec:
    """Sizes and layout of the index of one synthetic layer."""

    layout: str = "sketch"  # or lists
    context_len: int = 1000
    num_heads: int = 2
    head_dim: int = 32
    num_subspaces: int = 8
    num_centroids: int = 6
    list_len: float = 0.25
    weigh_by_norm: bool = True
    num_fine: int = 2
    num_coarse: int = 1
    segment_len: int = 3072
    distinct_keys: int = 0  # how many different keys there are, repeated in turn; 0: all keys differ
    seed: int = 0


def make_keys(spec: IndexSpec, rng: np.random.Generator) -> NDArray[np.float32]:
    """Return random keys [num_heads, context_len, head_dim]."""
    keys = rng.standard_normal((spec.num_heads, spec.context_len, spec.head_dim), dtype=np.float32)
    if spec.distinct_keys:
        keys = keys[:, np.arange(spec.context_len) % spec.distinct_keys]
    return keys


@lru_cache(maxsize=16)
def make_index(spec: IndexSpec) -> ListIndex | SketchIndex:
    """Return an index whose arrays are read-only, as those of a memory map."""
    index = make_list_index(spec) if spec.layout == "lists" else make_sketch_index(spec)
    arrays = [value for value in vars(index).values() if isinstance(value, np.ndarray)]
    if isinstance(index, ListIndex):
        arrays += index.table.arrays.values()
    for array in arrays:
        array.flags.writeable = False
    return index


def make_sketch_index(spec: IndexSpec) -> SketchIndex:
    """Return a sketch of random codes and transforms. If keys are repeated, it has a single segment."""
    rng = np.random.default_rng(spec.seed)
    heads, head_dim, bits = spec.num_heads, spec.head_dim, coord_bits(spec.num_fine, spec.num_coarse)
    codes = rng.normal(0.5, 0.2, (heads, spec.context_len, len(bits))).clip(0, 0.999)
    codes = (codes * 2.0**bits).astype(np.uint8)
    if spec.distinct_keys:
        codes = codes[:, np.arange(spec.context_len) % spec.distinct_keys]
    starts = [0] if spec.distinct_keys else [*range(0, spec.context_len, spec.segment_len)]
    shape = heads, len(starts)
    return SketchIndex(
        codes=pack_codes(codes, spec.num_fine, spec.num_coarse),
        marks=pack_marks(make_marks(spec, starts)),
        num_fine=spec.num_fine,
        segment_starts=np.array(starts, np.int32),
        key_mean=rng.standard_normal((*shape, head_dim)).astype(np.float32),
        query_transform=(rng.standard_normal((*shape, head_dim, len(bits))) / 2.0**bits).astype(np.float16),
        value_mean=rng.standard_normal((*shape, head_dim)).astype(np.float32),
        value_transform=(rng.standard_normal((*shape, len(bits), head_dim)) / 2.0 ** bits[:, None]).astype(np.float16),
        context_len=spec.context_len,
    )


def make_marks(spec: IndexSpec, starts: list[int]) -> NDArray[np.bool_]:
    """Return marks [num_heads, context_len]: `num_marked` rows of each head, the last rows of each segment."""
    marked = np.zeros((spec.num_heads, spec.context_len), np.bool_)
    for start, end in zip(starts, [*starts[1:], spec.context_len], strict=True):
        marked[:, end - (end - start) // MARKED_SHARE : end] = True
    return marked


def make_list_index(spec: IndexSpec) -> ListIndex:
    """Return the index of lists of random keys."""
    rng = np.random.default_rng(spec.seed)
    keys = make_keys(spec, rng)
    key_mean = keys.mean(axis=1) if spec.context_len else np.zeros((spec.num_heads, spec.head_dim), np.float32)
    subspace_dim = spec.head_dim // spec.num_subspaces
    shape = spec.num_heads, spec.num_subspaces, spec.num_centroids, subspace_dim
    codebooks = rng.standard_normal(shape).astype(np.float32)
    codebooks /= np.linalg.norm(codebooks, axis=-1, keepdims=True)
    parts = (keys - key_mean[:, None]).reshape(spec.num_heads, -1, spec.num_subspaces, subspace_dim)
    scores = np.einsum("hnbd,hbjd->hbjn", parts, codebooks, optimize=True).astype(np.float32)
    return ListIndex(codebooks, key_mean, make_lists(scores, spec.list_len), weigh_by_norm=spec.weigh_by_norm)


def make_lists(scores: NDArray[np.float32], list_len: float) -> ListTable:
    """Return the Top-L lists of scores [num_heads, num_subspaces, num_centroids, context_len]."""
    length = max(1, round(list_len * scores.shape[-1]))
    halves = scores.astype(np.float16) + np.float16(0)
    order = np.argsort(-halves, axis=-1, kind="stable")[..., :length]
    listed = np.zeros(scores.shape, np.bool_)
    np.put_along_axis(listed, order, True, axis=-1)
    return lists_of(listed, halves)


def make_queries(spec: IndexSpec, group_size: int, seed: int = 1, scale: float = 1.0) -> NDArray[np.float32]:
    """Return random queries [num_q_heads, head_dim]."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((spec.num_heads * group_size, spec.head_dim), dtype=np.float32)
    return q * np.float32(scale)


def append_keys(tail: ListTail, spec: IndexSpec, num_rows: int, seed: int = 2) -> ListTail:
    """Append `num_rows` random keys to the tail and return it."""
    rng = np.random.default_rng(seed)
    for _ in range(num_rows):
        tail.append(rng.standard_normal((spec.num_heads, spec.head_dim), dtype=np.float32))
    return tail


def make_tail_of(index: ListIndex | SketchIndex, spec: IndexSpec, num_rows: int) -> ListTail | None:
    """Return a tail of `num_rows` random keys, or None for no rows."""
    return append_keys(ListTail(index), spec, num_rows) if num_rows else None


def search(
    q: NDArray[np.float32],  # [num_q_heads, head_dim]
    index: ListIndex | SketchIndex,
    tail: ListTail | None,
    sink_len: int,
    window_len: int,
    softmax_scale: float,
    workspace: SearchWorkspace,
    out: Selection,
) -> None:
    """Search for one token in this thread: the compiled counterpart of `reference.search`."""
    stacked = TokenSelections(out.kv_indices[None], out.valid_len[None])
    LayerSearch(q[None], index, tail, sink_len, window_len, softmax_scale, stacked).run(workspace)


def poisoned_selection(num_heads: int, top_k: int) -> Selection:
    """Return an output selection filled with values that no search may leave there."""
    out = empty_token_selections(1, num_heads, top_k)[0]
    out.kv_indices[:] = -777
    out.valid_len[:] = -777
    return out


def poisoned_workspace(num_bytes: int = 1 << 20) -> SearchWorkspace:
    """Return scratch memory that reads as NaN in every float type."""
    workspace = SearchWorkspace()
    workspace.reserve(num_bytes)[:] = 0xFF
    return workspace
