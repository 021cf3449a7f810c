"""Operands of learned indexers, as DeepSeek-V3.2 (arXiv:2512.02556) and V4 make them; which keys a query may see."""

from dataclasses import dataclass

import torch
from torch import Tensor

from csattn.errors import ArrayError
from csattn.lightning.checks import require_array, require_at_least
from csattn.lightning.operands.quantise import FP8, fp4_rows_as_fp8, quantise_fp8, round_to_fp4, take
from csattn.lightning.operands.rotations import hadamard

OPERAND_DTYPES = (torch.bfloat16, torch.float16, torch.float32, FP8)


@dataclass(frozen=True, slots=True)
class Operands:
    """The inputs of scores (`score.reference`). Weights may be negative; products are summed in float32."""

    q: Tensor  # [num_queries, num_heads, head_dim] bfloat16, float16, float32 or float8_e4m3fn
    k: Tensor  # [num_keys, head_dim], of the same dtype
    weights: Tensor  # [num_queries, num_heads] float32, finite, multiplied by the queries' scales
    key_scale: Tensor | None = None  # [num_keys] float32, positive; None: all 1

    def check(self) -> None:
        """Raise ArrayError if shapes, strides, dtypes or devices do not fit together."""
        require_array("q", self.q, ("num_queries", "num_heads", "head_dim"), *OPERAND_DTYPES)
        num_queries, num_heads, head_dim = self.q.shape
        if not num_heads or not head_dim:
            raise ArrayError(f"q has shape {list(self.q.shape)}; wanted at least one head and one channel")
        require_array("k", self.k, ("num_keys", head_dim), self.q.dtype, like=self.q)
        require_array("weights", self.weights, (num_queries, num_heads), torch.float32, like=self.q)
        if self.key_scale is not None:
            require_array("key_scale", self.key_scale, (len(self.k),), torch.float32, like=self.q)

    @property
    def key_scales(self) -> Tensor:
        """Each key's scale: [num_keys] float32."""
        if self.key_scale is None:
            return torch.ones(len(self.k), dtype=torch.float32, device=self.k.device)
        return self.key_scale

    def of_queries(self, rows: slice | Tensor) -> "Operands":
        """Return the operands of some queries only, with all keys."""
        return Operands(take(self.q, rows), self.k, self.weights[rows], self.key_scale)


def causal_lens(num_queries: int, num_keys: int, *, ratio: int = 1, first_position: int = 0) -> Tensor:
    """Return how many keys each query may see: [num_queries] int32.

    ratio: tokens a key stands for (V3.2: 1; V4: 4, or 128). Key s may be seen from position t if all of its tokens lie
    at or before t: s < (t + 1) // ratio.
    """
    require_at_least("num_queries", num_queries, 0)
    require_at_least("num_keys", num_keys, 0, torch.iinfo(torch.int32).max)
    require_at_least("ratio", ratio, 1)
    require_at_least("first_position", first_position, 0)
    positions = torch.arange(first_position, first_position + num_queries)
    return ((positions + 1) // ratio).clamp(max=num_keys).to(torch.int32)


def v32_operands(
    q: Tensor,  # [num_queries, num_heads, head_dim], after RoPE
    k: Tensor,  # [num_keys, head_dim], after LayerNorm and RoPE
    projected: Tensor,  # [num_queries, num_heads], the weights as projected
    *,
    power_of_two_scales: bool = False,
) -> Operands:
    """Make V3.2's operands: Hadamard, FP8 with a scale per query head and per key; weights include queries' scales."""
    num_heads, head_dim = _heads(q, k, projected)
    q8, q_scale = quantise_fp8(hadamard(q), block=head_dim, power_of_two_scales=power_of_two_scales)
    k8, k_scale = quantise_fp8(hadamard(k), block=head_dim, power_of_two_scales=power_of_two_scales)
    weights = projected.float() * num_heads**-0.5 * q_scale[..., 0] * head_dim**-0.5
    return Operands(q8, k8, weights, k_scale[:, 0])


def v4_operands(
    q: Tensor,  # [num_queries, num_heads, head_dim], after RoPE
    k: Tensor,  # [num_keys, head_dim], on the FP4 grid: `compressor.indexer_keys`
    projected: Tensor,  # [num_queries, num_heads]
) -> Operands:
    """Make V4's operands: queries are rounded to the FP4 grid like keys, and keep their dtype."""
    num_heads, head_dim = _heads(q, k, projected)
    return Operands(round_to_fp4(hadamard(q)), k, projected.float() * (head_dim**-0.5 * num_heads**-0.5))


def in_fp8(operands: Operands) -> Operands:
    """Convert V4's operands to FP8, exactly; return them unchanged if the block scales of a row differ too much.

    A row's power of two commutes with ReLU: a query's goes into its weights, a key's into its scale.
    """
    q, q_factors, q_fits = fp4_rows_as_fp8(operands.q)
    k, k_factors, k_fits = fp4_rows_as_fp8(operands.k)
    if not bool(q_fits.all() and k_fits.all()):
        return operands
    scale = k_factors if operands.key_scale is None else k_factors * operands.key_scale
    return Operands(q, k, operands.weights * q_factors, scale)


def _heads(q: Tensor, k: Tensor, projected: Tensor) -> tuple[int, int]:
    """Return num_heads and head_dim. Raises ArrayError unless all arrays agree; q and k may have any strides."""
    if q.dim() != 3 or not q.shape[1] or not q.shape[2]:
        raise ArrayError(
            f"q has shape {list(q.shape)}; wanted [num_queries, num_heads, head_dim], at least one head and one channel"
        )
    if k.dim() != 2 or k.shape[1] != q.shape[2]:
        raise ArrayError(f"k has shape {list(k.shape)}; wanted [num_keys, {q.shape[2]}]")
    require_array("projected", projected, tuple(q.shape[:2]), like=q)
    return q.shape[1], q.shape[2]
