"""Small operands for selection: random ones, and ones with awkward scores."""

import torch

from csattn.lightning import Operands

KINDS = ("random", "equal", "ascending", "descending", "few values", "zero", "one bin", "nan and inf")


def make_operands(
    kind: str,
    num_queries: int,
    num_keys: int,
    num_heads: int = 2,
    head_dim: int = 8,
    dtype: torch.dtype = torch.float32,
    key_scale: bool = False,
) -> Operands:
    """Make operands whose scores are of that kind; except for "random", they are exact in any order of summation."""
    q, k = torch.zeros(num_queries, num_heads, head_dim), torch.zeros(num_keys, head_dim)
    weights = torch.ones(num_queries, num_heads)
    q[..., 0] = 1
    position = torch.arange(num_keys, dtype=torch.float32)
    if kind == "random":
        q, k = torch.randn(q.shape), torch.randn(k.shape)
        weights = torch.randn(weights.shape)
    elif kind == "equal":
        k[:, 0] = 1
    elif kind == "ascending":
        k[:, 0] = position
    elif kind == "descending":
        k[:, 0] = num_keys - position
    elif kind == "few values":
        k[:, 0] = (position * 7919) % 5 - 1  # ReLU turns some into zeros
    elif kind == "zero":
        weights[:, ::2] = -0.0
    elif kind == "one bin":
        k[:, 0] = 1 + torch.randint(0, 8, (num_keys,)) / 1024
    else:
        k[:, 0] = position % 3
        k[::4, 0] = torch.nan
        k[1::4, 0] = torch.inf
    scale = 2.0 ** torch.randint(-3, 3, (num_keys,)) if key_scale else None
    return Operands(q.to(dtype), k.to(dtype), weights, scale)
