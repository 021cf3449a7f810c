"""Operations on a step's rows before and after compressed attention, in Triton: see `compressed_ops`."""

from typing import Any

import torch
from torch import Tensor

from csattn.models.latent_spec import CompressedSpec
from csattn.models.query import Queries
from csattn.models.weights import CompressedStepWeights
from workers.engine.gpu.compressed_memory import LayerMemory, SeenCompressed
from workers.engine.gpu.compressed_ops import CompressedOps
from workers.model.gpu.compressed_kernels import append_kernel, compress_kernel, make_queries_kernel, unrotate_kernel

_BLOCK, _TOKENS = 1024, 8  # numbers of a program, and tokens that it adds at a time


class TritonCompressedOps(CompressedOps):
    """Enqueues its kernels on torch's current stream."""

    def append(
        self,
        inputs: Tensor,
        weights: CompressedStepWeights,
        seen: SeenCompressed,
        layer: LayerMemory,
    ) -> None:
        spec, (_, num_pending, width) = layer.spec, layer.pending.shape
        append_kernel[(len(inputs), 1 + -(-width // _BLOCK))](
            *(inputs, weights.kv_norm, seen.cos, seen.sin, seen.own, seen.slots, seen.positions),
            *(layer.rows, layer.pending, inputs.shape[1], num_pending, width, weights.eps),
            DIM=spec.head_dim,
            BLOCK=_BLOCK,
            **_rope_constants(spec),
        )

    def compress(
        self,
        weights: CompressedStepWeights,
        seen: SeenCompressed,
        layer: LayerMemory,
    ) -> None:
        spec, (_, num_pending, width) = layer.spec, layer.pending.shape
        kinds = [(weights.rows, layer.compressed, 0), (weights.keys, layer.keys, 2 * spec.compressed_widths[0])]
        for made_by, out, kv_at in kinds:
            if made_by is None:
                continue
            compress_kernel[(len(seen.positions),)](
                *(layer.pending, made_by.position_bias, made_by.norm_weight, seen.first_cos, seen.first_sin),
                *(seen.slots, seen.positions, seen.written, out),
                *(num_pending, width, kv_at, layer.nowhere, made_by.norm_eps),
                RATIO=spec.ratio,
                SERIES=spec.series,
                DIM=made_by.head_dim,
                HALF=spec.rope_dim // 2,
                BLOCK_PAIRS=_block(made_by.head_dim // 2),
                TOKENS=_TOKENS,
            )

    def make_queries(
        self,
        projected: Tensor,
        inputs: Tensor,
        weights: CompressedStepWeights,
        seen: SeenCompressed,
        layer: LayerMemory,
    ) -> Queries:
        num_rows, spec, of = len(projected), layer.spec, layer.spec.indexer
        num_index_heads, index_dim = (0, 2) if of is None else (of.num_heads, of.head_dim)
        q = layer.rows.new_empty(num_rows, spec.num_heads, spec.head_dim)
        index_q = layer.rows.new_empty(num_rows, num_index_heads, index_dim)
        index_weights = torch.empty(num_rows, num_index_heads, dtype=torch.float32, device=q.device)
        scale = (num_index_heads * index_dim) ** -0.5 if of is not None else 1.0
        make_queries_kernel[(num_rows, spec.num_heads + num_index_heads)](
            *(projected, inputs, seen.cos, seen.sin, q, index_q, index_weights),
            *(projected.shape[1], inputs.shape[1], scale, weights.eps),
            NUM_HEADS=spec.num_heads,
            DIM=spec.head_dim,
            NUM_INDEX_HEADS=num_index_heads,
            INDEX_DIM=index_dim,
            BLOCK_INDEX=_block(index_dim // 2),
            **_rope_constants(spec),
        )
        return Queries(q, None if of is None else index_q, None if of is None else index_weights)

    def unrotate(
        self,
        attended: Tensor,
        weights: CompressedStepWeights,
        seen: SeenCompressed,
        layer: LayerMemory,
        out: Tensor,
    ) -> None:
        spec = layer.spec
        unrotate_kernel[(len(attended), spec.num_heads)](
            *(attended, seen.cos, seen.sin, out),
            NUM_HEADS=spec.num_heads,
            HEADS=spec.num_heads // spec.num_groups,
            DIM=spec.head_dim,
            **_rope_constants(spec),
        )


def _rope_constants(spec: CompressedSpec) -> dict[str, Any]:
    return {"HALF": spec.rope_dim // 2, "BLOCK_PAIRS": _block(spec.head_dim // 2)}


def _block(num_pairs: int) -> int:
    """Return the least power of two that is not less than num_pairs."""
    return 1 << (num_pairs - 1).bit_length()
