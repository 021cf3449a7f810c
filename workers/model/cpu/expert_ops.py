"""What a step does in layers of experts, noted on a tape."""

from torch import Tensor

from csattn.cpu.addresses import KindStage
from csattn.models.spec import ExpertsSpec
from csattn.models.weights import ExpertWeights
from workers.model.cpu.expert_stages import (
    ADD_EXPERTS,
    CHOOSE,
    EXPERTS,
    SCORES,
    add_experts_stage,
    choose_stage,
    experts_stage,
)
from workers.model.cpu.linear_stage import ACTIVATIONS, linear_pieces
from workers.model.cpu.notes import Notes
from workers.model.ops import ExpertRoom, Normed, Readers, Stream


class TapeExpertOps(Notes):
    """A part of `TapeOps`."""

    def choose_experts(self, bias: Tensor | None, scales: Tensor | None, spec: ExpertsSpec, room: ExpertRoom) -> None:
        num_groups, num_kept = spec.groups
        self._note(
            choose_stage,
            CHOOSE,
            reads=[room.logits],
            writes=[room.chosen, room.shares],
            logits=room.logits,
            bias=bias,
            num_experts=spec.num_experts,
            num_chosen=spec.num_chosen,
            scores=SCORES.index(spec.scores),
            num_groups=num_groups,
            num_kept=num_kept,
            normed=spec.normed,
            scale=self._number(spec.scale),
            scales=scales,
            chosen=room.chosen,
            shares=room.shares,
        )

    def experts(self, x: Normed, weights: ExpertWeights, spec: ExpertsSpec, room: ExpertRoom) -> None:
        bias = weights.gate_bias
        assert weights.gates.stride() == weights.ups.stride() and weights.gates.stride(2) == 1
        self._note(
            KindStage(experts_stage, self._kind),
            EXPERTS,
            reads=[x.x, room.chosen, room.shares],
            writes=[room.gated],
            per_row=spec.num_chosen * linear_pieces(spec.intermediate_size),
            x=x.x,
            num_in=x.x.shape[1],
            chosen=room.chosen,
            shares=room.shares if spec.on_input else None,
            num_chosen=spec.num_chosen,
            gates=weights.gates.data_ptr(),
            ups=weights.ups.data_ptr(),
            expert_stride=weights.gates.stride(0),
            row_stride=weights.gates.stride(1),
            gate_bias=0 if bias is None else bias.data_ptr(),
            up_bias=0 if weights.up_bias is None else weights.up_bias.data_ptr(),
            bias_stride=0 if bias is None else bias.stride(0),
            bias_step=0 if bias is None else bias.stride(1),
            activation=ACTIVATIONS.index(spec.activation),
            num_out=spec.intermediate_size,
            out=room.gated,
        )

    def experts_add(
        self,
        weights: ExpertWeights,
        spec: ExpertsSpec,
        room: ExpertRoom,
        multiplier: float,
        stream: Stream,
        readers: Readers,
    ) -> None:
        self._add_experts(weights, spec, room, stream.hidden, multiplier)
        self._prepare(stream, readers)

    def experts_out(self, weights: ExpertWeights, spec: ExpertsSpec, room: ExpertRoom, out: Tensor) -> None:
        self._add_experts(weights, spec, room, out, None)

    def _add_experts(
        self,
        weights: ExpertWeights,
        spec: ExpertsSpec,
        room: ExpertRoom,
        out: Tensor,
        multiplier: float | None,  # None: nothing is added to
    ) -> None:
        hidden_size = out.shape[1]
        self._note(
            KindStage(add_experts_stage, self._kind),
            ADD_EXPERTS,
            reads=[room.gated, room.chosen, room.shares, *([out] if multiplier is not None else [])],
            writes=[out],
            per_row=linear_pieces(hidden_size),
            x=room.gated,
            num_in=spec.intermediate_size,
            chosen=room.chosen,
            shares=None if spec.on_input else room.shares,
            num_chosen=spec.num_chosen,
            down=weights.down,
            bias=weights.down_bias,
            num_out=hidden_size,
            out=out,
            multiplier=self._number(1.0 if multiplier is None else multiplier),
            adds=multiplier is not None,
        )
