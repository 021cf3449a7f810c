"""Runs one case: makes its inputs, picks its variant, and measures it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.lightning.cases import Case
from bench.lightning.inputs import RATIO, Shape, make_attention_inputs, make_fp8_operands, make_operands
from bench.lightning.measure import measure, recall
from bench.lightning.published import exact_choice, materialise, materialise_summed, partition_merge
from csattn.lightning import Operands, causal_lens, choose_keys, score_all, sparse_mla, top_k_reference

_ATTENDED = 16384  # queries that attend in one call

Choose = Callable[[], Tensor]  # [num_queries, k] indices


def run_case(case: Case, device: str, shape: Shape | None = None) -> dict[str, Any]:
    """Return the case's figures, or `refused` with the reason if it runs out of memory."""
    shape = shape or Shape(dim=case.dim)
    try:
        operands = make_inputs(case, shape, device)
        choose = variant_of(case, operands)
        if case.kind == "recall":
            return _recall(case, operands, choose)
        if case.kind == "pipeline":
            figures = measure(_pipeline(case, choose, shape, device), device)
        else:
            figures = measure(choose, device, _warm_up(case, operands))
    except torch.OutOfMemoryError as error:
        return {"refused": f"out of memory: {str(error).split('.')[0]}"}
    finally:
        if device != "cpu":
            torch.cuda.empty_cache()
    return {**figures, "tflops": round(num_flops(case, shape) / figures["ms"] / 1e9, 1)}


def make_inputs(case: Case, shape: Shape, device: str) -> Operands:
    """Make the published inputs, or (for "csattn fp8") those on the FP4 grid."""
    make = make_fp8_operands if case.variant == "csattn fp8" else make_operands
    return make(case.num_tokens, shape, device)


def variant_of(case: Case, operands: Operands) -> Choose:
    """Return the call that chooses keys."""
    causal = case.kind != "pipeline"
    if case.variant == "materialised":
        if not causal:
            return lambda: materialise_summed(operands, _top_k(case))
        return lambda: materialise(operands, _top_k(case), RATIO)
    if case.variant.startswith("csattn"):
        lens = legal_lens(operands, causal)
        tile = None if case.query_chunk is None or case.key_chunk is None else (case.query_chunk, case.key_chunk)
        return lambda: choose_keys(operands, case.top_k, lens, tile=tile)
    assert case.query_chunk is not None and case.key_chunk is not None
    cut = (operands, case.top_k, RATIO if causal else None, case.query_chunk, case.key_chunk)
    ablated: dict[str, dict[str, Any]] = {
        "A1 no merge": {"merge": False},
        "A2 short chunks skipped": {"skip_short": True},
        "A3 float16 scores": {"score_dtype": torch.float16},
    }
    return lambda: partition_merge(*cut, **ablated.get(case.variant, {}))[0]


def _warm_up(case: Case, operands: Operands) -> Choose | None:
    """Return a shorter call for the published variants: the first queries. A whole one can take half a minute."""
    if case.variant == "materialised" or case.variant.startswith("csattn") or case.query_chunk is None:
        return None
    return variant_of(case, operands.of_queries(slice(0, case.query_chunk)))


def legal_lens(operands: Operands, causal: bool) -> Tensor:
    """Return how many keys each query may see, on the host, where a server has it."""
    num_queries, num_keys = len(operands.q), len(operands.k)
    if causal:
        return causal_lens(num_queries, num_keys, ratio=RATIO)
    return torch.full((num_queries,), num_keys, dtype=torch.int32)


def num_flops(case: Case, shape: Shape) -> float:
    """Count the operations of the products of visible pairs and, in a pipeline, of attention."""
    num_keys = case.num_tokens // RATIO
    if case.kind != "pipeline":
        # for lengths that are multiples of the ratio
        legal_pairs = RATIO * num_keys * (num_keys - 1) // 2 + num_keys
        return 2.0 * legal_pairs * shape.num_heads * shape.head_dim
    attended = RATIO * _top_k(case) * (512 + 64 + 512)
    return 2.0 * case.num_tokens * shape.num_heads * (num_keys * shape.head_dim + attended)


def _recall(case: Case, operands: Operands, choose: Choose) -> dict[str, Any]:
    """Measure recall against float32 products, and whether csattn's choice equals the reference's by its own scores."""
    got = choose()
    figures: dict[str, Any] = {"recall": recall(got, exact_choice(operands, case.top_k, RATIO))}
    if case.variant.startswith("csattn"):
        lens = legal_lens(operands, causal=True)
        want = top_k_reference(score_all(operands, lens), case.top_k, lens.to(got.device))
        figures["identical"] = torch.equal(got, want)
    return figures


def _pipeline(case: Case, choose: Choose, shape: Shape, device: str) -> Callable[[], object]:
    """Return a call that chooses keys and attends to their tokens, in chunks of queries to limit memory."""
    inputs = make_attention_inputs(case.num_tokens, shape.num_heads, device)
    offsets = torch.arange(RATIO, device=device, dtype=torch.int32)

    def run() -> Tensor:
        chosen, out = choose(), torch.empty_like(inputs.q_nope)
        for first in range(0, len(chosen), _ATTENDED):
            rows = slice(first, first + _ATTENDED)
            keys = chosen[rows, :, None].to(torch.int32)
            tokens = torch.where(keys >= 0, keys * RATIO + offsets, -1).flatten(1)
            q = inputs.q_nope[rows], inputs.q_pe[rows]
            sparse_mla(*q, inputs.ckv, inputs.kpe, tokens, softmax_scale=576**-0.5, out=out[rows])
        return out

    return run


def _top_k(case: Case) -> int:
    return min(case.top_k, case.num_tokens // RATIO)
