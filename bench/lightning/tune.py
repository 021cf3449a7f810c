"""The rates of both score kernels, other cuts of Triton's, and both ways to choose: what is chosen by default and why.

Every cut is compiled, which takes longer than to measure it: about four minutes in all.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from bench.lightning.inputs import RATIO, Shape, make_fp8_operands, make_operands
from bench.lightning.measure import measure
from csattn.lightning import Operands, causal_lens, choose_keys, score_all, top_k
from csattn.lightning.prefill.stream import WORKSPACE_BYTES, choose_from_contenders
from csattn.lightning.score.device import Scorer
from csattn.lightning.score.triton_kernels import TileShape

QUERIES = 4224  # the last of their sequence, for which nearly all keys are legal; a multiple of 132 multiprocessors
SHAPES = [
    *(TileShape(num_stages=stages) for stages in (2, 3, 4)),
    TileShape(max_registers=None, num_stages=3),
    TileShape(tiles=16),
    TileShape(tiles=256),
    *(TileShape(columns=128, num_warps=4, num_stages=stages, max_registers=None) for stages in (2, 3)),
    TileShape(columns=128, num_warps=4, max_registers=168),
    *(TileShape(columns=128, keys=128, num_warps=warps, max_registers=None) for warps in (4, 8)),
]
LISTING_SHAPES = [shape for shape in SHAPES if shape.tiles == 64 and shape.keys == 64]


def tune(num_tokens: int, shape: Shape) -> None:
    """Print rates and times for each dtype; the fastest of each kind last."""
    for make in (make_operands, make_fp8_operands):
        operands = make(num_tokens, shape, "cuda")
        usual = Scorer.for_operands(operands)
        scorers = [usual, *(Scorer.in_triton(shape.num_heads, cut) for cut in SHAPES)]
        print(f"{operands.q.dtype}, {num_tokens} tokens: scores of the last {QUERIES} queries, TFLOP/s")
        _ranked(scorers, partial(_score_rate, operands), best=max)
        print("all of it by contenders, k 512, ms")
        listing = [scorer for scorer in scorers if scorer.shape is None or scorer.shape in LISTING_SHAPES]
        _ranked(listing, partial(_listed_ms, operands), best=min)
        for k in (512, 1024):
            print(f"k {k}: {_both_ways(operands, k)}", flush=True)


def _ranked(scorers: list[Scorer], value_of: Callable[[Scorer], float], best: Callable[..., Any]) -> None:
    found = []
    for tried in scorers:
        try:
            found.append((value_of(tried), tried))
        except Exception as error:  # whatever a compiler finds wrong with one cut: the others are still of interest
            print(f"  {tried.shape}: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
    for value, tried in sorted(found, key=lambda pair: pair[0], reverse=best is min):
        print(f"  {value:8.1f}  {tried.shape or 'wgmma'}", flush=True)


def _score_rate(operands: Operands, tried: Scorer) -> float:
    last = operands.of_queries(slice(max(0, len(operands.q) - QUERIES), len(operands.q)))
    num_keys = len(operands.k)
    lens = torch.full((len(last.q),), num_keys, dtype=torch.int32, device="cuda")
    out = torch.empty(len(last.q), -(-num_keys // 128) * 128, device="cuda")
    longest = tried.longest(lens)
    ms = measure(lambda: tried.write_scores(last, range(num_keys), lens, longest, out), "cuda")["ms"]
    return 2.0 * last.q.numel() * num_keys / float(ms) / 1e9


def _listed_ms(operands: Operands, tried: Scorer) -> float:
    with _scored_by(tried):
        return _choose_ms(operands, 512, list_contenders=True)


def _both_ways(operands: Operands, k: int) -> dict[str, float]:
    """Milliseconds by contenders and by all scores; of the latter, what selection takes."""
    lens = causal_lens(len(operands.q), len(operands.k), ratio=RATIO)
    num_rows = (256 << 20) // (4 * len(operands.k))
    last = slice(max(0, len(operands.q) - num_rows), len(operands.q))
    scores, legal = score_all(operands.of_queries(last), lens[last]), lens[last].cuda()
    select_ms = float(measure(lambda: top_k(scores, k, legal), "cuda")["ms"])
    return {
        "contenders": _choose_ms(operands, k, list_contenders=True),
        "queries that were chosen for again": len(choose_from_contenders(operands, k, lens, WORKSPACE_BYTES)[1]),
        "scores": _choose_ms(operands, k, list_contenders=False),
        "of it selection": round(select_ms / float(legal.sum()) * float(lens.double().sum()), 2),
    }


def _choose_ms(operands: Operands, k: int, list_contenders: bool) -> float:
    lens = causal_lens(len(operands.q), len(operands.k), ratio=RATIO)
    return float(measure(lambda: choose_keys(operands, k, lens, list_contenders=list_contenders), "cuda")["ms"])


@contextmanager
def _scored_by(tried: Scorer) -> Iterator[None]:
    usual = Scorer.for_operands
    Scorer.for_operands = classmethod(lambda cls, operands: tried)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Scorer.for_operands = usual  # type: ignore[method-assign]
