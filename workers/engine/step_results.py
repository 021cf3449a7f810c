"""A GPU's results of steps, in host memory."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.beside import finish_beside
from workers.serving.step_engine import StepResult, StepRow


class LogitsOnHost:
    """Owns page-locked memory for one step's, from when they are first asked for."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._place: Tensor | None = None

    def take(self, rows: Sequence[StepRow], logits: Tensor) -> NDArray[np.float32]:
        """[rows, vocab_size], of rows that ask and are not drawn; valid until the next call.

        logits: [at least as many, vocab_size].
        """
        if self._place is None:
            self._place = torch.empty(self._max_rows, logits.shape[1], pin_memory=logits.is_cuda)
        for number, row in enumerate(rows):
            if row.asks and row.draw is None:
                self._place[number].copy_(logits[number], non_blocking=True)
        finish_beside(logits.device)
        return self._place[: len(rows)].numpy()


def kept(result: StepResult) -> StepResult:
    """Valid after the next step."""
    logits = None if result.logits is None else result.logits.copy()
    return replace(result, next_ids=result.next_ids.copy(), logits=logits)


def joined(first: StepResult, second: StepResult) -> StepResult:
    """Of one step that was made as two."""
    logits = None
    if first.logits is not None and second.logits is not None:
        logits = np.concatenate([first.logits, second.logits])
    likelihoods = [*first.likelihoods, *second.likelihoods]
    next_ids = np.concatenate([first.next_ids, second.next_ids])
    return StepResult(next_ids, logits, first.fidelity or second.fidelity, likelihoods)
