"""The rows of a step at fixed device addresses, filled by one small copy from the host; checks of token ids."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.batch import ANY_TOP_K, StepRows
from csattn.errors import ConfigError, ContextError

_INT64_FIELDS = "token_ids", "positions"
_INT32_FIELDS = "context_ids", "tail_ids", "tail_lens", "top_ks", "own_lens", "tail_starts"
_ROW_BYTES = 8 * len(_INT64_FIELDS) + 4 * len(_INT32_FIELDS)


class RowBuffer:
    """The rows of a step on the device, and the pinned memory from which they are copied."""

    def __init__(self, batch_size: int, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._device = torch.zeros(_ROW_BYTES * batch_size, dtype=torch.uint8, device=device)
        self._host = torch.zeros(_ROW_BYTES * batch_size, dtype=torch.uint8, pin_memory=self._on_gpu)
        self.rows = _views(self._device, batch_size)
        self._staged = _views(self._host, batch_size)
        self._copied = torch.cuda.Event() if self._on_gpu else None  # type: ignore[no-untyped-call]
        self.fill(token_ids=[])

    def fill(self, **columns: Sequence[int] | None) -> None:
        """Set the first rows, by their fields in `StepRows`; all have the same length, or are None.

        The other rows are idle, and fields that are left out or None are like those of idle rows.
        """
        if self._copied is not None:
            self._copied.synchronize()  # the previous copy may still be reading the staged rows
        self._host.zero_()
        self._staged.context_ids.fill_(-1)
        self._staged.top_ks.fill_(ANY_TOP_K)
        given = {name: values for name, values in columns.items() if values is not None}
        assert len({len(values) for values in given.values()}) == 1, "a row has a value in every field"
        for name, values in given.items():
            staged: Tensor = getattr(self._staged, name)
            staged[: len(values)] = torch.tensor(values, dtype=staged.dtype)
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
    wide = buffer[: 8 * len(_INT64_FIELDS) * batch_size].view(torch.int64).view(-1, batch_size)
    narrow = buffer[8 * len(_INT64_FIELDS) * batch_size :].view(torch.int32).view(-1, batch_size)
    fields = zip((*_INT64_FIELDS, *_INT32_FIELDS), (*wide, *narrow), strict=True)
    return StepRows(**dict(fields))
