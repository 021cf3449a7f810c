"""`StepOps` that note a step on tapes, to be done later by a team of threads, for as many rows as come."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from csattn.batch import StepRows
from csattn.cpu.addresses import KindStage, Stage
from csattn.cpu.arguments import words_of
from csattn.cpu.tape import Tape
from csattn.models.spec import Activation, DeltaSpec, ExpertsSpec, LatentSpec, Temper
from csattn.models.weights import DeltaWeights, ExpertWeights, Frequencies, HeadNorms, LatentWeights, Linear
from workers.model.cpu.delta_stages import MIX, REMEMBER, mix_pieces, mix_stage, remember_stage
from workers.model.cpu.expert_stages import (
    ADD_EXPERTS,
    CHOOSE,
    EXPERTS,
    SCORES,
    add_experts_stage,
    choose_stage,
    expert_pieces,
    experts_stage,
)
from workers.model.cpu.latent_stages import APPEND, ASK, VALUES, append_stage, ask_stage, values_stage
from workers.model.cpu.linear_stage import ACTIVATIONS, LINEAR, linear_pieces, linear_stage
from workers.model.cpu.row_stages import (
    EMBED,
    FINISH_LOGITS,
    GATE,
    PREDICT,
    PREPARE,
    ROTATE,
    embed_stage,
    finish_logits_stage,
    gate_stage,
    predict_stage,
    prepare_stage,
    rotate_stage,
)
from workers.model.ops import DeltaState, LatentRoom, Normed, Readers, Rotation, Stream


class TapeOps:
    """Notes operations until `cut`, which makes a tape of them.

    A stage begins when those are done that it must not overtake: stages that have nothing to do with each other stand
    side by side. The stream's `scaled` is the normed stream; its `squares` are not used. Rotations are computed, and
    tokens drawn, by whoever fills the rows.
    """

    def __init__(self, kind: str, num_rows: NDArray[np.int64]) -> None:
        """kind: dtype of the model's weights. num_rows: [1], of the next step."""
        self._kind, self._num_rows = kind, num_rows
        self._noted: list[_Stage] = []
        self._numbers: dict[float, NDArray[np.float64]] = {}
        self._levels = _Levels()

    def cut(self) -> "RowTape":
        """What was noted since the last cut."""
        noted, self._noted, self._levels = self._noted, [], _Levels()
        return RowTape(noted)

    def break_chain(self) -> None:
        pass

    def begin(
        self,
        rows: StepRows,
        embedding: Tensor,
        multiplier: float,
        stream: Stream,
        readers: Readers,
    ) -> None:
        vocab_size, width = embedding.shape
        self._note(
            KindStage(embed_stage, self._kind),
            EMBED,
            reads=[],
            writes=[stream.hidden],
            per_row=1,
            token_ids=rows.token_ids,
            embedding=embedding,
            vocab_size=vocab_size,
            width=width,
            multiplier=self._number(multiplier),
            out=stream.hidden,
        )
        self._prepare(stream, readers)

    def turn(self, rows: StepRows, frequencies: Frequencies, temper: Temper | None, rotation: Rotation) -> None:
        pass

    def linear(self, x: Normed, linears: Sequence[Linear], out: Tensor) -> None:
        column = 0
        for linear in linears:
            self._linear(x.x, linear, out[:, column:])
            column += len(linear.weight)

    def mlp(self, x: Normed, gate_up: Sequence[Linear], gated: bool, activation: Activation, out: Tensor) -> None:
        *gate, up = gate_up
        assert len(gate) == gated
        if gated:
            self._linear(x.x, gate[0], out, activation, up)
        else:
            self._linear(x.x, up, out, activation)

    def choose_experts(
        self, logits: Tensor, bias: Tensor | None, spec: ExpertsSpec, chosen: Tensor, shares: Tensor
    ) -> None:
        num_groups, num_kept = spec.groups
        self._note(
            choose_stage,
            CHOOSE,
            reads=[logits],
            writes=[chosen, shares],
            per_row=1,
            logits=logits,
            bias=bias,
            num_experts=spec.num_experts,
            num_chosen=spec.num_chosen,
            scores=SCORES.index(spec.scores),
            num_groups=num_groups,
            num_kept=num_kept,
            normed=spec.normed,
            scale=self._number(spec.scale),
            chosen=chosen,
            shares=shares,
        )

    def experts(
        self, x: Normed, weights: ExpertWeights, spec: ExpertsSpec, chosen: Tensor, shares: Tensor, gated: Tensor
    ) -> None:
        bias = weights.gate_bias
        assert weights.gates.stride() == weights.ups.stride() and weights.gates.stride(2) == 1
        self._note(
            KindStage(experts_stage, self._kind),
            EXPERTS,
            reads=[x.x, chosen, shares],
            writes=[gated],
            per_row=spec.num_chosen * expert_pieces(spec.intermediate_size),
            x=x.x,
            num_in=x.x.shape[1],
            chosen=chosen,
            shares=shares if spec.on_input else None,
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
            out=gated,
        )

    def experts_add(
        self,
        gated: Tensor,
        weights: ExpertWeights,
        spec: ExpertsSpec,
        chosen: Tensor,
        shares: Tensor,
        parts: Tensor,
        multiplier: float,
        stream: Stream,
        readers: Readers,
    ) -> None:
        hidden_size = stream.hidden.shape[1]
        self._note(
            KindStage(add_experts_stage, self._kind),
            ADD_EXPERTS,
            reads=[gated, chosen, shares, stream.hidden],
            writes=[stream.hidden],
            per_row=expert_pieces(hidden_size),
            x=gated,
            num_in=spec.intermediate_size,
            chosen=chosen,
            shares=None if spec.on_input else shares,
            num_chosen=spec.num_chosen,
            down=weights.down,
            bias=weights.down_bias,
            num_out=hidden_size,
            out=stream.hidden,
            multiplier=self._number(multiplier),
        )
        self._prepare(stream, readers)

    def linear_add(self, x: Tensor, linear: Linear, multiplier: float, stream: Stream, readers: Readers) -> None:
        self._linear(x, linear, stream.hidden, multiplier=multiplier)
        self._prepare(stream, readers)

    def add_normed(
        self, x: Tensor, norm: Tensor | None, eps: float, multiplier: float, stream: Stream, readers: Readers
    ) -> None:
        assert norm is not None, "tapes are of one machine"
        self._prepare(stream, readers, x, norm, multiplier)

    def rotate_append(
        self,
        qkv: Tensor,
        norms: HeadNorms | None,
        eps: float,
        rotation: Rotation | None,
        rows: StepRows,
        tail: Tensor,
        q: Tensor,
    ) -> None:
        _, num_kv_heads, tail_capacity, _, _ = tail.shape
        self._note(
            KindStage(rotate_stage, self._kind),
            ROTATE,
            reads=[qkv],
            writes=[qkv, tail, q],
            per_row=1,
            qkv=qkv,
            num_kv_heads=num_kv_heads,
            k_norm=None if norms is None else norms.k,
            tails=tail,
            tail_capacity=tail_capacity,
            tail_ids=rows.tail_ids,
            tail_lens=rows.tail_lens,
            **self._of_heads(norms, eps, rotation, q),
        )

    def gate(self, x: Tensor, gates: Tensor) -> None:
        width = x.shape[1]
        self._note(gate_stage, GATE, reads=[x, gates], writes=[x], per_row=1, x=x, gates=gates, width=width)

    def delta(
        self,
        inputs: Tensor,
        weights: DeltaWeights,
        spec: DeltaSpec,
        eps: float,
        rows: StepRows,
        state: DeltaState,
        mixed: Tensor,
        out: Tensor,
    ) -> None:
        """state: of two versions."""
        told: dict[str, Any] = {
            "num_rows": self._num_rows,
            "tail_ids": rows.tail_ids,
            "turns": state.turn,
            "inputs": inputs,
        }
        told |= {"in_width": spec.in_width, "num_channels": spec.num_channels, "mixed": mixed}
        self._note(
            mix_stage,
            MIX,
            reads=[inputs],
            writes=[mixed],
            per_row=mix_pieces(spec.num_channels),
            conv=weights.conv,
            conv_len=spec.conv_len,
            kept=state.conv,
            **told,
        )
        self._note(
            remember_stage,
            REMEMBER,
            reads=[inputs, mixed],
            writes=[out],
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
            out=out,
            **told,
        )

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
            per_row=1,
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

    def predict_query(
        self,
        early: Tensor,
        norms: HeadNorms | None,
        eps: float,
        maps: NDArray[np.int64],
        rotation: Rotation | None,
        rows: StepRows,
        q: Tensor,
    ) -> None:
        self._note(
            predict_stage,
            PREDICT,
            reads=[early],
            writes=[q],
            per_row=q.shape[1],
            early=early,
            maps=maps,
            **self._of_heads(norms, eps, rotation, q),
        )

    def finish_logits(self, logits: Tensor, multiplier: float, cap: float | None) -> None:
        self._note(
            finish_logits_stage,
            FINISH_LOGITS,
            reads=[logits],
            writes=[logits],
            per_row=1,
            logits=logits,
            vocab_size=logits.shape[1],
            multiplier=self._number(multiplier),
            cap=None if cap is None else self._number(cap),
        )

    def likeliest(self, logits: Tensor, next_ids: Tensor) -> None:
        pass

    def advance(self, rows: StepRows, next_ids: Tensor) -> None:
        pass

    def _linear(
        self,
        x: Tensor,
        linear: Linear,
        out: Tensor,  # rows may lie further apart than it is wide
        activation: str = "none",
        up: Linear | None = None,
        multiplier: float | None = None,
    ) -> None:
        num_out, num_in = linear.weight.shape
        self._note(
            KindStage(linear_stage, str(linear.weight.dtype).removeprefix("torch.")),  # not all are of the model's
            LINEAR,
            reads=[x] if multiplier is None else [x, out],
            writes=[out],
            fixed=linear_pieces(num_out),
            num_rows=self._num_rows,
            x=x,
            num_in=num_in,
            weight=linear.weight,
            bias=linear.bias,
            activation=ACTIVATIONS.index(activation),
            up_weight=None if up is None else up.weight,
            up_bias=None if up is None else up.bias,
            num_out=num_out,
            out=out.data_ptr(),
            out_width=out.stride(0),
            multiplier=None if multiplier is None else self._number(multiplier),
        )

    def _prepare(
        self,
        stream: Stream,
        readers: Readers,
        added: Tensor | None = None,
        added_norm: Tensor | None = None,
        multiplier: float = 1.0,
    ) -> None:
        self._note(
            prepare_stage,
            PREPARE,
            reads=[stream.hidden] if added is None else [stream.hidden, added],
            writes=[
                stream.scaled,
                stream.scaled_ahead,
                *([stream.hidden] if stream.centred or added is not None else []),
            ],
            per_row=1,
            hidden=stream.hidden,
            width=stream.hidden.shape[1],
            added=added,
            added_norm=added_norm,
            multiplier=self._number(multiplier),
            norm=readers.norm,
            out=stream.scaled,
            norm_ahead=readers.ahead,
            out_ahead=stream.scaled_ahead,
            eps=self._number(readers.eps),
            centred=stream.centred,
        )

    def _of_heads(self, norms: HeadNorms | None, eps: float, rotation: Rotation | None, q: Tensor) -> dict[str, Any]:
        _, num_q_heads, head_dim = q.shape
        return {
            "num_q_heads": num_q_heads,
            "head_dim": head_dim,
            "q_norm": None if norms is None else norms.q,
            "together": norms is not None and len(norms.q) > head_dim,
            "eps": self._number(eps),
            "cos": None if rotation is None else rotation.cos,
            "sin": None if rotation is None else rotation.sin,
            "q_scale": None if rotation is None else rotation.q_scale,
            "half": 0 if rotation is None else rotation.cos.shape[1],
            "interleaved": rotation is not None and rotation.interleaved,
            "q": q,
        }

    def _note(
        self,
        stage: Stage,
        names: tuple[str, ...],  # of its arguments, in their order
        *,
        reads: Sequence[Tensor],  # of what stages write
        writes: Sequence[Tensor],
        fixed: int = 0,  # pieces
        per_row: int = 0,
        **values: Any,  # the arguments: numbers, arrays and tensors
    ) -> None:
        arguments = words_of(names, values)
        level, held = self._levels.of(reads, writes), (*reads, *writes, *values.values())
        self._noted.append(_Stage(stage, arguments, fixed, per_row, level, held))

    def _number(self, value: float) -> NDArray[np.float64]:
        """Where it can be read."""
        return self._numbers.setdefault(value, np.array([value]))


