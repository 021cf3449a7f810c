"""Lookahead: the fitted map recovers a linear relation, and never does worse than leaving the query unchanged."""

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread

import numpy as np
import pytest
import torch

from csattn.config import SketchConfig
from csattn.models.query import queries_before_rope
from csattn.torch_threads import on_one_thread, one_thread, preserve_num_threads
from index_build import build_layers
from index_build.capture import prefill
from index_build.predictor import fit_predictor, sample_rows
from tests.tiny import loaded, token_ids


def apply(fitted: torch.Tensor, early: torch.Tensor) -> torch.Tensor:
    return early @ fitted[:, :-1] + fitted[:, -1:]


def test_fit_predictor_recovers_a_linear_relation() -> None:
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


def test_wide_heads_are_fitted_by_ridge_regression_on_several_threads() -> None:
    """The result is ridge regression's. torch's own solver would crash or hang."""
    with preserve_num_threads():
        torch.set_num_threads(2)
        early, own = torch.randn(4, 600, 256), torch.randn(4, 600, 256) + 5
        fitted = fit_predictor(early, own).double().numpy()
    for head in range(4):
        x, y = (rows[head].double().numpy() for rows in (early, own))
        centred = x - x.mean(0)
        gram = centred.T @ centred
        wanted = np.linalg.solve(gram + 1e-2 * gram.trace() / 256 * np.eye(256), centred.T @ (y - y.mean(0)))
        np.testing.assert_allclose(fitted[head, :-1], wanted, rtol=0, atol=1e-4)
        np.testing.assert_allclose(fitted[head, -1], y.mean(0) - x.mean(0) @ wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("is_beside", [False, True])
def test_the_predictor_fitted_with_an_index_fits_the_layers_queries(
    monkeypatch: pytest.MonkeyPatch, is_beside: bool
) -> None:
    """A predictor fitted in parallel with the index, on one thread, agrees with one fitted to the layer's queries."""
    monkeypatch.setattr(build_layers, "_PRODUCTS_PER_ELEMENT", 10**9 if is_beside else 0)
    model = loaded()
    num_fitted = 0
    with ThreadPoolExecutor(2) as threads, preserve_num_threads():
        torch.set_num_threads(2)
        for capture, hidden_out in prefill(model.model, torch.from_numpy(token_ids(300)).long()):
            fit = build_layers.make_fit(model, capture, hidden_out)
            arrays = build_layers.index_and_fit(fit, capture, SketchConfig(), threads)
            if not model.geometry.is_predicted(capture.layer_idx + 1):
                assert "next_query" not in arrays
                continue
            num_fitted += 1
            rows, layer_idx, inputs = sample_rows(300, 16), capture.layer_idx + 1, (capture.hidden_in, hidden_out)
            with torch.inference_mode():
                early, own = (queries_before_rope(model.model, layer_idx, hidden[rows]) for hidden in inputs)
                torch.testing.assert_close(arrays["next_query"], fit_predictor(early, own), rtol=1e-3, atol=1e-4)
    assert num_fitted == model.geometry.num_layers - 1


def test_threads_started_after_a_parallel_fit_use_all_torch_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds even if a fit began while the index used one thread, and ended after it."""
    in_index, in_fit, seen = Event(), Event(), []

    def make_index(*_: object) -> dict[str, torch.Tensor]:
        with one_thread():
            in_index.set()
            assert in_fit.wait(10)
        return {}

    def fit() -> dict[str, torch.Tensor]:
        in_fit.set()
        time.sleep(0.2)
        return {}

    def fit_later() -> dict[str, torch.Tensor]:
        assert in_index.wait(10)
        return on_one_thread(fit)()

    monkeypatch.setattr(build_layers, "index_arrays", make_index)
    model = loaded()
    capture, _ = next(iter(prefill(model.model, torch.from_numpy(token_ids(100)).long())))
    with ThreadPoolExecutor(2) as threads, preserve_num_threads():
        torch.set_num_threads(2)
        build_layers.index_and_fit(fit_later, capture, SketchConfig(), threads)
        (thread := Thread(target=lambda: seen.append(torch.get_num_threads()))).start()
        thread.join()
    assert seen == [2]


def test_an_error_of_a_predictor_fit_is_raised() -> None:
    def fail() -> dict[str, torch.Tensor]:
        raise RuntimeError("no predictor")

    model, num_threads = loaded(), torch.get_num_threads()
    capture, _ = next(iter(prefill(model.model, torch.from_numpy(token_ids(100)).long())))
    with ThreadPoolExecutor(2) as threads, pytest.raises(RuntimeError, match="no predictor"):
        build_layers.index_and_fit(on_one_thread(fail), capture, SketchConfig(), threads)
    assert torch.get_num_threads() == num_threads
