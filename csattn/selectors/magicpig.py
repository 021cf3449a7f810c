"""MagicPIG (arXiv:2410.16179): rows are sampled by locality-sensitive hashing and reweighted by importance sampling.

As published: L tables of K signs of random projections, one set for all heads. Keys are centred before they are hashed.
A row is sampled if its key and q collide in at least two tables, and its weight in the softmax is divided by the
probability of that, given their angle. Every query head samples for itself. K = 10 and L = 150 are the paper's. The
number of rows read follows from the data; `keep` has no effect.

Different: the mean is that of all the context's keys, sinks and window included. The tail's rows are hashed as they
leave its window, with that mean (the paper keeps them all). No layer stays dense (the paper: layers 0 and 16).
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.selection import Selection
from csattn.selectors.base import ContextLayer, ContextView
from csattn.selectors.top_rows import AppendedRows, mask_resident, padded_selection

_SEED = 1234
_KEYS_PER_BLOCK = 4096


class PreparedMagicpig:
    """The projections, and L hash tables of the keys of each head.

    rows: [num_kv_heads, num_tables, context_len] int32, sorted by code, then by row. Bucket c of a table is
    rows[..., starts[..., c] : starts[..., c + 1]], with starts [num_kv_heads, num_tables, 2**num_bits + 1] int32.
    """

    def __init__(self, layer: ContextLayer, num_bits: int = 10, num_tables: int = 150, seed: int = _SEED):
        """num_bits: K, at most 14; num_tables: L, at least 2."""
        assert num_bits <= 14, "a code, and one more than the largest, is an int16"
        assert num_tables >= 2, "rows are taken where two tables agree"
        self.num_bits, self.num_tables = num_bits, num_tables
        self.keys = layer.keys
        self.projections = make_projections(layer.keys.shape[2], num_bits, num_tables, seed)
        self.key_mean = layer.keys.float().mean(1, keepdim=True)
        blocks = torch.split(layer.keys, _KEYS_PER_BLOCK, dim=1)
        codes = torch.cat([self.hash(block.float() - self.key_mean) for block in blocks], dim=1)
        by_code, rows = codes.transpose(1, 2).contiguous().sort(dim=2, stable=True)
        self.rows = rows.to(torch.int32)
        bounds = torch.arange((1 << num_bits) + 1, dtype=torch.int16).expand(*rows.shape[:2], -1).contiguous()
        self.starts = torch.searchsorted(by_code, bounds, out_int32=True)

    def hash(self, x: Tensor) -> Tensor:
        """[..., head_dim] -> codes [..., num_tables] int16."""
        return hash_codes(x, self.projections, self.num_tables)

    def num_collisions(self, kv_head: int, codes: Tensor) -> Tensor:
        """Count the tables in which each key of the context collides with a query: [context_len] int64.

        codes: [num_tables], the query's.
        """
        starts, tables = self.starts[kv_head], torch.arange(self.num_tables)
        first, last = starts[tables, codes.long()].long(), starts[tables, codes.long() + 1].long()
        sizes = last - first
        # indices of the buckets' entries, bucket after bucket, in the concatenated tables
        begins = first + tables * self.rows.shape[2] - (sizes.cumsum(0) - sizes)
        places = begins.repeat_interleave(sizes) + torch.arange(int(sizes.sum()))
        return torch.bincount(self.rows[kv_head].flatten()[places], minlength=self.rows.shape[2])

    @property
    def index_bytes(self) -> int:
        """The bytes of the tables, and of the keys' norms, which the paper keeps."""
        num_kv_heads, _, context_len = self.rows.shape
        return self.rows.nbytes + self.starts.nbytes + 4 * num_kv_heads * context_len

    def selector(self, view: ContextView) -> "MagicpigSelector":
        return MagicpigSelector(self, view)


