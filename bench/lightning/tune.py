"""Measures the rate of the score kernel and both ways to choose keys, by which the default was decided."""

from collections.abc import Callable

import torch
from torch import Tensor

from bench.lightning.inputs import RATIO, Shape, make_fp8_operands, make_operands
from bench.lightning.measure import measure
from csattn.lightning import Operands, causal_lens, score_all, top_k
from csattn.lightning.prefill.stream import (
    WORKSPACE_BYTES,
    choose_by_contenders,
    choose_from_contenders,
    choose_scored,
    score_into,
)

QUERIES = 4224  # the last of a sequence, which may see nearly all keys; a multiple of 132 multiprocessors


def tune(num_tokens: int, shape: Shape) -> None:
    """Print rates and times for each dtype."""
    for make in (make_operands, make_fp8_operands):
        operands = make(num_tokens, shape, "cuda")
        rate = _score_rate(operands)
        print(f"{operands.q.dtype}, {num_tokens} tokens: scores of the last {QUERIES} queries {rate:.1f} TFLOP/s")
        for k in (512, 1024):
            print(f"k {k}, ms: {_both_ways(operands, k)}", flush=True)


def _score_rate(operands: Operands) -> float:
    last = operands.of_queries(slice(max(0, len(operands.q) - QUERIES), len(operands.q)))
    num_keys = len(operands.k)
    lens = torch.full((len(last.q),), num_keys, dtype=torch.int32, device="cuda")
    out = torch.empty(len(last.q), -(-num_keys // 128) * 128, device="cuda")
    ms = measure(lambda: score_into(out, last, range(num_keys), lens), "cuda")["ms"]
    return 2.0 * last.q.numel() * num_keys / float(ms) / 1e9


def _both_ways(operands: Operands, k: int) -> dict[str, float]:
    """Return milliseconds by contenders and by all scores, and the part of the latter that selection takes."""
    lens = causal_lens(len(operands.q), len(operands.k), ratio=RATIO)
    num_rows = (256 << 20) // (4 * len(operands.k))
    last = slice(max(0, len(operands.q) - num_rows), len(operands.q))
    scores, legal = score_all(operands.of_queries(last), lens[last]), lens[last].cuda()
    select_ms = float(measure(lambda: top_k(scores, k, legal), "cuda")["ms"])
    return {
        "contenders": _choose_ms(choose_by_contenders, operands, k),
        "queries that were chosen for again": len(choose_from_contenders(operands, k, lens, WORKSPACE_BYTES)[1]),
        "scores": _choose_ms(choose_scored, operands, k),
        "of it selection": round(select_ms / float(legal.sum()) * float(lens.double().sum()), 2),
    }


def _choose_ms(choose: Callable[..., Tensor], operands: Operands, k: int) -> float:
    lens = causal_lens(len(operands.q), len(operands.k), ratio=RATIO)
    return float(measure(lambda: choose(operands, k, lens, WORKSPACE_BYTES), "cuda")["ms"])
