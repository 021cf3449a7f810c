"""Exact top-k of rows of scores, compared with torch.topk: random scores, and scores on which selections often fail."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from bench.lightning.suite import Prepared, Trial
from csattn.lightning import Order, top_k, top_k_reference

SIZES = (  # rows, length, k
    (1, 131072, 2048),
    (4, 131072, 2048),
    (16, 131072, 2048),
    (64, 131072, 2048),
    (64, 32768, 2048),
    (256, 131072, 2048),
    (1024, 1024, 64),
    (1024, 8192, 2048),
    (2048, 131072, 2048),
    (2048, 131072, 512),
)
SMALL_SIZES = ((2, 4096, 64),)  # on a CPU
HARD_SIZE = (64, 131072, 2048)
HARD_CASES = ("ascending", "descending", "all equal", "one bin", "two values", "any bits")
L2_BYTES = 60 << 20


def trials(device: str) -> Iterator[Trial]:
    """Yield all trials of the suite."""
    small = device == "cpu"
    for rows, length, k in SMALL_SIZES if small else SIZES:
        for variant in ("csattn by position", "csattn by score", "torch.topk"):
            yield _trial("random", rows, length, k, variant, device)
    for case in HARD_CASES:
        rows, length, k = SMALL_SIZES[0] if small else HARD_SIZE
        yield _trial(case, rows, length, k, "csattn by position", device)


def _trial(case: str, rows: int, length: int, k: int, variant: str, device: str) -> Trial:
    def prepare() -> Prepared:
        # together, the inputs of all calls do not fit in the L2 cache
        num_sets = 1 if device == "cpu" else min(16, max(1, -(-4 * L2_BYTES // (rows * length * 4))))
        sets = [make_scores(case, rows, length, device) for _ in range(num_sets)]
        if variant == "torch.topk":
            return Prepared(list, [partial(torch.topk, scores, k) for scores in sets])
        order: Order = "position" if variant.endswith("position") else "score"
        outs = [torch.empty(rows, k, dtype=torch.int32, device=device) for _ in sets]

        def faults() -> list[str]:
            wrong = []
            for scores, out in zip(sets[:2], outs, strict=False):
                some = slice(0, 128)  # the definition needs much memory
                want = top_k_reference(scores[some], k, torch.full((len(scores[some]),), length, device=device))
                want = want.sort(dim=1).values if order == "position" else want
                for _ in range(3):
                    top_k(scores, k, order=order, out=out)
                    wrong += [] if torch.equal(out[some], want) else ["a selection differs from the definition"]
            return wrong

        calls = [partial(top_k, scores, k, order=order, out=out) for scores, out in zip(sets, outs, strict=True)]
        return Prepared(faults, calls)

    name = f"{rows} rows of {length}, k {k}"
    return Trial("topk", name, variant, case, prepare, moved_bytes=rows * (length + k) * 4)


def make_scores(case: str, rows: int, length: int, device: str) -> Tensor:
    """Make scores [rows, length] float32."""
    up = torch.arange(length, device=device, dtype=torch.float32)
    if case == "random":
        return torch.randn(rows, length, device=device)
    if case == "one bin":  # all within 2^-17 of each other
        bits = 0x4280_0000 + torch.randint(0, 64, (rows, length), device=device, dtype=torch.int32)
        return bits.view(torch.float32)
    if case == "two values":
        return torch.randint(0, 2, (rows, length), device=device).float()
    if case == "any bits":
        return torch.randint(-(2**31), 2**31, (rows, length), device=device).to(torch.int32).view(torch.float32)
    row = {"ascending": up, "descending": -up, "all equal": torch.ones_like(up)}[case]
    return row.repeat(rows, 1)