class MagicpigSelector:
    """Samples the rows that collide with the query in at least two tables, for each query head."""

    def __init__(self, prepared: PreparedMagicpig, view: ContextView):
        self._prepared, self._view = prepared, view
        self._tail_keys = AppendedRows(prepared.keys)
        self._tail_codes = AppendedRows(torch.empty(len(prepared.keys), 0, prepared.num_tables, dtype=torch.int16))
        self.search_bytes = 0

    def append(self, k: NDArray[np.float32], v: NDArray[np.float32]) -> None:
        key = torch.from_numpy(k)
        self._tail_keys = self._tail_keys.with_row(key)
        self._tail_codes = self._tail_codes.with_row(self._prepared.hash(key - self._prepared.key_mean[:, 0]))

    def select(self, q: NDArray[np.float32], recent: Tensor) -> Selection:
        prepared, queries = self._prepared, torch.from_numpy(q)
        group_size = len(queries) // len(prepared.keys)
        rows, chances, total_collisions = [], [], 0
        for head, (query, codes) in enumerate(zip(queries, prepared.hash(queries), strict=True)):
            kv_head = head // group_size
            of_tail = (self._tail_codes.rows[kv_head] == codes).sum(-1)
            collisions = torch.cat([prepared.num_collisions(kv_head, codes), of_tail])
            total_collisions += int(collisions.sum())
            sampled = collisions >= 2
            mask_resident(sampled, self._view, False)
            rows.append(sampled.nonzero()[:, 0])
            cosines = torch.cosine_similarity(self._centred_keys(kv_head, rows[-1]), query, dim=-1)
            chances.append(sampling_probability(cosines, prepared.num_bits, prepared.num_tables))
        # a query reads the projections, and the row indices in the buckets that it falls into
        self.search_bytes = prepared.projections.nbytes + 4 * total_collisions
        selection = padded_selection(rows)
        log_weights = np.zeros(selection.kv_indices.shape, np.float32)
        for of_head, chance in zip(log_weights, chances, strict=True):
            of_head[: len(chance)] = -chance.log().numpy()
        return Selection(selection.kv_indices, selection.valid_len, log_weights)

    def _centred_keys(self, kv_head: int, rows: Tensor) -> Tensor:
        """Return the keys of these rows minus the mean: [num_rows, head_dim] float32. rows: ascending."""
        context_len = self._view.context_len
        first_of_tail = int(torch.searchsorted(rows, context_len))
        of_context = self._prepared.keys[kv_head, rows[:first_of_tail]]
        of_tail = self._tail_keys.rows[kv_head, rows[first_of_tail:] - context_len]
        return torch.cat([of_context, of_tail]).float() - self._prepared.key_mean[kv_head]


def make_projections(head_dim: int, num_bits: int, num_tables: int, seed: int = _SEED) -> Tensor:
    """Draw random directions, on the CPU: [head_dim, num_tables * num_bits] float32."""
    return torch.randn(
        head_dim, num_tables * num_bits, dtype=torch.float32, generator=torch.Generator().manual_seed(seed)
    )


def hash_codes(x: Tensor, projections: Tensor, num_tables: int) -> Tensor:
    """Pack the signs of each table's projections into a code: [..., head_dim] -> [..., num_tables] int16.

    projections: [head_dim, num_tables * num_bits].
    """
    signs = (x @ projections > 0).view(*x.shape[:-1], num_tables, -1)
    places = (1 << torch.arange(signs.shape[-1], device=x.device)).to(torch.int16)
    return (signs * places).sum(-1, dtype=torch.int16)


def sampling_probability(cosines: Tensor, num_bits: int, num_tables: int) -> Tensor:
    """Return the probability that two vectors with that cosine collide in at least two tables.

    The result has the shape of `cosines`, in float64, and is above 0.
    """
    p_collide = (1 - cosines.double().clamp(-1, 1).arccos() / torch.pi).clamp_min(1e-9) ** num_bits
    others_miss = (num_tables - 1) * torch.log1p(-p_collide.clamp(max=1 - 1e-12))
    at_most_one = others_miss + torch.log1p((num_tables - 1) * p_collide)
    rare = 0.5 * num_tables * (num_tables - 1) * p_collide**2  # leading order, where 1 - P(at most one) would cancel
    return torch.where(num_tables * p_collide < 1e-5, rare, -torch.expm1(at_most_one))
