"""Tables of a tiled context, made on its device by the build's own code, and what a search reads of them."""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from bench.decode.recorded import WideIndex
from index_build.tables import make_list_table, make_row_table


def make_table(keys: Tensor, index: WideIndex) -> tuple[Tensor, Tensor]:
    """Codes and scales of a `RowTable`, or scores and indices of a `ListTable`.

    keys: [num_kv_heads, context_len, head_dim].
    """
    mean, basis, codebooks = (
        torch.from_numpy(array).to(keys.device) for array in (index.key_mean, index.key_basis, index.codebooks)
    )
    keys = keys.repeat_interleave(len(codebooks) // len(keys), dim=0).float().sub_(mean[:, None])
    in_basis = basis.mT @ keys.mT
    with ThreadPoolExecutor(1) as threads:  # only a CPU's tables use it
        if index.config.layout == "rows":
            return make_row_table(codebooks, in_basis, index.config.score_bits, threads)
        indices, scores = make_list_table(codebooks, in_basis, index.config.list_entries(keys.shape[1]), threads)
        return scores, indices


def distinct_rows(q: Tensor, index: WideIndex) -> float:
    """Rows or lists that a search reads per index head, each counted once: mean over steps and heads.

    q: [num_steps, num_q_heads, head_dim].
    """
    if index.config.pool_group:
        return index.config.num_subspaces
    basis, codebooks = (torch.from_numpy(array).to(q.device) for array in (index.query_basis, index.codebooks))
    num_heads, num_subspaces, num_centroids = codebooks.shape[:3]
    grouped = q.float().view(len(q), num_heads, -1, q.shape[2])
    parts = torch.einsum("shgd,hde->shge", grouped, basis).unflatten(3, (num_subspaces, -1))
    ids = torch.einsum("shgme,hmce->shgmc", parts, codebooks).argmax(-1)  # [num_steps, num_heads, group, subspaces]
    taken = torch.zeros(len(q), num_heads, num_subspaces, num_centroids, device=q.device)
    return float(taken.scatter_(3, ids.permute(0, 1, 3, 2), 1.0).sum((2, 3)).mean())
