"""What a step does in layers of linear attention, noted on a tape."""

from typing import Any

from csattn.batch import StepRows
from csattn.models.spec import DeltaSpec
from csattn.models.weights import DeltaWeights
from workers.model.cpu.delta_stages import MIX, REMEMBER, mix_pieces, mix_stage, remember_stage
from workers.model.cpu.notes import Notes
from workers.model.ops import DeltaRoom, DeltaState


class TapeDeltaOps(Notes):
    """A part of `TapeOps`."""

    def delta(
        self,
        weights: DeltaWeights,
        spec: DeltaSpec,
        eps: float,
        rows: StepRows,
        state: DeltaState,
        room: DeltaRoom,
    ) -> None:
        """state: of two versions."""
        told: dict[str, Any] = {
            "num_rows": self._num_rows,
            "tail_ids": rows.tail_ids,
            "turns": state.turn,
            "inputs": room.inputs,
            "in_width": spec.in_width,
            "num_channels": spec.num_channels,
            "mixed": room.mixed,
        }
        self._note(
            mix_stage,
            MIX,
            reads=[room.inputs],
            writes=[room.mixed],
            per_row=mix_pieces(spec.num_channels),
            conv=weights.conv,
            conv_len=spec.conv_len,
            kept=state.conv,
            **told,
        )
        self._note(
            remember_stage,
            REMEMBER,
            reads=[room.inputs, room.mixed],
            writes=[room.out],
            per_row=spec.num_v_heads,
            num_k_heads=spec.num_k_heads,
            num_v_heads=spec.num_v_heads,
            k_dim=spec.k_dim,
            v_dim=spec.v_dim,
            decay=weights.decay,
            decay_bias=weights.decay_bias,
            norm=weights.norm,
            eps=self._number(eps),
            memory=state.memory,
            out=room.out,
            **told,
        )
