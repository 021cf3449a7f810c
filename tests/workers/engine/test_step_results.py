"""Results of a GPU's steps, copied to host memory."""

import numpy as np
import pytest
import torch

from workers.engine.gpu.step_results import LogitsOnHost, joined, kept
from workers.serving.step_engine import StepResult, StepRow

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_logits_are_copied_for_rows_that_want_a_token(device) -> None:
    on_host = LogitsOnHost(max_rows=5)
    for asking in ([True] * 5, [False, True, False], [True]):
        logits = torch.randn(5, 33, device=device)
        got = on_host.take([StepRow(0, 1, wants_token=wants_token) for wants_token in asking], logits)
        assert got.shape == (len(asking), 33)
        np.testing.assert_array_equal(got[asking], logits.cpu().numpy()[: len(asking)][asking])


def test_kept_results_survive_logits_overwritten_by_the_next_step() -> None:
    logits = np.ones((2, 3), np.float32)
    first = kept(StepResult(np.array([1, 2]), logits))
    logits[:] = 7
    both = joined(first, StepResult(np.array([3]), logits[:1]))
    assert both.next_ids.tolist() == [1, 2, 3] and both.logits is not None
    assert both.logits[:, 0].tolist() == [1, 1, 7]
