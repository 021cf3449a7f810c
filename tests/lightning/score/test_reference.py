"""The scores of V3.2 and V4 agree with their formulas in plain loops; which keys a query sees; what is refused."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from csattn.errors import ArrayError, ConfigError
from csattn.lightning import Operands, causal_lens, dequantise_fp8, in_fp8, score_keys, v4_operands, v32_operands
from csattn.lightning.operands.rotations import hadamard


def by_loops(operands: Operands) -> np.ndarray:
    """Compute the formula key by key in double precision."""
    q, k, weights = (x.double().numpy() for x in (operands.q, operands.k, operands.weights))
    scores = np.zeros((len(q), len(k)))
    for t in range(len(q)):
        for s in range(len(k)):
            for h in range(q.shape[1]):
                scores[t, s] += weights[t, h] * max(0.0, q[t, h] @ k[s])
            if operands.key_scale is not None:
                scores[t, s] *= float(operands.key_scale[s])
    return scores


@pytest.mark.parametrize("version", ["v3.2", "v3.2 ue8m0", "v4", "v4 fp8"])
def test_scores_equal_their_formula(version: str) -> None:
    q, k, projected = torch.randn(5, 8, 128), torch.randn(7, 128), torch.randn(5, 8)
    if version.startswith("v3.2"):
        operands = v32_operands(q, k, projected, power_of_two_scales="ue8m0" in version)
    else:
        operands = v4_operands(q.bfloat16(), k.bfloat16(), projected)
        operands = in_fp8(operands) if "fp8" in version else operands
    operands.check()
    assert (operands.weights < 0).any()
    want = by_loops(operands)
    np.testing.assert_allclose(score_keys(operands).numpy(), want, atol=1e-5 * np.abs(want).max())


def test_v32_scores_of_quantised_operands_are_close_to_unquantised_ones() -> None:
    """The score of quantised queries and keys, with their scales, is that of the plain ones up to rounding."""
    q, k, projected = torch.randn(4, 8, 128), torch.randn(9, 128), torch.randn(4, 8)
    operands = v32_operands(q, k, projected)
    q_rounded = dequantise_fp8(operands.q, operands.weights[..., None] / projected[..., None] * (8 * 128) ** 0.5)
    assert (q_rounded - hadamard(q)).abs().max() < 0.15
    plain = Operands(hadamard(q), hadamard(k), projected * (8 * 128) ** -0.5)
    error = (score_keys(operands) - score_keys(plain)).abs().max()
    assert error < 0.05 * score_keys(plain).abs().max()


def test_fp4_operands_held_in_fp8_give_the_same_scores() -> None:
    operands = v4_operands(torch.randn(6, 64, 128).bfloat16(), torch.zeros(50, 128).bfloat16(), torch.randn(6, 64))
    keys = v4_operands(torch.randn(50, 1, 128).bfloat16(), operands.k, torch.ones(50, 1)).q[:, 0].contiguous()
    operands = Operands(operands.q, keys, operands.weights)
    packed = in_fp8(operands)
    assert packed.q.dtype == packed.k.dtype == torch.float8_e4m3fn
    torch.testing.assert_close(score_keys(packed), score_keys(operands), rtol=1e-6, atol=1e-6)


def test_operands_stay_in_bfloat16_if_fp8_cannot_hold_a_key() -> None:
    q, k = torch.ones(2, 4, 128).bfloat16(), torch.ones(3, 128).bfloat16()
    k[1, 0] = 2.0**-20
    operands = Operands(q, k, torch.ones(2, 4))
    assert in_fp8(operands) is operands


@pytest.mark.parametrize("ratio", [1, 4, 128])
@pytest.mark.parametrize("first_position", [0, 1, 127, 1000])
def test_a_compressed_key_is_visible_once_all_of_its_tokens_are(ratio: int, first_position: int) -> None:
    lens = causal_lens(300, 50, ratio=ratio, first_position=first_position)
    for query, length in enumerate(lens.tolist()):
        position = first_position + query
        assert length == sum(ratio * (key + 1) - 1 <= position for key in range(50))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"q": torch.zeros(3, 64)}, r"q has shape \[3, 64\]; wanted \[num_queries, num_heads, head_dim\]"),
        ({"q": torch.zeros(3, 2, 8).double()}, "q is float64; wanted bfloat16 or float16 or float32 or float8_e4m3fn"),
        ({"q": torch.zeros(3, 0, 8)}, "at least one head"),
        ({"k": torch.zeros(5, 9)}, r"k has shape \[5, 9\]; wanted \[num_keys, 8\]"),
        ({"k": torch.zeros(5, 8).half()}, "k is float16; wanted float32: convert it first"),
        ({"k": torch.zeros(8, 5).T}, r"k of shape \[5, 8\] has strides \[1, 5\]; wanted contiguous"),
        ({"weights": torch.zeros(2, 3)}, r"weights has shape \[2, 3\]; wanted \[3, 2\]"),
        ({"key_scale": torch.zeros(4)}, r"key_scale has shape \[4\]; wanted \[5\]"),
        ({"key_scale": torch.zeros(5, device="meta")}, "key_scale is on meta, the other arrays are on cpu"),
    ],
)
def test_operands_of_wrong_shape_or_dtype_are_refused_with_the_reason(
    change: dict[str, torch.Tensor], complaint: str
) -> None:
    arrays = {"q": torch.zeros(3, 2, 8), "k": torch.zeros(5, 8), "weights": torch.zeros(3, 2)}
    Operands(**arrays).check()
    with pytest.raises(ArrayError, match=complaint):
        Operands(**{**arrays, **change}).check()


def test_invalid_ratios_and_negative_counts_are_refused() -> None:
    with pytest.raises(ConfigError, match="ratio is 0; wanted at least 1"):
        causal_lens(1, 1, ratio=0)
    with pytest.raises(ConfigError, match="num_queries is -1; wanted at least 0"):
        causal_lens(-1, 1)
    with pytest.raises(ConfigError, match="num_keys is -1; wanted at least 0"):
        causal_lens(1, -1)


@pytest.mark.parametrize("make", [v32_operands, v4_operands])
def test_weights_for_another_number_of_heads_are_refused(make: Callable[..., Operands]) -> None:
    with pytest.raises(ArrayError, match=r"projected has shape \[3, 1\]; wanted \[3, 4\]"):
        make(torch.zeros(3, 4, 128), torch.zeros(5, 128), torch.zeros(3, 1))
