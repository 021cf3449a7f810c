"""The fewest bytes that a step must read, and the best ratio over full attention that they allow."""

from csattn.config import IndexConfig
from workers.model_runner.shapes import ModelShape

ITEM_BYTES = 2  # of weights and KV: bfloat16
LIST_ENTRY_BYTES = 6  # int32 index, float16 score


def row_bytes(shape: ModelShape) -> int:
    """K and V of one token in one layer."""
    return 2 * shape.kv_width * ITEM_BYTES


def full_bytes(shape: ModelShape, kv_len: int) -> int:
    """What full attention reads in one layer for one request."""
    return row_bytes(shape) * kv_len


def rest_bytes(shape: ModelShape) -> int:
    """What a selection's estimate of the other rows reads in one layer: a KV head's moments."""
    return (2 + shape.head_dim) * 2 * shape.head_dim * ITEM_BYTES


def selected_bytes(shape: ModelShape, context_len: int, keep: float) -> int:
    """K and V of the selected rows in one layer for one request."""
    return row_bytes(shape) * max(1, round(keep * context_len))


def table_row_bytes(config: IndexConfig, context_len: int) -> int:
    """A centroid's row, or its list."""
    if config.layout == "rows":
        return context_len * config.score_bits // 8
    return config.list_entries(context_len) * LIST_ENTRY_BYTES


def table_bytes(shape: ModelShape, config: IndexConfig, context_len: int) -> int:
    """What a search reads of the tables in one layer for one request when every query head reads its own rows.

    Heads of a group that choose the same centroid may read its row once, so it can be less.
    """
    queries = shape.num_kv_heads if config.pool_group else shape.num_q_heads
    return queries * config.num_subspaces * table_row_bytes(config, context_len)


def index_bytes(shape: ModelShape, config: IndexConfig, context_len: int) -> int:
    """What the tables of one layer and one context take."""
    heads = shape.num_kv_heads if config.share_group else shape.num_q_heads
    return heads * config.num_subspaces * config.num_centroids * table_row_bytes(config, context_len)


def weight_bytes(shape: ModelShape) -> int:
    """All weights, the input embedding included."""
    embedding = 0 if shape.tied_embedding else shape.vocab_size * shape.hidden_size
    return (shape.streamed_params + embedding) * ITEM_BYTES


def best_ratio(shape: ModelShape, config: IndexConfig, context_len: int, batch_size: int, keep: float) -> float:
    """How much faster a whole step can at best be than with full attention, if both read at the same rate.

    As a step is usually counted: all weights once, the context's KV or the tables and the kept share of it.
    """
    full = weight_bytes(shape) + batch_size * shape.num_layers * full_bytes(shape, context_len)
    per_layer = table_bytes(shape, config, context_len) + selected_bytes(shape, context_len, keep)
    return full / (weight_bytes(shape) + batch_size * shape.num_layers * per_layer)
