"""DeepSeek-V4's compressor: pools every `ratio` tokens into one key, with the same bits whatever pieces tokens come in.

Its inputs are the tokens' projections, because a matrix product may round differently for one row than for many;
everything here is elementwise, or summed in a fixed order.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from csattn.lightning.checks import require_array, require_at_least
from csattn.lightning.operands.quantise import round_to_fp4
from csattn.lightning.operands.rotations import hadamard, rope_last, tree_sum


@dataclass(frozen=True, slots=True)
class CompressorWeights:
    """Parameters of one layer's compressor. With overlap (V4: where ratio is 4) a key also pools the block before."""

    position_bias: Tensor  # [ratio, width] float32, added to the gate; width is head_dim, or twice that with overlap
    norm_weight: Tensor  # [head_dim] float32
    inv_freq: Tensor  # [rope_dim // 2] float32, of the last rope_dim channels
    norm_eps: float = 1e-6

    @property
    def ratio(self) -> int:
        return int(self.position_bias.shape[0])

    @property
    def head_dim(self) -> int:
        return int(self.norm_weight.shape[0])

    @property
    def overlap(self) -> bool:
        return int(self.position_bias.shape[1]) == 2 * self.head_dim

    def check(self) -> None:
        """Raise an error if the parameters do not fit together."""
        require_array("norm_weight", self.norm_weight, ("head_dim",), torch.float32)
        width = self.head_dim * (2 if self.overlap else 1)
        require_array("position_bias", self.position_bias, ("ratio", width), torch.float32)
        require_at_least("ratio", self.ratio, 1)
        require_array("inv_freq", self.inv_freq, ("rope_dim / 2",), torch.float32)
        require_at_least("rope_dim", 2 * len(self.inv_freq), 2, self.head_dim)


class Compressor:
    """Turns one sequence's tokens into keys. Holds the tokens of the unfinished block, and the block before it."""

    def __init__(self, weights: CompressorWeights) -> None:
        weights.check()
        self._weights = weights
        self._num_keys = 0
        empty = weights.position_bias[:0]
        self._pending = empty, empty  # kv and gate of tokens whose block is not complete
        before = weights.position_bias.new_zeros(1, weights.ratio, weights.head_dim)
        self._before = before, torch.full_like(before, -torch.inf)  # kv, gate of the last complete block, for overlap

    def __repr__(self) -> str:
        return (
            f"<Compressor {self._num_keys} keys, {len(self._pending[0])} of {self._weights.ratio} tokens of the next>"
        )

    def append(
        self,
        kv: Tensor,  # [num_tokens, width] float32, the tokens' projection
        gate: Tensor,  # [num_tokens, width] float32
    ) -> Tensor:
        """Return the keys that these tokens complete: [num_new_keys, head_dim] float32, after RMSNorm and RoPE."""
        weights, ratio = self._weights, self._weights.ratio
        width = weights.position_bias.shape[1]
        require_array("kv", kv, ("num_tokens", width), torch.float32, like=weights.position_bias)
        require_array("gate", gate, (len(kv), width), torch.float32, like=weights.position_bias)
        kv, gate = (torch.cat(parts) for parts in zip(self._pending, (kv, gate), strict=True))
        num_blocks = len(kv) // ratio
        self._pending = kv[num_blocks * ratio :].clone(), gate[num_blocks * ratio :].clone()
        if not num_blocks:
            return kv.new_empty(0, weights.head_dim)
        blocks, gates = (x[: num_blocks * ratio].view(num_blocks, ratio, width) for x in (kv, gate))
        first = self._num_keys
        self._num_keys += num_blocks
        positions = torch.arange(first, self._num_keys, device=blocks.device) * ratio
        kv, gate = self._with_overlap(blocks, gates)
        return make_keys(kv, gate, weights, positions)

    def _with_overlap(self, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        """kv and gate of the rows that each key pools: first channels of the block before, the others of its own."""
        bias = self._weights.position_bias
        if not self._weights.overlap:
            return kv, gate + bias
        head_dim = self._weights.head_dim
        rows = []
        for before, own in zip(self._before, (kv, gate), strict=True):
            earlier = torch.cat((before, own[:-1, :, :head_dim]))
            rows.append(torch.cat((earlier, own[..., head_dim:]), dim=1))
        self._before = kv[-1:, :, :head_dim].clone(), gate[-1:, :, :head_dim].clone()
        return rows[0], rows[1] + torch.cat(torch.split(bias, head_dim, dim=1))

    @property
    def unfinished(self) -> tuple[Tensor, Tensor]:
        """kv and gate [num_pending, width] of the last tokens, those that later keys pool.

        With overlap these include the last complete block, of which later keys read the first channels only.
        """
        if not self._weights.overlap or not self._num_keys:
            return self._pending
        both = []
        for before, pending in zip(self._before, self._pending, strict=True):
            padded = torch.nn.functional.pad(before[0], (0, self._weights.head_dim))
            both.append(torch.cat((padded, pending)))
        return both[0], both[1]


def indexer_keys(keys: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return V4's index keys from its compressor's keys [num_keys, head_dim]: Hadamard transform, then the FP4 grid."""
    return round_to_fp4(hadamard(keys.to(dtype)))


def make_keys(kv: Tensor, gate: Tensor, weights: CompressorWeights, positions: Tensor) -> Tensor:
    """Pool rows into keys by a softmax of their gates, then apply RMSNorm and RoPE: [num_keys, head_dim] float32.

    kv, gate: [num_keys, rows, head_dim] float32, biases added. positions: [num_keys], of each block's first token.
    """
    keys = _pool(kv, gate)
    mean_square = tree_sum(keys * keys) / keys.shape[1]
    normed = keys * (mean_square[:, None] + weights.norm_eps).rsqrt() * weights.norm_weight
    return rope_last(normed, positions, weights.inv_freq, interleaved=True)


def _pool(kv: Tensor, gate: Tensor) -> Tensor:
    """Sum kv over rows, by a softmax of gates per channel: [num_keys, rows, head_dim] twice -> [num_keys, head_dim]."""
    share = (gate - gate.amax(1, keepdim=True)).exp()
    total = tree_sum(share.transpose(1, 2))
    return tree_sum((kv * share).transpose(1, 2)) / total
