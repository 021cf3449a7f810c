"""The gate before any figure: choices are exact, order included, for every awkward kind of scores, and repeatable."""

import torch

from bench.lightning.awkward import KINDS, make_operands
from bench.lightning.inputs import RATIO, Shape, make_fp8_operands
from bench.lightning.inputs import make_operands as make_noise
from bench.lightning.measure import recall
from csattn.lightning import FP8, Operands, causal_lens, choose_keys, score_all, score_keys, top_k_reference
from csattn.lightning.prefill.stream import choose_by_contenders
from csattn.lightning.topk.device import MAX_K

TOLERANCE = 4e-3  # relative to the largest score, for operands of 16 bits or fewer
AGAIN = 10


def check(device: str, num_queries: int, num_keys: int, num_tokens: int, shape: Shape) -> list[str]:
    """Return the faults found, and print a line for each set of operands.

    num_queries, num_keys: sizes of the awkward sets; num_tokens: of the published noise.
    """
    faults = []
    dtypes = (torch.float32,) if device == "cpu" else (torch.bfloat16, torch.float16, torch.float32, FP8)
    for dtype in dtypes:
        for kind in KINDS:
            made = make_operands(kind, num_queries, num_keys, shape.num_heads, shape.head_dim, key_scale=True)
            scale = made.key_scale
            assert scale is not None
            arrays = made.q.to(dtype), made.k.to(dtype), made.weights, scale
            operands = Operands(*(array.to(device) for array in arrays))
            wrong = _faults(operands, kind == "random")
            faults += _said(f"{str(dtype).removeprefix('torch.')}, {kind}", wrong)
    for name, make in (("noise", make_noise), ("noise on the FP4 grid, in FP8", make_fp8_operands)):
        operands = make(num_tokens, shape, device)
        faults += _said(name, _noise_faults(operands, shape, device))
    return faults


def _faults(operands: Operands, compare_scores: bool) -> list[str]:
    """Return the faults of one awkward set, for several k, numbers of visible keys and tiles."""
    num_queries, num_keys = len(operands.q), len(operands.k)
    wrong = []
    for ratio, first_position in ((1, num_keys // 2), (4, 2 * num_keys)):
        lens = causal_lens(num_queries, num_keys, ratio=ratio, first_position=first_position)
        scores = score_all(operands, lens)
        on_device = lens.to(scores.device)
        if compare_scores:
            want = score_keys(operands)
            legal = torch.arange(num_keys, device=scores.device) < on_device[:, None]
            error = (scores - want).where(legal, 0).abs().max() / want.abs().max()
            wrong += [f"scores are off by {error:.1e} of the largest"] if not error < TOLERANCE else []
        for k in (1, min(512, num_keys - 1), min(2048, num_keys + 5)):
            want = top_k_reference(scores, k, on_device)
            for tile in (None, (num_queries, num_keys // 7 + 1), (37, 128), (num_queries // 2 + 1, num_keys)):
                if not torch.equal(choose_keys(operands, k, lens, tile=tile), want):
                    wrong.append(f"choice of {k} with ratio {ratio} and tile {tile} differs")
            if operands.q.is_cuda and k <= MAX_K:
                listed = choose_by_contenders(operands, k, lens, 32 << 20)
                wrong += [] if torch.equal(listed, want) else [f"choice of {k} contenders, ratio {ratio}, differs"]
    return wrong


def _noise_faults(operands: Operands, shape: Shape, device: str) -> list[str]:
    """Return the faults of repetitions with other workspaces, and of recall against float64."""
    lens = causal_lens(len(operands.q), len(operands.k), ratio=RATIO)
    k = min(512, len(operands.k))
    first = choose_keys(operands, k, lens)
    wrong = []
    for number in range(AGAIN):
        again = choose_keys(operands, k, lens, workspace_bytes=(1 << 20) << (number % 5))
        if not torch.equal(again, first):
            wrong.append(f"repetition {number} differs")
    last = slice(len(operands.q) - min(256, len(operands.q)), len(operands.q))
    exact = _exact_of_last(operands, last, k)
    found = recall(first[last], exact)
    print(f"  recall of the last {len(exact)} queries against float64: {found}")
    return wrong + ([f"recall is {found}"] if found["min"] < 0.98 else [])


def _exact_of_last(operands: Operands, last: slice, k: int) -> torch.Tensor:
    """Choose for the last queries by float64 scores, with their own causal lengths: [num_queries, k], -1 padded."""
    part = operands.of_queries(last)
    scores = torch.einsum("qhd,kd->qhk", part.q.double(), part.k.double()).relu_()
    summed = torch.einsum("qhk,qh->qk", scores, part.weights.double())
    if part.key_scale is not None:
        summed *= part.key_scale
    lens = causal_lens(len(operands.q), len(operands.k), ratio=RATIO)[last].to(summed.device)
    illegal = torch.arange(summed.shape[1], device=summed.device) >= lens[:, None]
    best, indices = summed.masked_fill(illegal, -torch.inf).topk(k, dim=1)
    return indices.masked_fill(best.isinf(), -1)


def _said(name: str, wrong: list[str]) -> list[str]:
    print(f"{'wrong' if wrong else 'right'}: {name}", *wrong, sep="\n    " if wrong else "", flush=True)
    return [f"{name}: {fault}" for fault in wrong]
