"""HISA's block keys: the mean of a block's index keys, again in FP8 (arXiv:2603.28458).

Keys are summed in float32, in their order, so that a mean updated token by token has the bits of one made from scratch.
A block that is not full has the mean of its keys so far.
"""

import torch
from torch import Tensor

from csattn.errors import ArrayError
from csattn.lightning.checks import require_array, require_at_least
from csattn.lightning.operands.quantise import FP8, FP8_MAX, MEAN_LEAST_SCALE
from csattn.lightning.paged.score import KeyPages

PAGE_SIZE = 64  # block keys per page


def pool_keys(
    k: Tensor,  # [num_keys, head_dim] float8_e4m3fn, or any float
    key_scale: Tensor,  # [num_keys] float32
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """Return block keys [num_blocks, head_dim] float8_e4m3fn and scales [num_blocks] float32.

    The last block may be partial.
    """
    num_keys = len(k)
    num_full = num_keys // block_size
    keys = k.float() * key_scale[:, None]
    blocks = keys[: num_full * block_size].view(num_full, block_size, k.shape[1])
    sums = torch.zeros(-(-num_keys // block_size), k.shape[1], dtype=torch.float32, device=k.device)
    for place in range(block_size):
        sums[:num_full] += blocks[:, place]
    for key in keys[num_full * block_size :]:
        sums[num_full] += key
    counts = torch.full((len(sums), 1), float(block_size), dtype=torch.float32, device=k.device)
    counts[num_full:] = float(num_keys - num_full * block_size)
    return _quantise(sums / counts)


class PooledKeys:
    """The block keys of a batch's sequences, at fixed addresses.

    `append` adds one key to every sequence without synchronizing, so that a CUDA graph can capture it.
    """

    def __init__(self, batch_size: int, max_len: int, block_size: int, head_dim: int, device: torch.device) -> None:
        sizes = {"batch_size": batch_size, "max_len": max_len, "block_size": block_size, "head_dim": head_dim}
        for name, size in sizes.items():
            require_at_least(name, size, 1)
        self.block_size = block_size
        pages_each = -(-max_len // (block_size * PAGE_SIZE))
        self._max_len = max_len
        self._values = torch.zeros(batch_size, pages_each * PAGE_SIZE, head_dim, dtype=FP8, device=device)
        self._scales = torch.zeros(batch_size, pages_each * PAGE_SIZE, dtype=torch.float32, device=device)
        # of the block that is not full
        self._sums = torch.zeros(batch_size, head_dim, dtype=torch.float32, device=device)
        self._lens = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self._rows = torch.arange(batch_size, device=device)
        pages = torch.arange(batch_size * pages_each, dtype=torch.int32, device=device)
        self.pages = pages.view(batch_size, pages_each)  # of each sequence, in `keys`

    def __repr__(self) -> str:
        return f"<PooledKeys of {len(self._lens)} sequences, blocks of {self.block_size}>"

    @property
    def keys(self) -> KeyPages:
        """All block keys; a sequence's are in its `pages`."""
        head_dim = self._values.shape[2]
        return KeyPages(self._values.view(-1, PAGE_SIZE, head_dim), self._scales.view(-1, PAGE_SIZE))

    def load(self, row: int, k: Tensor, key_scale: Tensor) -> None:
        """Replace the keys of sequence `row`: k [num_keys, head_dim] and scales [num_keys] float32."""
        require_at_least("row", row, 0, len(self._lens) - 1)
        require_array("k", k, ("num_keys", self._sums.shape[1]), like=self._sums)
        require_array("key_scale", key_scale, (len(k),), torch.float32, like=self._sums)
        if len(k) > self._max_len:
            raise ArrayError(f"k holds {len(k)} keys, but a sequence has room for {self._max_len}")
        values, scales = pool_keys(k, key_scale, self.block_size)
        self._values[row, : len(values)] = values
        self._scales[row, : len(scales)] = scales
        self._lens[row] = len(k)
        self._sums[row] = 0
        for key in (k.float() * key_scale[:, None])[len(k) // self.block_size * self.block_size :]:
            self._sums[row] += key

    def append(self, k: Tensor, key_scale: Tensor) -> None:
        """Append the next key of every sequence: [batch_size, head_dim] and scales [batch_size] float32.

        Keys beyond max_len do not change the block keys.
        """
        require_array("k", k, tuple(self._sums.shape), like=self._sums)
        require_array("key_scale", key_scale, (len(k),), torch.float32, like=self._sums)
        if k.device.type == "cuda":
            from csattn.lightning.hisa.triton_kernels import append_on_device  # needs Triton: GPU only

            state = self._sums, self._lens, self._values, self._scales
            append_on_device(k, key_scale, self.block_size, self._max_len, *state)
            return
        place = self._lens % self.block_size
        started = torch.where(place[:, None] == 0, 0.0, self._sums)
        self._sums.copy_(started + k.float() * key_scale[:, None])
        values, scales = _quantise(self._sums / (place[:, None] + 1).float())
        block = (self._lens // self.block_size).clamp(max=self._scales.shape[1] - 1)
        has_room = (self._lens < self._max_len)[:, None]
        old = self._values.view(torch.uint8)[self._rows, block]
        self._values.view(torch.uint8)[self._rows, block] = torch.where(has_room, values.view(torch.uint8), old)
        self._scales[self._rows, block] = torch.where(has_room[:, 0], scales, self._scales[self._rows, block])
        self._lens += 1


def _quantise(means: Tensor) -> tuple[Tensor, Tensor]:
    scales = (means.abs().amax(-1) / FP8_MAX).clamp(min=MEAN_LEAST_SCALE)
    return (means / scales[:, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8), scales
