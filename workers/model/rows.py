"""The rows of a step at fixed device addresses, filled by one small copy from the host; checks of token ids."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.batch import ANY_TOP_K, StepRows
from csattn.errors import ConfigError, ContextError

_INT64_FIELDS, _INT32_FIELDS = 2, 6
_ROW_BYTES = 8 * _INT64_FIELDS + 4 * _INT32_FIELDS


class RowBuffer:
    """The rows of a step on the device, and the pinned memory from which they are copied."""

    def __init__(self, batch_size: int, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._device = torch.zeros(_ROW_BYTES * batch_size, dtype=torch.uint8, device=device)
        self._host = torch.zeros(_ROW_BYTES * batch_size, dtype=torch.uint8, pin_memory=self._on_gpu)
        self.rows = _views(self._device, batch_size)
        self._staged = _views(self._host, batch_size)
        self._copied = torch.cuda.Event() if self._on_gpu else None  # type: ignore[no-untyped-call]
        self.fill([], [], [], [], [])

    def fill(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        context_ids: Sequence[int],
        tail_ids: Sequence[int],
        tail_lens: Sequence[int],
        top_ks: Sequence[int] | None = None,
        own_lens: Sequence[int] | None = None,
        tail_starts: Sequence[int] | None = None,
    ) -> None:
        """Set the first rows and leave the others idle. All arguments have the same length."""
        if self._copied is not None:
            self._copied.synchronize()  # the previous copy may still be reading the staged rows
        self._host.zero_()
        self._staged.context_ids.fill_(-1)
        self._staged.top_ks.fill_(ANY_TOP_K)
        num_rows = len(token_ids)
        for staged, values in (
            (self._staged.token_ids, token_ids),
            (self._staged.positions, positions),
            (self._staged.context_ids, context_ids),
            (self._staged.tail_ids, tail_ids),
            (self._staged.tail_lens, tail_lens),
            (self._staged.top_ks, [ANY_TOP_K] * num_rows if top_ks is None else top_ks),
            (self._staged.own_lens, [0] * num_rows if own_lens is None else own_lens),
            (self._staged.tail_starts, [0] * num_rows if tail_starts is None else tail_starts),
        ):
            assert len(values) == num_rows, f"{num_rows} token ids and {len(values)} of another field"
            staged[:num_rows] = torch.tensor(values, dtype=staged.dtype)
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


def ids_of(given: Any) -> NDArray[Any]:
    """Return token ids as an array [num_tokens]. Raises ConfigError if there are none, or not one row of integers."""
    try:
        ids = np.asarray(given)
    except (ValueError, TypeError) as error:  # lists of several lengths, a tensor on a GPU
        raise ConfigError(f"token ids must be whole numbers in one row: {error}; give [num_tokens]") from error
    if ids.size == 0:
        raise ConfigError("no token ids were given to continue with; give at least one token")
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ConfigError(
            f"token ids must be whole numbers in one row, [num_tokens] int32, got {ids.dtype} of shape {ids.shape}; "
            "give those of one text, as a tokenizer returns them"
        )
    return ids


def require_tokens(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise ContextError for a token id outside the vocabulary."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise ContextError(f"token id {token_id} is not in the model's vocabulary of {vocab_size}")


def _views(buffer: Tensor, batch_size: int) -> StepRows:
    wide = buffer[: 8 * _INT64_FIELDS * batch_size].view(torch.int64).view(_INT64_FIELDS, batch_size)
    narrow = buffer[8 * _INT64_FIELDS * batch_size :].view(torch.int32).view(_INT32_FIELDS, batch_size)
    return StepRows(
        token_ids=wide[0],
        positions=wide[1],
        context_ids=narrow[0],
        tail_ids=narrow[1],
        tail_lens=narrow[2],
        top_ks=narrow[3],
        own_lens=narrow[4],
        tail_starts=narrow[5],
    )
