"""What an index still finds as the tail grows: recorded queries and keys of a real model (see `makings`)."""

from concurrent.futures import Executor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.table_drift.makings import Layer, Part, list_makings, row_makings, turned_by
from bench.table_drift.recording import LongText
from csattn.config import IndexConfig
from csattn.index import LayerIndex
from csattn.search.reference import combine_group, top_k_of
from csattn.table.rows import RowTable
from csattn.table.tail import score_key

SINK_LEN, WINDOW_LEN, KEEP = 4, 256, 0.05
# queries of a point of measurement: tokens this far apart, the first with a window between the indexed rows and itself
NUM_QUERIES, STRIDE = 12, 10


def layers_of(text: LongText) -> list[Layer]:
    return [
        Layer(q.astype(np.float32), k.astype(np.float32), text.frequencies) for q, k in zip(text.q, text.k, strict=True)
    ]


def measure_point(
    layer: Layer, context_len: int, tail_len: int, config: IndexConfig, threads: Executor
) -> dict[str, Any]:
    """Every making's figures for one layer and one length of the tail."""
    make = row_makings if config.layout == "rows" else list_makings
    makings, build_s = make(layer, context_len, tail_len, config, threads)
    index = makings["streamed"][0].index
    num_keys = context_len + tail_len
    tokens = num_keys + WINDOW_LEN + STRIDE * np.arange(NUM_QUERIES)
    back = turned_by(layer.q[:, tokens], context_len - 1 - tokens, layer.frequencies)
    at_build = centroid_cosine(layer.q[:, :context_len:16], index)
    return {
        "tail_len": tail_len,
        "clipped_codes": clipped_share(layer.k[:, context_len:num_keys], index),
        "cosine_to_centroid": centroid_cosine(layer.q[:, tokens], index) / at_build,
        "cosine_turned_back": centroid_cosine(back, index) / at_build,
        "build_s": build_s,
        "makings": {name: quality(layer, tokens, context_len, parts) for name, parts in makings.items()},
        "shared_out": {
            name: quality(layer, tokens, context_len, parts, shared_out=True)
            for name, parts in makings.items()
            if len(parts) > 1
        },
    }


def clipped_share(keys: NDArray[np.float32], index: LayerIndex) -> float:
    """The share of these keys' codes [num_kv_heads, num_keys, head_dim] that the scales cannot hold."""
    if not isinstance(index.table, RowTable) or not keys.shape[1]:
        return 0.0
    largest = index.table.largest_code + 0.5
    clipped = [(np.abs(score_key(k, index)) > largest * index.table.scales).mean() for k in keys.transpose(1, 0, 2)]
    return float(np.mean(clipped))


def centroid_cosine(q: NDArray[np.float32], index: LayerIndex) -> float:
    """How near the parts of q [num_q_heads, num_tokens, head_dim] are to their centroids: mean, weighted by norms."""
    group_size, nearness, norms = len(q) // index.num_heads, 0.0, 0.0
    for row, tokens in enumerate(q):
        head = row // group_size
        parts = (tokens @ index.query_basis[head]).reshape(len(tokens), index.num_subspaces, -1)
        nearness += float(np.einsum("tbd,bcd->tbc", parts, index.codebooks[head]).max(-1).sum())
        norms += float(np.linalg.norm(parts, axis=-1).sum())
    return nearness / norms


def quality(
    layer: Layer, tokens: NDArray[np.int64], context_len: int, parts: list[Part], shared_out: bool = False
) -> dict[str, float]:
    """Means over tokens and KV heads of what is selected, the sinks left out.

    shared_out: every part chooses for itself, as many rows as its share of all rows; scores need not compare.
    """
    num_kv_heads, num_keys = len(layer.k), sum(part.num_rows for part in parts)
    group_size, top_k = len(layer.q) // num_kv_heads, round(KEEP * num_keys)
    figures: dict[str, list[float]] = {
        name: [] for name in ("recall", "mass", "context_recall", "tail_recall", "score_error")
    }
    for token in tokens:
        for head in range(num_kv_heads):
            group = layer.q[head * group_size : (head + 1) * group_size, token]
            exact = (group @ layer.k[head, :num_keys].T).astype(np.float64)
            shares = _shares(exact, layer.softmax_scale)
            rows = [[part.scores(q, head) for part in parts] for q in group]
            choose = _choose_apart if shared_out else _choose_together
            best = SINK_LEN + top_k_of(shares[SINK_LEN:], top_k)
            _compare(figures, choose(rows, top_k, layer.softmax_scale), best, shares, context_len)
            scored = np.stack([np.concatenate([of[1] for of in row]) for row in rows])
            if scored.all():
                scores = np.stack([np.concatenate([of[0] for of in row]) for row in rows])
                figures["score_error"].append(_relative_error(scores, exact))
    return {name: float(np.mean(values)) for name, values in figures.items() if values}


Scores = tuple[NDArray[np.float64], NDArray[np.bool_]]


def _choose_together(rows: list[list[Scores]], top_k: int, softmax_scale: float) -> NDArray[np.int64]:
    """rows: of each query row, each part's scores."""
    whole = [(np.concatenate([of[0] for of in row]), np.concatenate([of[1] for of in row])) for row in rows]
    worth, _ = combine_group(whole, softmax_scale)
    return SINK_LEN + top_k_of(worth[SINK_LEN:], top_k)


def _choose_apart(rows: list[list[Scores]], top_k: int, softmax_scale: float) -> NDArray[np.int64]:
    num_keys, chosen, first = sum(len(of[0]) for of in rows[0]), [], 0
    for part in range(len(rows[0])):
        worth, _ = combine_group([row[part] for row in rows], softmax_scale)
        skipped = SINK_LEN if part == 0 else 0
        chosen.append(first + skipped + top_k_of(worth[skipped:], round(top_k * len(worth) / num_keys)))
        first += len(worth)
    return np.concatenate(chosen)


def _compare(
    figures: dict[str, list[float]],
    chosen: NDArray[np.int64],
    best: NDArray[np.int64],
    shares: NDArray[np.float64],
    context_len: int,
) -> None:
    """Recall of the exact choice, also of its rows in context and tail apart; mass as a share of what it has."""
    found, in_tail = np.isin(best, chosen), best >= context_len
    figures["recall"].append(float(found.mean()))
    figures["mass"].append(float(shares[chosen].sum() / shares[best].sum()))
    for name, where in (("context_recall", ~in_tail), ("tail_recall", in_tail)):
        if where.any():
            figures[name].append(float(found[where].mean()))


def _shares(scores: NDArray[np.float64], softmax_scale: float) -> NDArray[np.float64]:
    weights = np.exp(softmax_scale * (scores - scores.max(1, keepdims=True)))
    shares: NDArray[np.float64] = (weights / weights.sum(1, keepdims=True)).sum(0)
    return shares


def _relative_error(approximate: NDArray[np.float64], exact: NDArray[np.float64]) -> float:
    """Root mean square of the scores' error, as a share of their spread; both up to a constant of a query's own."""
    error = (approximate - exact) - (approximate - exact).mean(1, keepdims=True)
    return float(np.sqrt((error**2).mean() / exact.var(1).mean()))