def _turning(rotation: Rotation) -> dict[str, Any]:
    return {
        "cos": rotation.cos,
        "sin": rotation.sin,
        "half": rotation.cos.shape[1],
        "interleaved": rotation.interleaved,
    }


class RowTape:
    """A tape whose stages have pieces by the number of rows."""

    def __init__(self, stages: Sequence["_Stage"]) -> None:
        self.tape = Tape()
        self._stages = in_order = sorted(stages, key=lambda stage: stage.level)
        for before, stage in zip([None, *in_order], in_order, strict=False):
            waits = before is not None and before.level < stage.level
            self.tape.add(stage.stage, stage.arguments, waits=waits)
        self._fixed = np.array([stage.fixed for stage in in_order])
        self._per_row = np.array([stage.per_row for stage in in_order])

    def set_rows(self, num_rows: int) -> None:
        self.tape.pieces[:] = self._fixed + num_rows * self._per_row


@dataclass(frozen=True, slots=True)
class _Stage:
    """A stage that is noted, and how many stages have to follow each other before it."""

    stage: Stage
    arguments: NDArray[np.int64]
    fixed: int
    per_row: int
    level: int
    held: tuple[Any, ...]  # what the arguments are addresses of


class _Levels:
    """Which stages must wait for which: whoever reads a tensor for whoever wrote it, whoever writes it for its readers.

    Two that write to it with no reader in between write to different parts.
    """

    def __init__(self) -> None:
        self._written: dict[int, int] = {}  # by tensor, the last level that writes it
        self._read: dict[int, int] = {}

    def of(self, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> int:
        read, written = ([tensor.untyped_storage().data_ptr() for tensor in tensors] for tensors in (reads, writes))
        before = [self._written.get(tensor, -1) for tensor in read] + [self._read.get(tensor, -1) for tensor in written]
        level = 1 + max(before, default=-1)
        for levels, tensors in ((self._read, read), (self._written, written)):
            levels.update({tensor: max(level, levels.get(tensor, -1)) for tensor in tensors})
        return level
