"""The Triton operations of latents (MLA) agree with their definition in torch."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton", reason="Triton, whose interpreter runs these kernels on a CPU, is not installed")

from csattn.models.latent_spec import IndexerSpec, LatentSpec
from csattn.models.query import Queries
from csattn.models.weights import LatentWeights
from tests.workers.model.step_ops import DEVICE, DTYPES, EPS, make_rotation, make_rows, randn, tolerance
from workers.model.gpu.triton_ops import TritonOps
from workers.model.ops import LatentBuffers
from workers.model.torch_ops import TorchOps

INDEXER = IndexerSpec(num_heads=3, head_dim=13, interleaved=False)
WIDE = IndexerSpec(num_heads=4, head_dim=128, interleaved=True)
LATENTS = [  # the last has DeepSeek-V3.2's widths of a head
    LatentSpec(num_heads=3, q_rank=None, kv_rank=20, nope_dim=12, rope_dim=6, v_dim=5),
    LatentSpec(num_heads=5, q_rank=24, kv_rank=37, nope_dim=7, rope_dim=10, v_dim=20, indexer=INDEXER, top_k=4),
    LatentSpec(num_heads=2, q_rank=9, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128, indexer=WIDE, top_k=4),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("spec", LATENTS)
def test_triton_latent_ops_equal_torch(spec: LatentSpec, interleaved: bool, dtype: torch.dtype) -> None:
    """Rows of several requests, beside an idle one. Tail rows that no row writes stay as they were."""
    rows = make_rows([0, 1, -1, -1], [2, 0, 0, 1], [5, 0, 1, 2])
    weights, rotation = latent_weights(spec, dtype), make_rotation(4, spec.rope_dim // 2, interleaved)
    inputs, tail = randn(4, sum(spec.in_widths), dtype=dtype), randn(3, 1, 6, 2, -(-spec.row_width // 2), dtype=dtype)
    got, want = (latent_buffers(spec, inputs, dtype) for _ in range(2))
    tails = tail.clone(), tail.clone()
    for ops, buffers, own in ((TritonOps(DEVICE, EPS), got, tails[0]), (TorchOps(EPS), want, tails[1])):
        ops.append_latents(weights, spec, rotation, rows, own, buffers)
        buffers.projected.copy_(want.projected)
        ops.project_latent_queries(weights, spec, rotation, buffers)
        ops.latent_values(weights, spec, buffers)
    own = tuple(tail.flatten(3)[..., : spec.row_width] for tail in tails)
    torch.testing.assert_close(*own, **tolerance(dtype))
    behind = (tail.flatten(3)[..., spec.row_width :] for tail in (tails[0], tail))
    assert torch.equal(*(x[[0, 1]][:, :, 2:] for x in (tails[0], tail))) and all(x.shape[-1] < 2 for x in behind)
    if spec.q_rank is not None:
        torch.testing.assert_close(got.q_latents, want.q_latents, **tolerance(dtype))
    for made, wanted in zip(dataclasses.astuple(got.queries), dataclasses.astuple(want.queries), strict=True):
        assert (made is None) == (wanted is None)
        if made is not None:
            torch.testing.assert_close(made, wanted, **tolerance(dtype))
    torch.testing.assert_close(got.values, want.values, **tolerance(dtype))


def latent_weights(spec: LatentSpec, dtype: torch.dtype) -> LatentWeights:
    ups = [randn(spec.num_heads, n, spec.kv_rank, dtype=dtype, scale=0.2) for n in (spec.nope_dim, spec.v_dim)]
    return LatentWeights(
        inputs=(),
        queries=(),
        up_k=ups[0],
        up_v=ups[1],
        q_norm=None if spec.q_rank is None else 1 + randn(spec.q_rank, scale=0.3),
        kv_norm=1 + randn(spec.kv_rank, scale=0.3),
        index_norm=None if spec.indexer is None else 1 + randn(2, spec.indexer.head_dim, scale=0.3),
    )


def latent_buffers(spec: LatentSpec, inputs: torch.Tensor, dtype: torch.dtype) -> LatentBuffers:
    """Make buffers whose outputs are NaN."""

    def nan(*sizes: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.full((len(inputs), *sizes), torch.nan, dtype=of, device=DEVICE)

    indexer, seed = spec.indexer, torch.Generator().manual_seed(1)
    projected = torch.randn(len(inputs), spec.q_width + spec.index_q_width, generator=seed).to(DEVICE, dtype)
    attended = torch.randn(len(inputs), spec.num_heads, spec.kv_rank, generator=seed).to(DEVICE, dtype)
    queries = Queries(
        nan(spec.num_heads, spec.key_width),
        None if indexer is None else nan(indexer.num_heads, indexer.head_dim),
        None if indexer is None else nan(indexer.num_heads, of=torch.float32),
    )
    q_latents = nan(spec.q_rank or 0)
    return LatentBuffers(
        inputs, q_latents, inputs if spec.q_rank is None else projected, queries, attended, nan(spec.v_width)
    )
