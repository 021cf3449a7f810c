"""RoPE by a row's place in the cache instead of its token's position in the text."""

import torch
from torch import Tensor

from csattn.models.query import rotate


class Places:
    """A table of RoPE's cos and sin for every place. Rotation is done in float32."""

    def __init__(
        self, frequencies: Tensor, num_places: int, device: torch.device | str = "cpu", interleaved: bool = False
    ):
        """frequencies: [rotated dimensions // 2] float32, the angle between neighbouring places.

        interleaved: as in `csattn.models.query.rotate`.
        """
        self._interleaved = interleaved
        angles = torch.arange(num_places, dtype=torch.float64, device="cpu")[:, None] * frequencies.cpu().double()
        both_halves = torch.cat([angles, angles], dim=1)
        self._cos = both_halves.cos().float().to(device)  # [num_places, rotated dimensions]
        self._sin = both_halves.sin().float().to(device)

    def rotate(self, rows: Tensor, places: Tensor | slice) -> Tensor:
        """Rotate rows to their places. Returns the shape and dtype of `rows`.

        rows: [num_heads, num_rows, head_dim] before RoPE; places: [num_rows], [num_heads, num_rows] or a slice.
        """
        return rotate(rows.float(), self._cos[places], self._sin[places], self._interleaved).to(rows.dtype)
