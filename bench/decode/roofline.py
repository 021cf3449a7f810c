"""The fewest bytes that a step must read."""

from bench.decode.variants import num_segments
from bench.streamed import streamed_params
from csattn.config import IndexConfig, ListConfig, SearchConfig, SketchConfig, num_index_heads
from csattn.models.spec import ModelSpec
from csattn.sketch.codes import BLOCK_KEYS, num_blocks, num_coords
from csattn.table.lists import list_bytes

ITEM_BYTES = 2  # of weights and KV: bfloat16


def row_bytes(shape: ModelSpec) -> int:
    """Return the bytes of K and V of one token in one layer."""
    return 2 * shape.heads.kv_width * ITEM_BYTES


def full_bytes(shape: ModelSpec, kv_len: int) -> int:
    """Return the bytes that full attention reads in one layer for one request."""
    return row_bytes(shape) * kv_len


def moments_bytes(shape: ModelSpec) -> int:
    """Return the bytes of one index head's moments in one layer, from which the rest is estimated."""
    return (2 + shape.head_dim) * 2 * shape.head_dim * ITEM_BYTES


def selected_bytes(shape: ModelSpec, context_len: int, keep: float) -> int:
    """Return the bytes of K and V of the selected rows in one layer for one request."""
    return row_bytes(shape) * max(1, round(keep * context_len))


def index_bytes(shape: ModelSpec, config: IndexConfig, context_len: int) -> int:
    """Return the bytes of the index of one layer of one context."""
    heads = num_index_heads(config, shape.num_q_heads, shape.num_kv_heads)
    if isinstance(config, SketchConfig):
        words = config.words(shape.head_dim)
        codes = num_blocks(context_len) * BLOCK_KEYS * sum(words) * 4
        marks = num_blocks(context_len) * BLOCK_KEYS // 8
        transforms = shape.head_dim * (2 * 4 + 2 * num_coords(*words) * 2)
        return heads * (codes + marks + num_segments(config, context_len) * transforms)
    return heads * config.num_subspaces * config.num_centroids * _list_bytes(config, context_len)


def search_bytes(shape: ModelSpec, config: IndexConfig, context_len: int, batch_size: int, num_contexts: int) -> int:
    """Return the bytes that a search reads of the index in one layer. Requests on one context may read its sketch once.

    Of lists, these are the ones of each query's nearest centroids. Heads of a group with the same centroid may read its
    list once, so the true number can be less.
    """
    if isinstance(config, SketchConfig):
        return num_contexts * index_bytes(shape, config, context_len)
    return batch_size * shape.num_q_heads * config.num_subspaces * _list_bytes(config, context_len)


def _list_bytes(config: ListConfig, context_len: int) -> int:
    return list_bytes(config.list_entries(context_len), context_len)


def layer_bytes(
    shape: ModelSpec,
    config: IndexConfig,
    search: SearchConfig,
    context_len: int,
    resident_len: int,
    batch_size: int,
    num_contexts: int,
) -> dict[str, int]:
    """Return the bytes of device memory that search and attention must read in one layer: of the index, and of rows."""
    heads = num_index_heads(config, shape.num_q_heads, shape.num_kv_heads)
    has_rest_pass = search.rest == "sketch" and (search.lookahead or search.search_period > 1)
    passes = 1 / search.search_period + has_rest_pass  # a pass for the rest at every step, by its own query
    # heads with a choice of their own read rows of their own
    selected = selected_bytes(shape, context_len, search.keep) * heads // shape.num_kv_heads
    moments = heads * moments_bytes(shape) if search.rest == "moments" else 0
    return {
        "index": round(passes * search_bytes(shape, config, context_len, batch_size, num_contexts)),
        "rows": batch_size * (selected + resident_len * row_bytes(shape) + moments),
    }


def weight_bytes(shape: ModelSpec) -> int:
    """Return the bytes of the weights that a token needs (of experts, the chosen ones), with the input embedding."""
    embedding = 0 if shape.tied_embedding else shape.vocab_size * shape.hidden_size
    return (streamed_params(shape) + embedding) * ITEM_BYTES
