"""Segments of own rows: when they are in use, and that each depends on its own rows alone."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

import numpy as np
import pytest
import torch

from csattn.config import SearchConfig, SketchConfig
from csattn.sketch import SketchIndex, reference
from csattn.sketch.build import even_metric, fit_queries
from csattn.sketch.own import Growth, join_segments, make_segments, making_bytes, own_top_k


@pytest.mark.parametrize(("window_len", "near"), [(1, 256), (256, 256), (300, 300)])
def test_a_segment_is_in_use_once_its_last_row_has_left_the_window(window_len: int, near: int) -> None:
    growth = Growth()
    for number in (0, 1, 7):
        first = number * 2048 + near
        assert growth.num_segments(first, window_len) == number
        assert growth.num_segments(first + 2047, window_len) == number
        assert growth.num_segments(first + 2048, window_len) == number + 1
    assert growth.num_segments(1, window_len) == 0


def test_a_larger_share_of_own_rows_is_kept_than_of_a_context() -> None:
    assert [own_top_k(SearchConfig(keep=0.02), n) for n in (0, 1, 64, 1024)] == [0, 1, 5, 82]
    assert own_top_k(SearchConfig(keep=0.5), 1024) == 1024


def make_rows(num_rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, num_rows, 2, 64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_segments_are_independent_of_neighbours_and_of_how_rows_arrived(dtype: torch.dtype) -> None:
    rows = make_rows(192, dtype)
    one, two = (make_segments(rows[None, :, part], SketchConfig())[0] for part in (slice(64), slice(64, 192)))
    joined = join_segments([one, two])
    again = join_segments([join_segments([one]), *make_segments(rows.clone()[None, :, 64:], SketchConfig())])
    for field in fields(SketchIndex):
        np.testing.assert_array_equal(getattr(joined, field.name), getattr(again, field.name))
    assert joined.segment_starts.tolist() == [0, 64] and joined.context_len == 192
    q = np.random.default_rng(0).standard_normal((1, 64)).astype(np.float32)
    for head in range(2):
        parts = [logits(q, part, head) for part in (one, two)]
        whole = logits(q, joined, head)
        np.testing.assert_allclose(whole, np.concatenate(parts), atol=0.2)  # scores are in units of different steps
        exact = rows[head, :, 0].double().numpy() @ q[0]
        assert np.corrcoef(whole, exact)[0, 1] > 0.8


def logits(q: np.ndarray, index: SketchIndex, head: int) -> np.ndarray:
    bases, exponent, scores = reference.score_group(q, index, head, 1.0 / reference.LOG2_E)
    return bases[0] + 2.0**exponent * scores[0]


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128])
def test_even_metric_equals_a_fit_to_queries_of_all_directions(head_dim: int) -> None:
    keys = torch.randn(3, 40, head_dim)
    wanted = fit_queries(torch.eye(head_dim).expand(3, -1, -1))
    for got, want in zip(even_metric(keys), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-7, atol=0)


def test_layers_sketched_together_equal_layers_sketched_separately() -> None:
    layers = torch.stack([make_rows(64), make_rows(64)])
    layers[1, 0, 5, 0, 7] = torch.nan
    with ThreadPoolExecutor(3) as threads:
        together = make_segments(layers, SketchConfig(), threads.map)
    for got, rows in zip(together, layers, strict=True):
        (want,) = make_segments(rows[None], SketchConfig())
        for field in fields(SketchIndex):
            np.testing.assert_array_equal(getattr(got, field.name), getattr(want, field.name))


@pytest.mark.parametrize("fault", [torch.nan, -torch.inf, 1e18, -1e18])
def test_rows_that_a_sketch_cannot_hold_make_only_their_head_nan(fault: float) -> None:
    rows = make_rows(64)
    rows[1, 5, 0, 7] = fault
    (made,) = make_segments(rows[None], SketchConfig())
    assert np.isfinite(made.value_mean[0]).all() and np.isnan(made.value_mean[1]).all()
    (sound,) = make_segments(rows[None, :1], SketchConfig())
    np.testing.assert_array_equal(made.codes[:1], sound.codes)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sizes", [(1, 8, 2048, 2, 128), (4, 8, 2048, 2, 128), (4, 4, 2048, 2, 256), (4, 8, 512, 2, 64)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_making_segments_takes_no_more_memory_than_planned(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    rows = torch.randn(sizes, device="cuda").to(dtype)
    make_segments(rows, SketchConfig())  # warm up: libraries keep some memory
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    make_segments(rows.clone(), SketchConfig())
    planned = making_bytes(sizes, dtype.itemsize)
    assert planned / 4 < torch.cuda.max_memory_allocated() - before <= planned
