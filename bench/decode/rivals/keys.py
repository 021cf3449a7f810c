"""What rivals make of a layer's keys once, on the device: as `csattn.selectors` makes it, for lengths that a CPU would
take minutes for."""

import torch
from torch import Tensor

from csattn.selectors.key_clusters import nearest_centroids
from offload.host_memory import allocate_rows

KEYS_TO_CLUSTER = 16_384  # k-means looks at these
ITERATIONS = 15
QUERIES_AT_ONCE = 64


def attention_received(q: Tensor, keys: Tensor, softmax_scale: float) -> Tensor:
    """What each key receives of all queries' softmax weights: [num_kv_heads, num_keys] float32.

    q: [num_queries, num_q_heads, head_dim]; keys: [num_kv_heads, num_keys, head_dim].
    """
    grouped = q.view(len(q), len(keys), -1, q.shape[2]).transpose(0, 1).flatten(1, 2).float()
    received = torch.zeros(keys.shape[:2], dtype=torch.float32, device=keys.device)
    for head, (of_head, k) in enumerate(zip(grouped, keys.float(), strict=True)):
        for some in of_head.split(QUERIES_AT_ONCE):
            received[head] += (some @ k.mT * softmax_scale).softmax(-1).sum(0)
    return received


def quantise(keys: Tensor, num_subspaces: int = 2, num_centroids: int = 256) -> tuple[Tensor, Tensor]:
    """Product-quantiser centroids [num_kv_heads, num_subspaces, num_centroids, subspace_dim] float32, by k-means over
    evenly spaced keys, and codes [num_subspaces, num_kv_heads, num_keys] uint8."""
    parts = keys.float().unflatten(2, (num_subspaces, -1)).permute(2, 0, 1, 3)
    points = parts[:, :, :: max(1, keys.shape[1] // KEYS_TO_CLUSTER)]
    centroids = points[:, :, :: max(1, points.shape[2] // num_centroids)][:, :, :num_centroids].clone()
    for _ in range(ITERATIONS):
        nearest = nearest_centroids(points, centroids)[..., None]
        sums = torch.zeros_like(centroids).scatter_add_(2, nearest.expand_as(points), points)
        counts = torch.zeros_like(centroids[..., :1]).scatter_add_(2, nearest, torch.ones_like(points[..., :1]))
        centroids = torch.where(counts > 0, sums / counts.clamp_min(1), centroids)
    codes = torch.stack([nearest_centroids(*of_part) for of_part in zip(parts, centroids, strict=True)])
    return centroids.transpose(0, 1).contiguous(), codes.to(torch.uint8)


def hash_tables(keys: Tensor, projections: Tensor, num_tables: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """MagicPIG's tables in host memory: rows, starts, key_mean and norms, see `sampled.HashedLayer`.

    keys: [num_kv_heads, num_keys, head_dim]; projections: [head_dim, num_tables * num_bits] float32, on their device.
    """
    num_heads, num_keys, _ = keys.shape
    num_bits = projections.shape[1] // num_tables
    places = (2 ** torch.arange(num_bits, device=keys.device)).float()
    bounds = torch.arange((1 << num_bits) + 1, device=keys.device).expand(num_tables, -1).contiguous()
    (rows,) = allocate_rows(1, (num_heads, num_tables, num_keys), torch.int32)
    starts = torch.empty(num_heads, num_tables, bounds.shape[1], dtype=torch.int32)
    mean = keys.float().mean(1)
    centred = keys.float() - mean[:, None]
    for head in range(num_heads):
        signs = (centred[head] @ projections > 0).view(num_keys, num_tables, num_bits)
        codes = (signs.float() @ places).T.contiguous().to(torch.int16)
        by_code, order = codes.sort(dim=1, stable=True)
        rows[head].copy_(order.to(torch.int32))
        starts[head].copy_(torch.searchsorted(by_code.long(), bounds, out_int32=True))
    return rows, starts, mean.cpu(), centred.norm(dim=-1).cpu()
