"""How fast is the search on this machine's CPU? `python -m bench.search [--json FILE] [--quick]`.

One step is the search of one layer: 8 KV heads, 4 query heads each, 2 % of the context chosen. At every size the
kernels must agree with the reference before they are timed. Cold figures rotate over indexes that together exceed the
last-level cache; hot ones search one head with one query repeatedly.
"""

import itertools
import os
import time
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.timing import finish, gate, measure, options_parser, read_bandwidth_gbps
from csattn.config import SketchConfig
from csattn.index import ListIndex
from csattn.search import LayerSearch, SearchPool, SearchWorkspace, TokenSelections, reference
from csattn.search.workspace import empty_token_selections
from csattn.sketch import SketchIndex
from csattn.sketch.codes import BLOCK_KEYS, num_blocks, num_coords, pack_marks
from csattn.sketch.index import MARKED_SHARE
from csattn.sketch.rest import attend_rest
from csattn.table.lists import ListTable, list_bytes, lists_of

NUM_HEADS, GROUP_SIZE, HEAD_DIM = 8, 4, 128
SINK_LEN, WINDOW_LEN, SOFTMAX_SCALE, KEEP = 4, 64, HEAD_DIM**-0.5, 0.02
TABLE_BYTES = 400 << 20  # about the size of the indexes: more than a last-level cache holds
NUM_QUERIES = 16  # that the cold runs cycle through
PATTERN_WORDS = 1_000_003  # a pattern of prime length saves minutes of random numbers
NUM_SUBSPACES, LIST_LEN = 8, 0.25  # of lists; their length is a share of the context's
LAYOUTS = "sketch", "lists"


