"""Prefill and greedy decoding on a bare `ModelRunner`, in steps as engines make them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.model import ModelRunner
from workers.model.runner import StepOutput


def prefill(
    runner: ModelRunner,
    token_ids: Sequence[int],
    context_id: int,
    first_position: int,  # of the first token, in the sequence
    tail_id: int,
    tail_len: int = 0,  # rows already in the tail
) -> StepOutput:
    """Feed a question in as few steps as possible. Returns the output after its last token: one row."""
    for start in range(0, len(token_ids), runner.batch_sizes[-1]):
        chunk = list(token_ids[start : start + runner.batch_sizes[-1]])
        num_rows = len(chunk)
        batch_size = runner.batch_size_for(num_rows)
        runner.fill(
            batch_size,
            chunk,
            [first_position + start + row for row in range(num_rows)],
            [context_id] * num_rows,
            [tail_id] * num_rows,
            [tail_len + start + row + 1 for row in range(num_rows)],
        )
        output = runner.step(batch_size)
    return StepOutput(output.logits[num_rows - 1 : num_rows], output.next_ids[num_rows - 1 : num_rows])


def advance(runner: ModelRunner, batch_size: int, next_ids: Tensor) -> None:
    """Prepare the next step: each active row gets its next token, one position and one tail row further."""
    rows = runner.rows(batch_size)
    active = rows.tail_lens > 0
    rows.token_ids.copy_(next_ids.clamp(min=0))
    rows.positions.add_(active)
    rows.tail_lens.add_(active)


def decode(runner: ModelRunner, batch_size: int, num_steps: int) -> Tensor:
    """Run steps that each feed the next. Returns their tokens [num_steps, batch_size] int64, on the device."""
    out = torch.empty(num_steps, batch_size, dtype=torch.int64, device=runner.weights.device)
    for token_ids in out:
        token_ids.copy_(runner.step(batch_size).next_ids)
        advance(runner, batch_size, token_ids)
    return out
