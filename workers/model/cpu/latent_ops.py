"""What a step does to rows of latents by themselves, noted on a tape."""

from typing import Any

from torch import Tensor

from csattn.batch import StepRows
from csattn.cpu.addresses import KindStage
from csattn.models.spec import LatentSpec
from csattn.models.weights import LatentWeights
from workers.model.cpu.latent_stages import APPEND, ASK, VALUES, append_stage, ask_stage, values_stage
from workers.model.cpu.notes import Notes
from workers.model.ops import LatentRoom, Rotation


class TapeLatentOps(Notes):
    """A part of `TapeOps`."""

    def append_latents(
        self,
        weights: LatentWeights,
        spec: LatentSpec,
        rotation: Rotation,
        rows: StepRows,
        tail: Tensor,
        room: LatentRoom,
    ) -> None:
        _, _, tail_capacity, _, head_dim = tail.shape
        indexer, (key_at, key_width, index_dim, _) = spec.indexer, spec.in_widths
        self._note(
            KindStage(append_stage, self._kind),
            APPEND,
            reads=[room.inputs],
            writes=[tail, room.q_latents],
            inputs=room.inputs,
            in_width=room.inputs.shape[1],
            q_rank=spec.q_rank or 0,
            key_at=key_at,
            kv_rank=spec.kv_rank,
            index_at=key_at + key_width,
            index_dim=index_dim,
            index_interleaved=indexer is not None and indexer.interleaved,
            q_norm=weights.q_norm,
            kv_norm=weights.kv_norm,
            index_norm=weights.index_norm,
            tails=tail,
            tail_capacity=tail_capacity,
            width=2 * head_dim,
            tail_ids=rows.tail_ids,
            tail_lens=rows.tail_lens,
            q_latents=room.q_latents,
            **_turning(rotation),
        )

    def ask_latents(self, weights: LatentWeights, spec: LatentSpec, rotation: Rotation, room: LatentRoom) -> None:
        indexer, asked = spec.indexer, room.queries
        num_index_heads, index_dim = (0, 0) if indexer is None else (indexer.num_heads, indexer.head_dim)
        index = [] if asked.index_q is None or asked.index_weights is None else [asked.index_q, asked.index_weights]
        assert weights.up_k.stride()[1:] == (spec.kv_rank, 1)
        self._note(
            KindStage(ask_stage, self._kind),
            ASK,
            reads=[room.inputs, room.projected],
            writes=[asked.q, *index],
            per_row=spec.num_heads + num_index_heads,
            inputs=room.inputs,
            in_width=room.inputs.shape[1],
            projected=room.projected,
            projected_width=room.projected.shape[1],
            num_heads=spec.num_heads,
            nope_dim=spec.nope_dim,
            kv_rank=spec.kv_rank,
            up_k=weights.up_k.data_ptr(),
            head_stride=weights.up_k.stride(0),
            num_index_heads=num_index_heads,
            index_dim=index_dim,
            index_interleaved=indexer is not None and indexer.interleaved,
            weight_scale=self._number((num_index_heads * index_dim) ** -0.5 if indexer is not None else 0.0),
            q=asked.q,
            index_q=asked.index_q,
            index_weights=asked.index_weights,
            **_turning(rotation),
        )

    def latent_values(self, weights: LatentWeights, spec: LatentSpec, room: LatentRoom) -> None:
        assert weights.up_v.stride()[1:] == (spec.kv_rank, 1)
        self._note(
            KindStage(values_stage, self._kind),
            VALUES,
            reads=[room.attended],
            writes=[room.values],
            per_row=spec.num_heads,
            attended=room.attended,
            num_heads=spec.num_heads,
            kv_rank=spec.kv_rank,
            up_v=weights.up_v.data_ptr(),
            head_stride=weights.up_v.stride(0),
            v_dim=spec.v_dim,
            values=room.values,
        )


def _turning(rotation: Rotation) -> dict[str, Any]:
    return {
        "cos": rotation.cos,
        "sin": rotation.sin,
        "half": rotation.cos.shape[1],
        "interleaved": rotation.interleaved,
    }
