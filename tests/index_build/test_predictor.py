"""Looking ahead: the fitted map recovers a linear relation and never does worse than leaving the query alone."""

import torch

from index_build.predictor import fit_predictor, sample_rows


def apply(fitted: torch.Tensor, early: torch.Tensor) -> torch.Tensor:
    return early @ fitted[:, :-1] + fitted[:, -1:]


def test_a_linear_relation_is_recovered() -> None:
    early = torch.randn(3, 2000, 8)
    matrix, offset = torch.randn(3, 8, 8), torch.randn(3, 1, 8)
    own = early @ matrix + offset
    fitted = torch.from_numpy(fit_predictor(early, own))
    assert fitted.shape == (3, 9, 8)
    error = (apply(fitted, early) - own).norm() / own.norm()
    assert error < 0.02


def test_constant_queries_give_a_constant_prediction() -> None:
    early, own = torch.ones(2, 50, 8), torch.full((2, 50, 8), 3.0)
    torch.testing.assert_close(apply(torch.from_numpy(fit_predictor(early, own)), early), own)


def test_samples_are_spread_over_the_context_and_bounded() -> None:
    most = 16 * 8
    for context_len in (1, 100, most, most + 1, 10 * most + 7):
        rows = range(context_len)[sample_rows(context_len, head_dim=8)]
        assert 0 < len(rows) <= most
        assert rows[-1] >= context_len - 12
