"""Looking ahead: the fitted map recovers a linear relation and never does worse than leaving the query alone."""

import numpy as np
import torch

from index_build.predictor import fit_predictor, sample_rows


def apply(fitted: torch.Tensor, early: torch.Tensor) -> torch.Tensor:
    return early @ fitted[:, :-1] + fitted[:, -1:]


def test_a_linear_relation_is_recovered() -> None:
    early = torch.randn(3, 2000, 8)
    matrix, offset = torch.randn(3, 8, 8), torch.randn(3, 1, 8)
    own = early @ matrix + offset
    fitted = fit_predictor(early, own)
    assert fitted.shape == (3, 9, 8)
    error = (apply(fitted, early) - own).norm() / own.norm()
    assert error < 0.02


def test_constant_queries_give_a_constant_prediction() -> None:
    early, own = torch.ones(2, 50, 8), torch.full((2, 50, 8), 3.0)
    torch.testing.assert_close(apply(fit_predictor(early, own), early), own)


def test_samples_are_spread_over_the_context_and_bounded() -> None:
    most = 16 * 8
    for context_len in (1, 100, most, most + 1, 10 * most + 7):
        rows = range(context_len)[sample_rows(context_len, head_dim=8)]
        assert 0 < len(rows) <= most
        assert rows[-1] >= context_len - 12


def test_wide_heads_are_fitted_by_several_threads() -> None:
    """As ridge regression says: what torch solves with would crash or hang."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        early, own = torch.randn(4, 600, 256), torch.randn(4, 600, 256) + 5
        fitted = fit_predictor(early, own).double().numpy()
    finally:
        torch.set_num_threads(num_threads)
    for head in range(4):
        x, y = (rows[head].double().numpy() for rows in (early, own))
        centred = x - x.mean(0)
        gram = centred.T @ centred
        wanted = np.linalg.solve(gram + 1e-2 * gram.trace() / 256 * np.eye(256), centred.T @ (y - y.mean(0)))
        np.testing.assert_allclose(fitted[head, :-1], wanted, rtol=0, atol=1e-4)
        np.testing.assert_allclose(fitted[head, -1], y.mean(0) - x.mean(0) @ wanted, rtol=0, atol=1e-4)
