"""Results of a GPU's steps, in host memory."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.gpu.stream_thread import synchronize_stream
from workers.serving.step_engine import StepResult, StepRow


class LogitsOnHost:
    """Owns pinned memory for one step's logits, allocated at the first use."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._place: Tensor | None = None

    def take(self, rows: Sequence[StepRow], logits: Tensor) -> NDArray[np.float32]:
        """Copy logits to the host: [rows, vocab_size], filled in for rows that ask and are not drawn.

        logits: [at least as many rows, vocab_size]. The result is valid until the next call.
        """
        if self._place is None:
            self._place = torch.empty(self._max_rows, logits.shape[1], dtype=torch.float32, pin_memory=logits.is_cuda)
        for number, row in enumerate(rows):
            if row.wants_token and row.draw is None:
                self._place[number].copy_(logits[number], non_blocking=True)
        synchronize_stream(logits.device)
        return self._place[: len(rows)].numpy()


def kept(result: StepResult) -> StepResult:
    """Copy a result, so that it stays valid after the next step."""
    logits = None if result.logits is None else result.logits.copy()
    return replace(result, next_ids=result.next_ids.copy(), logits=logits)


def joined(first: StepResult, second: StepResult) -> StepResult:
    """Join the results of a step that was split in two."""
    logits = None
    if first.logits is not None and second.logits is not None:
        logits = np.concatenate([first.logits, second.logits])
    likelihoods = [*first.likelihoods, *second.likelihoods]
    next_ids = np.concatenate([first.next_ids, second.next_ids])
    return StepResult(next_ids, logits, first.fidelity or second.fidelity, likelihoods)
