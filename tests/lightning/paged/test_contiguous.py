"""Scores of contiguous keys agree with the definition for any shape: the paged kernel takes them as pages of one key.

Without a GPU it runs in Triton's interpreter, which is slow, so sizes are tiny.
"""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton, whose interpreter runs these kernels on a CPU, is not installed")

from bench.lightning.awkward import KINDS, make_operands
from csattn.lightning import FP8, Operands, causal_lens, choose_keys, score_all, score_keys, top_k_reference
from csattn.lightning.paged.triton_kernels import score_contiguous

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def to_device(operands: Operands) -> Operands:
    arrays = operands.q, operands.k, operands.weights, operands.key_scale
    return Operands(*(None if array is None else array.to(DEVICE) for array in arrays))  # type: ignore[arg-type]


def scored(operands: Operands, keys: range, lens: Tensor) -> Tensor:
    """Return scores [num_queries, len(keys)]: NaN past a query's length, and where the kernel has not written."""
    out = torch.full((len(operands.q), len(keys) + 3), torch.nan, device=DEVICE)
    score_contiguous(to_device(operands), keys, lens.to(DEVICE), out)
    got = out.cpu()
    assert got[:, len(keys) :].isnan().all()
    assert got[:, : len(keys)][torch.arange(keys.start, keys.stop) >= lens[:, None]].isnan().all()
    return got[:, : len(keys)]


def want(operands: Operands, keys: range, lens: Tensor) -> Tensor:
    legal = torch.arange(keys.start, keys.stop) < lens[:, None]
    return score_keys(operands)[:, keys.start : keys.stop].masked_fill(~legal, torch.nan)


@pytest.mark.parametrize(
    ("num_queries", "num_keys", "num_heads", "head_dim"),
    [(1, 1, 1, 32), (5, 70, 4, 32), (3, 33, 3, 20), (9, 64, 16, 64), (2, 17, 40, 16)],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_contiguous_scores_equal_their_definition(
    num_queries: int, num_keys: int, num_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    operands = make_operands("random", num_queries, num_keys, num_heads, head_dim, dtype, key_scale=num_heads > 3)
    lens = torch.randint(0, num_keys + 1, (num_queries,), dtype=torch.int32)
    lens[0] = num_keys
    for keys in (range(num_keys), range(num_keys // 3, num_keys)):
        torch.testing.assert_close(
            scored(operands, keys, lens), want(operands, keys, lens), rtol=1e-4, atol=1e-3, equal_nan=True
        )


def test_contiguous_scores_of_fp8_operands_equal_their_definition() -> None:
    plain = make_operands("random", 3, 20, 4, 32, key_scale=True)
    operands = Operands(plain.q.to(FP8), plain.k.to(FP8), plain.weights, plain.key_scale)
    lens = torch.full((3,), 20, dtype=torch.int32)
    keys = range(20)
    torch.testing.assert_close(scored(operands, keys, lens), want(operands, keys, lens), rtol=1e-4, atol=1e-3)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # from Triton's interpreter (numpy)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "random"])
def test_scores_of_exactly_representable_operands_are_exact(kind: str) -> None:
    operands = make_operands(kind, 3, 40, dtype=torch.float16, head_dim=32)
    lens = causal_lens(3, 40, first_position=30)
    keys = range(5, 40)
    torch.testing.assert_close(scored(operands, keys, lens), want(operands, keys, lens), rtol=0, atol=0, equal_nan=True)


def test_keys_past_the_legal_length_are_not_read() -> None:
    operands = make_operands("random", 4, 100, dtype=torch.float16, head_dim=32)
    poisoned = Operands(operands.q, operands.k.clone(), operands.weights)
    poisoned.k[48:] = torch.nan
    lens = torch.tensor([1, 33, 48, 0], dtype=torch.int32)
    assert torch.equal(
        scored(poisoned, range(100), lens).nan_to_num(7), scored(operands, range(100), lens).nan_to_num(7)
    )


@pytest.mark.gpu  # the interpreter multiplies with numpy, whose bits may depend on a row's place
def test_a_keys_score_has_the_same_bits_at_any_place_in_a_tile() -> None:
    operands, lens = make_operands("random", 5, 60, dtype=torch.float16, head_dim=32), torch.full((5,), 60)
    lens = lens.to(torch.int32)
    whole = scored(operands, range(60), lens)
    for start, stop in ((0, 17), (1, 60), (13, 40)):
        assert torch.equal(scored(operands, range(start, stop), lens), whole[:, start:stop])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ratio", [1, 4])
def test_choices_and_scores_on_the_gpu_equal_their_definitions(dtype: torch.dtype, kind: str, ratio: int) -> None:
    plain = make_operands(kind, 1000, 3001, 64, 128, key_scale=True)
    operands = to_device(Operands(plain.q.to(dtype), plain.k.to(dtype), plain.weights, plain.key_scale))
    lens = causal_lens(1000, 3001, ratio=ratio, first_position=2500).to(DEVICE)
    scores = score_all(operands, lens)
    best = top_k_reference(scores, 512, lens)
    for tile in (None, (1000, 128), (37, 1000)):
        assert torch.equal(choose_keys(operands, 512, lens, tile=tile), best)
    by_triton = torch.full((1000, 3001), torch.nan, device=DEVICE)
    score_contiguous(operands, range(3001), lens, by_triton)
    if kind == "random":
        want, illegal = score_keys(operands), torch.arange(3001, device=DEVICE) >= lens[:, None]
        for got in (scores, by_triton):
            assert (got - want).masked_fill(illegal, 0).abs().max() < 2e-3 * want.abs().max()
