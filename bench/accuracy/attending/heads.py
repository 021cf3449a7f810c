"""Statistics of the queries and keys of a layer's heads: their spectra, and each subspace's part in a score."""

import torch
from torch import Tensor

from bench.accuracy.attending.context import ContextLayer
from csattn.config import ListConfig

NUM_SUBSPACES = ListConfig().num_subspaces
LIST_LEN = ListConfig().list_len


def describe_heads(layer: ContextLayer, q: Tensor, top_k: int) -> dict[str, Tensor]:
    """Return statistics, each a mean over the layer's heads.

    q: [num_kv_heads, group_size, num_tokens, head_dim], of the tokens that follow.

    spectrum_*: share of the energy in each principal axis [head_dim], for the context's queries, its keys, and its
    keys minus their mean. keys_by_query_axis: share of the energy of the keys minus their mean, in each query axis.
    mean_share: share of the keys' energy that is in their mean [1].
    share_*: each subspace's share of the sum of |q . k|, the largest first [NUM_SUBSPACES], without and with centring.
    in_list: in the order of share_centred, the share of the exact Top-K rows in a subspace's best quarter of the rows.
    """
    queries, keys = layer.q.flatten(1, 2).double(), layer.k.double()
    mean = keys.mean(1, keepdim=True)
    centred = keys - mean
    query_energy, axes = torch.linalg.eigh(queries.mT @ queries)
    energies = {"spectrum_queries": query_energy.flip(1)}
    energies |= {"spectrum_keys": torch.linalg.eigvalsh(keys.mT @ keys).flip(1)}
    energies |= {"spectrum_centred_keys": torch.linalg.eigvalsh(centred.mT @ centred).flip(1)}
    energies |= {"keys_by_query_axis": (centred @ axes).square().sum(1).flip(1)}
    described = {name: (energy / energy.sum(1, keepdim=True)).mean(0) for name, energy in energies.items()}
    described["mean_share"] = (mean.square().sum(2) / keys.square().sum(2).mean(1, keepdim=True)).mean(0)
    return {**described, **_subspaces(layer, q, centred.float(), top_k)}


def _subspaces(layer: ContextLayer, q: Tensor, centred: Tensor, top_k: int) -> dict[str, Tensor]:
    best = (q @ layer.k[:, None].mT).topk(top_k, dim=-1).indices
    parts = [x.unflatten(-1, (NUM_SUBSPACES, -1)).movedim(-2, 0) for x in (q, layer.k, centred)]
    found: dict[str, list[Tensor]] = {"plain": [], "centred": [], "in_list": []}
    for queries, keys, centred_keys in zip(*parts, strict=True):
        plain, scores = queries @ keys[:, None].mT, queries @ centred_keys[:, None].mT
        found["plain"].append(plain.abs().mean((2, 3)))
        found["centred"].append(scores.abs().mean((2, 3)))
        least = scores.quantile(1 - LIST_LEN, dim=-1, keepdim=True)
        found["in_list"].append((scores >= least).gather(3, best).float().mean((2, 3)))
    plain, shared, in_list = (torch.stack(values, dim=-1) for values in found.values())
    order = shared.argsort(dim=-1, descending=True)
    shares = {"share_plain": plain.sort(dim=-1, descending=True).values, "share_centred": shared.gather(-1, order)}
    described = {name: (share / share.sum(-1, keepdim=True)).mean((0, 1)) for name, share in shares.items()}
    return {**described, "in_list": in_list.gather(-1, order).mean((0, 1))}
