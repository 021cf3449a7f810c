"""Rates of the score kernel in other cuts, and of selection: what `score_kernels.TILE_SHAPES` should be."""

from itertools import product
from typing import Any

import torch

from bench.lightning.inputs import RATIO, Shape, make_fp8_operands, make_operands
from bench.lightning.measure import measure
from csattn.lightning.score import Operands, causal_lens
from csattn.lightning.score_kernels import TileShape, score_tile
from csattn.lightning.stream import choose_keys, score_all
from csattn.lightning.topk import top_k

QUERIES = 4096  # the last of their sequence: nearly all of their keys are legal
SHAPES = [
    TileShape(columns, keys, tiles, num_warps, num_stages, max_registers)
    for (columns, keys, num_warps, max_registers), num_stages, tiles in product(
        (
            (256, 64, 8, None),
            (256, 64, 8, 128),
            (128, 64, 4, None),
            (128, 64, 4, 168),
            (128, 128, 8, None),
            (128, 128, 4, None),
            (256, 128, 8, None),
        ),
        (2, 3, 4),
        (32, 128),
    )
]


def tune(num_tokens: int, shape: Shape) -> None:
    """Print, for each dtype, the shapes from the slowest to the fastest, then what selection and all of it take."""
    for make in (make_operands, make_fp8_operands):
        operands = make(num_tokens, shape, "cuda")
        print(f"{operands.q.dtype}, {num_tokens} tokens")
        for rate, tried in sorted(_rates(operands), key=lambda pair: pair[0]):
            print(f"  {rate:6.0f} TFLOP/s  {tried}", flush=True)
        for top_k_size, mib in product((512, 1024), (64, 128, 256, 512)):
            print(f"  k {top_k_size}, workspace {mib:4} MiB: {_whole(operands, top_k_size, mib)}", flush=True)


def _rates(operands: Operands) -> list[tuple[float, Any]]:
    last = operands.of_queries(slice(len(operands.q) - QUERIES, len(operands.q)))
    num_keys = len(operands.k)
    lens = torch.full((len(last.q),), num_keys, dtype=torch.int32, device="cuda")
    out = torch.empty(len(last.q), -(-num_keys // 128) * 128, device="cuda")
    flops = 2.0 * last.q.numel() * num_keys
    rates: list[tuple[float, Any]] = []
    for tried in SHAPES:
        try:
            ms = measure(lambda shape=tried: score_tile(last, range(num_keys), lens, out, shape), "cuda")["ms"]
            rates.append((flops / ms / 1e9, tried))
        except Exception as error:  # whatever a compiler finds wrong with a shape: the others are still of interest
            rates.append((0.0, f"{tried}: {type(error).__name__}"))
    return rates


def _whole(operands: Operands, k: int, mib: int) -> dict[str, float]:
    """Milliseconds of all of it, and of selection alone from scores that are there: the last queries, scaled up."""
    lens = causal_lens(len(operands.q), len(operands.k), ratio=RATIO)
    all_ms = measure(lambda: choose_keys(operands, k, lens, workspace_bytes=mib << 20), "cuda")["ms"]
    num_rows = (mib << 20) // (4 * len(operands.k))
    last = slice(max(0, len(operands.q) - num_rows), len(operands.q))
    scores, legal = score_all(operands.of_queries(last), lens[last]), lens[last].cuda()
    select_ms = measure(lambda: top_k(scores, k, legal), "cuda")["ms"]
    per_score = select_ms / float(legal.sum())
    return {"ms": all_ms, "of it selection, about": round(per_score * float(lens.double().sum()), 2)}
