"""RoPE by the place that a row has in the cache, not by the token that made it."""

import torch
from torch import Tensor

from csattn.models.query import rotate


class Places:
    """cos and sin of every place, made once; rotation is done in float32."""

    def __init__(
        self, frequencies: Tensor, num_places: int, device: torch.device | str = "cpu", interleaved: bool = False
    ):
        """frequencies: [rotated dimensions // 2] float32, the angle from one place to the next; as in `rotate`."""
        self._interleaved = interleaved
        angles = torch.arange(num_places, dtype=torch.float64)[:, None] * frequencies.cpu().double()
        both_halves = torch.cat([angles, angles], dim=1)
        self._cos = both_halves.cos().float().to(device)  # [num_places, rotated dimensions]
        self._sin = both_halves.sin().float().to(device)

    def rotate(self, rows: Tensor, places: Tensor | slice) -> Tensor:
        """rows: [num_heads, num_rows, head_dim] before RoPE; places: [num_rows], [num_heads, num_rows] or a slice.

        Returns the same shape, in the dtype of `rows`.
        """
        return rotate(rows.float(), self._cos[places], self._sin[places], self._interleaved).to(rows.dtype)
