"""Launches of the kernels of layers of latents (MLA)."""

from typing import Any

import torch
import triton
from torch import Tensor

from csattn.batch import StepRows
from csattn.models.latent import EPS
from csattn.models.latent_spec import LatentSpec
from csattn.models.query import Rotation
from csattn.models.weights import LatentWeights
from workers.model.gpu.latent_kernels import append_latents_kernel, heads_product_kernel, make_latent_queries_kernel
from workers.model.gpu.stream_ops import Launches
from workers.model.gpu.tiles import BLOCK_N
from workers.model.ops import LatentBuffers


class TritonLatentOps(Launches):
    """The part of `TritonOps` for layers of latents."""

    def append_latents(
        self,
        weights: LatentWeights,
        spec: LatentSpec,
        rotation: Rotation,
        rows: StepRows,
        tail: Tensor,
        buffers: LatentBuffers,
    ) -> None:
        append_latents_kernel[(rows.batch_size,)](
            buffers.inputs,
            weights.kv_norm if weights.q_norm is None else weights.q_norm,
            weights.kv_norm,
            weights.kv_norm if weights.index_norm is None else weights.index_norm,
            rotation.cos,
            rotation.sin,
            rows.tail_ids,
            rows.tail_lens,
            tail,
            buffers.q_latents,
            buffers.inputs.shape[1],
            tail.shape[2],
            tail.shape[3:].numel(),
            EPS,
            Q_RANK=spec.q_rank or 0,
            KEY_AT=spec.in_widths[0],
            INDEX_DIM=spec.index_dim,
            BLOCK_Q=triton.next_power_of_2(spec.q_rank or 1),
            BLOCK_KV=triton.next_power_of_2(spec.kv_rank),
            BLOCK_INDEX=triton.next_power_of_2(max(1, spec.index_dim)),
            num_warps=4,
            **_rope_constants(spec, rotation),
            **self._launch(),
        )

    def project_latent_queries(
        self, weights: LatentWeights, spec: LatentSpec, rotation: Rotation, buffers: LatentBuffers
    ) -> None:
        queries, projected = buffers.queries, buffers.projected
        num_index_heads, index_dim = spec.num_index_heads, spec.index_dim
        make_latent_queries_kernel[(len(projected), spec.num_heads + num_index_heads)](
            buffers.inputs,
            projected,
            rotation.cos,
            rotation.sin,
            rotation.q_scale,
            queries.q,
            queries.q if queries.index_q is None else queries.index_q,
            queries.q if queries.index_weights is None else queries.index_weights,
            buffers.inputs.shape[1],
            projected.shape[1],
            max(1, num_index_heads * index_dim) ** -0.5,
            NUM_HEADS=spec.num_heads,
            NOPE_DIM=spec.nope_dim,
            NUM_INDEX_HEADS=num_index_heads,
            INDEX_DIM=index_dim,
            BLOCK_INDEX=triton.next_power_of_2(max(1, index_dim)),
            num_warps=1,
            **_rope_constants(spec, rotation),
            **self._launch(),
        )
        heads = projected[:, : spec.q_width].view(len(projected), spec.num_heads, -1)
        self._heads_product(heads[..., : spec.nope_dim], weights.up_k, queries.q[..., : spec.kv_rank], rotation.q_scale)

    def latent_values(self, weights: LatentWeights, spec: LatentSpec, buffers: LatentBuffers) -> None:
        values = buffers.values.view(len(buffers.values), spec.num_heads, spec.v_dim)
        self._heads_product(buffers.attended, weights.up_v.transpose(1, 2), values)

    def _heads_product(
        self,
        x: Tensor,  # [batch_size, num_heads, num_in]
        weight: Tensor,  # [num_heads, num_in, num_out], with any strides
        out: Tensor,  # [batch_size, num_heads, num_out]
        scales: Tensor | None = None,  # [batch_size] float32: factors of the products
    ) -> None:
        batch_size, num_heads, num_out = out.shape
        heads_product_kernel[(num_heads, triton.cdiv(num_out, BLOCK_N))](
            x,
            weight,
            x if scales is None else scales,
            out,
            batch_size,
            x.shape[2],
            num_out,
            *x.stride()[:2],
            *weight.stride(),
            *out.stride()[:2],
            SCALED=scales is not None,
            DOT_PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            BLOCK_M=max(16, triton.next_power_of_2(batch_size)),
            BLOCK_N=BLOCK_N,
            BLOCK_K=128 // x.element_size(),
            num_warps=4,
            **self._launch(),
        )


def _rope_constants(spec: LatentSpec, rotation: Rotation) -> dict[str, Any]:
    half = rotation.cos.shape[1]
    return {
        "KV_RANK": spec.kv_rank,
        "HALF": half,
        "INTERLEAVED": rotation.interleaved,
        "INDEX_INTERLEAVED": spec.indexer is not None and spec.indexer.interleaved,
        "BLOCK_HALF": triton.next_power_of_2(half),
    }
