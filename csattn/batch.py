"""The inputs of one decode step of a batch on a GPU: one token per row, all tensors at fixed device addresses.

A captured CUDA graph reads these tensors again at every replay. Between steps their contents change, but never their
addresses. Rows may continue different contexts of different lengths. Several rows may belong to one request (the tokens
of a question): they share its tail and see different lengths of it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

ANY_TOP_K = 2**31 - 1


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step."""

    token_ids: Tensor  # [batch_size] int64
    positions: Tensor  # [batch_size] int64, in the sequence
    context_ids: Tensor  # [batch_size] int32: which of the loaded contexts the row continues; -1: none
    tail_ids: Tensor  # [batch_size] int32: the tail of the row's request, numbered by its request slot
    tail_lens: Tensor  # [batch_size] int32: rows of that tail that the row sees, its own included; 0: the row is idle
    # [batch_size] int32: the first so many rows of the tail are in the request's own segments: see `csattn.sketch.own`
    own_lens: Tensor
    # [batch_size] int32, at most own_lens: the first so many rows are stored elsewhere; tail memory begins after them
    tail_starts: Tensor
    top_ks: Tensor  # [batch_size] int32: the row's K if it is below the step's max_top_k, else ANY_TOP_K
    # these two are constants of every step that is captured with these rows
    any_own: bool = True  # False: own_lens are zeros
    reads_all: bool = False  # attend to all rows of contexts and tails; own_lens are zeros

    @property
    def batch_size(self) -> int:
        return int(self.token_ids.shape[0])


@dataclass(frozen=True, slots=True)
class DeviceSelection:
    """A `Selection` for each row of a step, on the device."""

    kv_indices: Tensor  # [batch_size, num_index_heads, max_top_k] int32, ascending, unique, -1 padded
    valid_len: Tensor  # [batch_size, num_index_heads] int32


def make_step_rows(batch_size: int, device: torch.device) -> StepRows:
    """Make a step whose rows are all idle."""
    zeros = torch.zeros(batch_size, dtype=torch.int64, device=device)
    return StepRows(
        token_ids=zeros.clone(),
        positions=zeros.clone(),
        context_ids=(zeros - 1).int(),
        tail_ids=zeros.int(),
        tail_lens=zeros.int(),
        own_lens=zeros.int(),
        tail_starts=zeros.int(),
        top_ks=torch.full_like(zeros, ANY_TOP_K).int(),
    )


def make_device_selection(
    batch_size: int, num_index_heads: int, max_top_k: int, device: torch.device
) -> DeviceSelection:
    """Make an empty selection: all padding."""
    return DeviceSelection(
        torch.full((batch_size, num_index_heads, max_top_k), -1, dtype=torch.int32, device=device),
        torch.zeros((batch_size, num_index_heads), dtype=torch.int32, device=device),
    )
