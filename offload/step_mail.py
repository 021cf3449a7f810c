"""Mailboxes in shared pinned memory between a step on the device and processes of the host, without CUDA calls.

Kernels post queries and fetch selections, so a step that exchanges many messages with the host is still one captured
CUDA graph. Each message has a flag whose value only increases; the waiting side polls the flag.
"""

from pathlib import Path

import torch
from torch import Tensor

from csattn.cuda import cuda_kernel
from offload.shared_memory import SharedMemory, piece_bytes

_THREADS = 512
_PARTS = 4  # blocks that fetch one head's selection
_SOURCE = Path(__file__).with_name("step_mail.cu")


class StepClock:
    """The number of the current step, for kernels: flag values of a step are above those of all earlier steps."""

    def __init__(self, flags_per_step: int, device: torch.device) -> None:
        self.flags_per_step = flags_per_step
        self.step = 0
        self.on_device = torch.zeros(1, dtype=torch.int64, device=device)

    def advance(self) -> None:
        """Enqueue the increment of the step's number on the device."""
        self.step += 1
        self.on_device.fill_(self.step)

    def value(self, flag_of_step: int) -> int:
        """Return the flag value of a message of this step. flag_of_step: the message, 0 to flags_per_step - 1."""
        return self.step * self.flags_per_step + flag_of_step


class RowMail:
    """Rows that the device posts to the host, each with a flag that is raised when the row is complete."""

    def __init__(self, num_rows: int, row_shape: tuple[int, ...], dtype: torch.dtype, memory: SharedMemory) -> None:
        """row_shape and dtype: whole multiples of 4 bytes."""
        self.rows = memory.zeros((num_rows, *row_shape), dtype)
        self.flags = memory.zeros((num_rows,), torch.int64)
        assert self.rows[0].nbytes % 4 == 0, f"rows of {self.rows[0].nbytes} bytes are not words"
        self._kernel = cuda_kernel(_SOURCE, "post_rows", {"THREADS": _THREADS})

    @staticmethod
    def num_bytes(num_rows: int, row_shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Return the bytes that it takes of the shared memory."""
        return piece_bytes((num_rows, *row_shape), dtype) + piece_bytes((num_rows,), torch.int64)

    def post(self, rows: Tensor, clock: StepClock, flag_of_step: int) -> None:
        """Enqueue the copy. rows: as `self.rows`, on the device."""
        assert rows.shape == self.rows.shape and rows.dtype == self.rows.dtype and rows.is_contiguous()
        num_words = rows[0].nbytes // 4
        self._kernel.launch(
            (len(rows), 1, 1),
            _THREADS,
            *(rows, self.rows, self.flags, clock.on_device, num_words, clock.flags_per_step, flag_of_step),
        )


class SelectionMail:
    """Selections that the host posts with a flag for each head; the device waits for those of rows in use."""

    def __init__(self, num_rows: int, num_heads: int, max_top_k: int, memory: SharedMemory) -> None:
        self.kv_indices = memory.zeros((num_rows, num_heads * max_top_k), torch.int32)
        self.valid_len = memory.zeros((num_rows, num_heads), torch.int32)
        self.widths = memory.zeros((num_rows,), torch.int32)  # stride from one head's kv_indices to the next head's
        self.flags = memory.zeros((num_rows, num_heads), torch.int64)
        self._kernel = cuda_kernel(_SOURCE, "fetch_selections", {"THREADS": _THREADS})

    @staticmethod
    def num_bytes(num_rows: int, num_heads: int, max_top_k: int) -> int:
        """Return the bytes that it takes of the shared memory."""
        small = piece_bytes((num_rows, num_heads), torch.int32) + piece_bytes((num_rows,), torch.int32)
        flags = piece_bytes((num_rows, num_heads), torch.int64)
        return piece_bytes((num_rows, num_heads * max_top_k), torch.int32) + small + flags

    def fetch(
        self,
        kv_indices: Tensor,  # [num_rows, num_heads, max_top_k] int32, written: -1 padded
        valid_len: Tensor,  # [num_rows, num_heads] int32, written
        context_ids: Tensor,  # [num_rows] int32; -1: idle, not waited for
        clock: StepClock,
        flag_of_step: int,
    ) -> None:
        """Enqueue the wait and the copy."""
        num_rows, num_heads, max_top_k = kv_indices.shape
        assert self.kv_indices.shape == (num_rows, num_heads * max_top_k)
        self._kernel.launch(
            (num_heads, _PARTS, num_rows),
            _THREADS,
            *(context_ids, self.kv_indices, self.valid_len, self.widths, self.flags, kv_indices, valid_len),
            *(clock.on_device, max_top_k, clock.flags_per_step, flag_of_step),
        )
