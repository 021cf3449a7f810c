"""Coordinates in which head_dim is split into subspaces.

For any invertible A, (q @ A) . (k @ inverse(A).T) = q . k, so the split may happen in coordinates where it
loses least. `key_whitened` takes A = sqrt(cov(k)) @ R with R the principal axes of the queries so scaled:
keys then have unit covariance in every subspace, so that the error of replacing a query part by its centroid
is the same as the error of the scores; and a query's energy is sorted, and dealt out evenly to the subspaces.

Second moments are summed where the rows are; their axes are found on the CPU, which is faster at such small
matrices. Each head has one thread there: MKL's sums and axes depend on the number of threads, and on how many heads it
is given at once. Devices agree on a basis up to rounding, not to the bit.
"""

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager

import torch
from torch import Tensor

from csattn.config import Basis

# Directions in which keys hardly vary would be blown up by whitening; this share of the mean variance keeps them.
_RIDGE = 1e-4
_BLOCK_LEN = 4096  # rows held in float64 at a time


def make_bases(
    kind: Basis,
    queries: Tensor,  # [num_heads, num_queries, head_dim]
    centered_keys: Tensor,  # [num_heads, context_len, head_dim] float32
    num_subspaces: int,
    threads: Executor,  # for what runs on the CPU
) -> tuple[Tensor, Tensor]:
    """query_basis and key_basis, so that (q @ query_basis) . (k @ key_basis) = q . k.

    Both [num_heads, head_dim, head_dim] float32, on the device of the queries.
    """
    num_heads, _, head_dim = queries.shape
    if kind == "key_whitened":
        with _one_thread():
            moments = _second_moments(centered_keys, threads).cpu(), _second_moments(queries, threads).cpu()
            bases = _key_whitened(*moments, num_subspaces)
        return bases[0].to(queries.device), bases[1].to(queries.device)
    basis = torch.eye(head_dim, device=queries.device)
    if kind == "rope_pairs":
        basis = basis[:, _rope_pair_order(head_dim, num_subspaces)]
    basis = basis.expand(num_heads, -1, -1).contiguous()
    return basis, basis


@contextmanager
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _rope_pair_order(head_dim: int, num_subspaces: int) -> Tensor:
    """Dimensions reordered so that a subspace holds whole RoPE pairs (d, d + head_dim/2), frequencies spread."""
    num_pairs = head_dim // 2
    pairs = torch.arange(num_pairs)
    if num_pairs % num_subspaces == 0:
        pairs = pairs.view(-1, num_subspaces).T.flatten()
    return torch.stack([pairs, pairs + num_pairs], dim=1).flatten()


def _second_moments(rows: Tensor, threads: Executor) -> Tensor:
    """Mean of r r^T over rows [num_heads, num_rows, head_dim]: [num_heads, head_dim, head_dim] float64."""
    if rows.is_cuda:
        return _sum_moments(rows) / rows.shape[1]
    return torch.cat(list(threads.map(_sum_moments, torch.split(rows, 1)))) / rows.shape[1]


def _sum_moments(rows: Tensor) -> Tensor:
    """Sum of r r^T over rows [num_heads, num_rows, head_dim]."""
    head_dim = rows.shape[2]
    total = torch.zeros(len(rows), head_dim, head_dim, dtype=torch.float64, device=rows.device)
    for start in range(0, rows.shape[1], _BLOCK_LEN):
        wide = rows[:, start : start + _BLOCK_LEN].double()
        total += wide.mT @ wide
    return total


def _key_whitened(key_moments: Tensor, query_moments: Tensor, num_subspaces: int) -> tuple[Tensor, Tensor]:
    head_dim = key_moments.shape[1]
    ridge = _RIDGE * key_moments.diagonal(dim1=1, dim2=2).mean(1)
    ridge = torch.where(ridge > 0, ridge, 1.0)
    variances, axes = torch.linalg.eigh(key_moments + ridge[:, None, None] * torch.eye(head_dim))
    spread = variances.sqrt()[:, None]
    root, inverse_root = axes * spread @ axes.mT, axes / spread @ axes.mT
    _, principal = torch.linalg.eigh(root @ query_moments @ root)
    rotation = principal.flip(2)[:, :, _snake_order(head_dim, num_subspaces)]
    return (root @ rotation).float(), (inverse_root @ rotation).float()


def _snake_order(head_dim: int, num_subspaces: int) -> Tensor:
    """Deal axes, strongest first, to the subspaces in turn, back and forth, so that all get like energy."""
    rounds = torch.arange(head_dim).view(-1, num_subspaces)
    rounds[1::2] = rounds[1::2].flip(1)
    return rounds.T.flatten()