def make_layer(layout: str, context_len: int) -> list[ListIndex | SketchIndex]:
    """Make layers to be searched in turn, more than a last-level cache holds. One layer of lists is enough, because
    each query reads other lists."""
    if layout == "lists":
        return [make_lists(context_len, NUM_HEADS)]
    one = random_sketch(context_len, NUM_HEADS, HEAD_DIM, 0)
    num_layers = max(1, min(NUM_QUERIES, TABLE_BYTES // one.num_bytes))
    return [one, *(random_sketch(context_len, NUM_HEADS, HEAD_DIM, seed) for seed in range(1, num_layers))]


def random_sketch(context_len: int, num_heads: int, head_dim: int, seed: int) -> SketchIndex:
    """Make a sketch of the default configuration, with normally distributed codes.

    The time of scores does not depend on the codes' values, and that of choices only by what it samples.
    """
    config, rng = SketchConfig(), np.random.default_rng(seed)
    num_fine, num_coarse = config.words(head_dim)
    starts = np.array(config.segment_starts(context_len), np.int32)
    coords, shape = num_coords(num_fine, num_coarse), (num_heads, len(starts))
    codes = np.empty((num_heads, num_blocks(context_len), num_fine + num_coarse, BLOCK_KEYS), np.uint32)
    codes[:, :, :num_fine] = np.resize(_bell_shaped_words(rng, 4), codes[:, :, :num_fine].shape)
    codes[:, :, num_fine:] = np.resize(_bell_shaped_words(rng, 2), codes[:, :, num_fine:].shape)
    energy = 1 / (1 + np.arange(coords))
    return SketchIndex(
        codes=codes,
        marks=pack_marks(_marks(num_heads, context_len, starts)),
        num_fine=num_fine,
        segment_starts=starts,
        key_mean=rng.standard_normal((*shape, head_dim), dtype=np.float32),
        query_transform=(0.2 * rng.standard_normal((*shape, head_dim, coords)) * np.sqrt(energy)).astype(np.float16),
        value_mean=rng.standard_normal((*shape, head_dim), dtype=np.float32),
        value_transform=(0.1 * rng.standard_normal((*shape, coords, head_dim))).astype(np.float16),
        context_len=context_len,
    )


def _marks(num_heads: int, context_len: int, starts: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Mark as many rows of each segment as a build does, evenly spaced."""
    marked = np.zeros((num_heads, context_len), np.bool_)
    for start, end in zip(starts, [*starts[1:], context_len], strict=True):
        marked[:, start + MARKED_SHARE - 1 : end : MARKED_SHARE] = True
    return marked


def _bell_shaped_words(rng: np.random.Generator, bits: int) -> NDArray[np.uint32]:
    words = np.zeros(PATTERN_WORDS, np.uint32)
    for shift in range(0, 32, bits):
        codes = rng.normal(2 ** (bits - 1), 2 ** (bits - 2), PATTERN_WORDS).clip(0, 2**bits - 1)
        words |= codes.astype(np.uint32) << np.uint32(shift)
    return words


def make_lists(context_len: int, num_heads: int) -> ListIndex:
    """Make a layer's index of random lists."""
    rng = np.random.default_rng(context_len)
    list_len = round(LIST_LEN * context_len)
    of_centroid = num_heads * NUM_SUBSPACES * list_bytes(list_len, context_len)
    num_centroids = max(2, min(32, TABLE_BYTES // of_centroid))
    shape = num_heads, NUM_SUBSPACES, num_centroids
    codebooks = rng.standard_normal((*shape, HEAD_DIM // NUM_SUBSPACES), dtype=np.float32)
    codebooks /= np.linalg.norm(codebooks, axis=-1, keepdims=True)
    mean = np.zeros((num_heads, HEAD_DIM), np.float32)
    return ListIndex(codebooks, mean, _random_lists(rng, shape, context_len, list_len), True)


def read_bytes(layout: str, context_len: int) -> int:
    """Return the bytes that an index head reads: its sketch once, or lists for each of its query heads."""
    if layout == "sketch":
        return random_sketch(1, 1, HEAD_DIM, 0).codes.shape[2] * 4 * context_len
    return GROUP_SIZE * NUM_SUBSPACES * list_bytes(round(LIST_LEN * context_len), context_len)


def _random_lists(rng: np.random.Generator, shape: tuple[int, ...], context_len: int, list_len: int) -> ListTable:
    """Make lists that are windows of one random order of the keys."""
    places = rng.permutation(context_len).astype(np.int32)
    scores, of_heads = rng.normal(3, 1, context_len).astype(np.float16), []
    for _ in range(shape[0]):  # head by head, because lists are large before they are packed
        starts = rng.integers(context_len, size=(1, *shape[1:], 1), dtype=np.int32)
        listed = (places - starts) % np.int32(context_len) < list_len
        of_heads.append(lists_of(listed, np.broadcast_to(scores, listed.shape)))
    arrays = {name: np.concatenate([table.arrays[name] for table in of_heads]) for name in of_heads[0].arrays}
    return ListTable(**arrays, list_len=list_len, context_len=context_len)


def only_first_head(index: ListIndex | SketchIndex) -> ListIndex | SketchIndex:
    if isinstance(index, ListIndex):
        table = index.table.of_heads(slice(1))
        return ListIndex(index.codebooks[:1], index.key_mean[:1], table, index.weigh_by_norm)
    names = "codes", "marks", "key_mean", "query_transform", "value_mean", "value_transform"
    return replace(index, **{name: getattr(index, name)[:1] for name in names})


def measure_layout(layout: str, context_len: int, peaks: dict[int, float], seconds: float) -> dict[str, Any]:
    """Check one size of one layout against the reference, then time it."""
    layers = make_layer(layout, context_len)
    one_head = only_first_head(layers[0])
    rng = np.random.default_rng(0)
    queries = rng.standard_normal((NUM_QUERIES, NUM_HEADS * GROUP_SIZE, HEAD_DIM), dtype=np.float32) * np.float32(2)
    top_k = round(KEEP * context_len)
    q_one = np.ascontiguousarray(queries[0, :GROUP_SIZE])
    out, workspace = empty_token_selections(1, NUM_HEADS, top_k), SearchWorkspace()
    out_one = empty_token_selections(1, 1, top_k)
    outs = {"threads": out}
    if layout == "sketch":
        rest = np.empty((1, NUM_HEADS * GROUP_SIZE, HEAD_DIM + 2), np.float32)
        outs["threads_with_rest"] = replace(empty_token_selections(1, NUM_HEADS, top_k), rest=rest)
    rules = (top_k, SINK_LEN, WINDOW_LEN, SOFTMAX_SCALE)

    one = LayerSearch(q_one[None], one_head, None, SINK_LEN, WINDOW_LEN, SOFTMAX_SCALE, out_one)
    one.run(workspace)
    reference_ms = check_against_reference(q_one, one_head, rules, out_one.kv_indices[0].copy())
    hot = measure(lambda: one.run(workspace), seconds)
    result: dict[str, Any] = {
        "layout": layout,
        "context_len": context_len,
        "reference_1head_ms": round(reference_ms, 2),
        "read_mbytes": round(NUM_HEADS * read_bytes(layout, context_len) / 1e6, 1),
        "hot_1head": hot | rates(hot["cpu_p50_ms"], layout, context_len, 1),
        **{kind: {} for kind in outs},
    }
    turn = itertools.count()
    for num_threads, peak_gbps in peaks.items():
        with SearchPool(num_threads) as pool:
            for kind, wanted in outs.items():
                wanted.kv_indices.fill(-1)
                search_next(pool, queries, itertools.count(), layers, wanted)
                same = bool((wanted.kv_indices[0, 0] == out_one.kv_indices[0, 0]).all())
                gate(same, f"{context_len} keys: {num_threads} threads choose otherwise than one")
                timed = measure(partial(search_next, pool, queries, turn, layers, wanted), seconds)
                # One thread's CPU time is not affected by other processes. For several there is only wall-clock time.
                spent_ms = timed["cpu_p50_ms"] if num_threads == 1 else timed["p50_ms"]
                found = rates(spent_ms, layout, context_len, NUM_HEADS)
                result[kind][num_threads] = timed | found | {"of_peak": round(found["gbps"] / peak_gbps, 3)}
    if layout == "sketch":
        timed = measure(partial(attend_next, queries, turn, layers, out), seconds)
        result["rest_alone"] = timed | rates(timed["cpu_p50_ms"], layout, context_len, NUM_HEADS)
    return result


def rates(spent_ms: float, layout: str, context_len: int, num_heads: int) -> dict[str, float]:
    """Return time per query head, bytes of the index read per second and, for lists, time per entry."""
    per_query_head_us = spent_ms * 1e3 / (num_heads * GROUP_SIZE)
    per_query_head = read_bytes(layout, context_len) / GROUP_SIZE
    entries = NUM_SUBSPACES * round(LIST_LEN * context_len)
    found = {
        "us_per_query_head": round(per_query_head_us, 2),
        "gbps": round(per_query_head / per_query_head_us / 1e3, 1),
    }
    if layout == "lists":
        found["ns_per_entry"] = round(per_query_head_us * 1e3 / entries, 3)
    return found


def search_next(
    pool: SearchPool,
    queries: NDArray[np.float32],
    turn: "itertools.count[int]",
    layers: list[ListIndex | SketchIndex],
    out: TokenSelections,
) -> None:
    """Search the next layer with the next query, so that data cached by the previous step does not help."""
    number = next(turn)
    q, index = queries[number % NUM_QUERIES], layers[number % len(layers)]
    pool.search_layers([LayerSearch(q[None], index, None, SINK_LEN, WINDOW_LEN, SOFTMAX_SCALE, out)])


def attend_next(
    queries: NDArray[np.float32],
    turn: "itertools.count[int]",
    layers: list[ListIndex | SketchIndex],
    chosen: TokenSelections,
) -> None:
    """Attend to the rows that are not chosen, scoring their codes again, in this thread."""
    number = next(turn)
    index, q = layers[number % len(layers)], queries[number % NUM_QUERIES]
    assert isinstance(index, SketchIndex)
    stop = index.context_len - WINDOW_LEN
    attend_rest(q[None], index, chosen.kv_indices, chosen.valid_len, SINK_LEN, stop, SOFTMAX_SCALE)


def check_against_reference(
    q: NDArray[np.float32], index: ListIndex | SketchIndex, rules: tuple[int, int, int, float], got: NDArray[np.int32]
) -> float:
    """Raise GateError unless the choice is the reference's or, with lists, has equal group scores.

    Returns the reference's time in ms.
    """
    want = empty_token_selections(1, 1, rules[0])[0]
    started = time.perf_counter()
    reference.search(q, index, None, *rules, want)
    reference_ms = (time.perf_counter() - started) * 1e3
    if isinstance(index, SketchIndex):
        gate(bool((got == want.kv_indices).all()), f"{index.context_len} keys: the kernel chose other rows")
        return reference_ms
    group_scores, _ = reference.combine_group([reference.score_keys(row, index, None, 0) for row in q], rules[3])
    got_scores, want_scores = np.sort(group_scores[got[0]]), np.sort(group_scores[want.kv_indices[0]])
    gate(len(np.unique(got[0])) == rules[0], f"{index.context_len} keys: the kernel chose a row twice or too few")
    agree = bool(np.allclose(got_scores, want_scores, rtol=3e-5))
    gate(agree, f"{index.context_len} keys: the kernel's choice has lower group scores")
    return reference_ms


def print_search(result: dict[str, Any]) -> None:
    """Print one size of one layout: the hot figure of one head, then a line for each number of threads."""
    name, context_len, hot = result["layout"], result["context_len"], result["hot_1head"]
    lines = [("hot 1", hot, f"one head; reference {result['reference_1head_ms']} ms")]
    lines += [(str(n), timed, f"{timed['of_peak']:.2f} of peak") for n, timed in result["threads"].items()]
    for n, timed in result.get("threads_with_rest", {}).items():
        lines.append((f"+rest {n}", timed, "and attention by codes to what is not chosen"))
    if "rest_alone" in result:
        lines.append(("rest 1", result["rest_alone"], "that attention alone, by codes that are scored anew"))
    for threads, timed, note in lines:
        entries = f", {timed['ns_per_entry']} ns/entry" if "ns_per_entry" in timed else ""
        times = "".join(f"{timed[key]:>9.3f}" for key in ("p50_ms", "p99_ms", "min_ms", "cpu_p50_ms"))
        print(
            f"{name:<16}{context_len:>9}{threads:>8}{times}"
            f"{timed['us_per_query_head']:>10.2f}{timed['gbps']:>7.1f}  {note}{entries}"
        )


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="measure two sizes, in short runs")
    parser.add_argument("--threads", type=int, nargs="+", help="thread counts [default: powers of two, and all cores]")
    args = parser.parse_args()
    sizes = [8192, 131_072] if args.quick else [8192, 32_768, 131_072, 524_288, 1_048_576]
    seconds = 0.3 if args.quick else 1.0
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    thread_counts = args.threads or sorted({1, *(n for n in (2, 4, 8, 16, 32, 64) if n < cpus), cpus})
    peaks = {n: read_bandwidth_gbps(n) for n in thread_counts}
    print("read bandwidth:", ", ".join(f"{n} threads {gbps:.1f} GB/s" for n, gbps in peaks.items()))
    columns = (
        ("keys", 9),
        ("threads", 8),
        ("ms/step", 9),
        ("p99", 9),
        ("least", 9),
        ("CPU", 9),
        ("us/q head", 10),
        ("GB/s", 7),
    )
    print(f"{'layout':<16}" + "".join(f"{name:>{width}}" for name, width in columns))
    searches = []
    for layout in LAYOUTS:
        for context_len in sizes:
            searches.append(measure_layout(layout, context_len, peaks, seconds))
            print_search(searches[-1])
    result = {
        "name": "search-cpu",
        "step": {"num_heads": NUM_HEADS, "group_size": GROUP_SIZE, "head_dim": HEAD_DIM, "keep": KEEP},
        "read_gbps": {n: round(gbps, 1) for n, gbps in peaks.items()},
        "searches": searches,
    }
    finish(result, args.json)


if __name__ == "__main__":
    main()
