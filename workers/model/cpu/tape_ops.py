"""Records the operations of a step on tapes, which a team of threads runs later for any number of rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from csattn.batch import StepRows
from csattn.cpu.addresses import KindStage
from csattn.models.query import Rotation
from csattn.models.spec import Activation, Temper
from csattn.models.weights import Frequencies, HeadNorms, InputWeights, Linear
from workers.model.cpu.expert_ops import TapeExpertOps
from workers.model.cpu.latent_ops import TapeLatentOps
from workers.model.cpu.linear_stage import ACTIVATIONS
from workers.model.cpu.recurrent_ops import TapeRecurrentOps
from workers.model.cpu.remix_ops import TapeRemixOps
from workers.model.cpu.row_stages import (
    COPY_ROWS,
    EMBED,
    FINISH_LOGITS,
    GATE,
    MAKE_INPUTS,
    PREDICT,
    ROTATE,
    copy_rows_stage,
    embed_stage,
    finish_logits_stage,
    gate_stage,
    make_inputs_stage,
    predict_stage,
    rotate_stage,
)
from workers.model.cpu.stage_recorder import rotation_arguments
from workers.model.ops import Normed, Readers, Stream


class TapeOps(TapeExpertOps, TapeRecurrentOps, TapeLatentOps, TapeRemixOps):
    """Records the operations that `TorchOps` defines as stages of a tape.

    The stream's `scaled` is the normed stream; its `squares` are not used. `compute_rotation` and `argmax` do nothing:
    `CpuModel.set_rows` computes rotations, and the caller draws tokens.
    """

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
        self._record(
            KindStage(embed_stage, self._kind),
            EMBED,
            writes=[stream.hidden],
            token_ids=rows.token_ids,
            embedding=embedding,
            vocab_size=vocab_size,
            width=width,
            multiplier=self._number(multiplier),
            out=stream.hidden,
        )
        self._prepare(stream, readers)

    def compute_rotation(
        self, rows: StepRows, frequencies: Frequencies, temper: Temper | None, rotation: Rotation
    ) -> None:
        pass

    def linear(
        self,
        x: Normed,
        linears: Sequence[Linear],
        out: Tensor,
        activation: Activation | None = None,
        gated: bool = False,
    ) -> None:
        if gated:
            gate, up = linears
            return self._linear(x.x, gate, out, activation, up)
        column = 0
        for linear in linears:
            self._linear(x.x, linear, out[:, column:], activation)
            column += len(linear.weight)

    def linear_add(self, x: Tensor, linear: Linear, multiplier: float, stream: Stream, readers: Readers) -> None:
        self._linear(x, linear, stream.hidden, multiplier=multiplier)
        self._prepare(stream, readers)

    def add_normed(
        self,
        x: Tensor,
        norm: Tensor | None,
        multiplier: float,
        scale: float,
        stream: Stream,
        readers: Readers,
    ) -> None:
        assert norm is not None, "tapes are of one machine"
        self._prepare(stream, readers, x, norm, multiplier, scale)

    def rotate_append(
        self,
        qkv: Tensor,
        norms: HeadNorms | None,
        rotation: Rotation | None,
        rows: StepRows,
        tail: Tensor | None,
        q: Tensor,
    ) -> None:
        num_kv_heads, tail_capacity = (0, 0) if tail is None else tail.shape[1:3]
        self._record(
            KindStage(rotate_stage, self._kind),
            ROTATE,
            writes=[qkv, q, *([] if tail is None else [tail])],
            qkv=qkv,
            num_kv_heads=num_kv_heads,
            k_norm=None if norms is None else norms.k,
            v_norm=None if norms is None else norms.v,
            tails=tail,
            tail_capacity=tail_capacity,
            tail_ids=rows.tail_ids,
            tail_lens=rows.tail_lens,
            **self._of_heads(norms, rotation, q),
        )

    def norm(self, x: Tensor, norm: Tensor, out: Tensor, adds: bool = False) -> None:
        if adds:
            self._prepare(Stream(out, out, out, out), Readers(None), x, norm)
        else:
            self._prepare(Stream(x, out, out, out), Readers(norm))

    def grouped(self, x: Tensor, linear: Linear, out: Tensor) -> None:
        num_out = out.shape[1] // len(x)
        for group, of_group in enumerate(x):
            start = group * num_out
            self._linear(of_group, linear.outputs(start, start + num_out), out[:, start:])

    def copy_rows(self, source: Tensor, tail: Tensor, rows: StepRows) -> None:
        _, num_kv_heads, tail_capacity, _, head_dim = tail.shape
        self._record(
            KindStage(copy_rows_stage, self._kind),
            COPY_ROWS,
            writes=[tail],
            source=source,
            tails=tail,
            num_kv_heads=num_kv_heads,
            row_width=2 * head_dim,
            tail_capacity=tail_capacity,
            tail_ids=rows.tail_ids,
            tail_lens=rows.tail_lens,
        )

    def make_inputs(self, projected: Tensor, weights: InputWeights, rows: StepRows, out: Tensor) -> None:
        num_layers, max_rows, width = out.shape
        self._record(
            KindStage(make_inputs_stage, self._kind),
            MAKE_INPUTS,
            writes=[projected, out],
            projected=projected,
            num_layers=num_layers,
            width=width,
            norm=weights.norm,
            token_ids=rows.token_ids,
            table=weights.table,
            vocab_size=len(weights.table),
            scale=self._number(weights.scale),
            table_scale=self._number(weights.table_scale),
            eps=self._eps,
            out=out,
            max_rows=max_rows,
        )

    def gate(self, x: Tensor, gates: Tensor, activation: Activation | None = None) -> None:
        kind, width = ACTIVATIONS.index(activation), x.shape[1]
        self._record(gate_stage, GATE, writes=[x], x=x, gates=gates, activation=kind, width=width)

    def predict_query(
        self,
        early: Tensor,
        norms: HeadNorms | None,
        maps: NDArray[np.int64],
        rotation: Rotation | None,
        rows: StepRows,
        q: Tensor,
    ) -> None:
        self._record(
            predict_stage,
            PREDICT,
            writes=[q],
            per_row=q.shape[1],
            early=early,
            maps=maps,
            **self._of_heads(norms, rotation, q),
        )

    def finish_logits(self, logits: Tensor, multiplier: float, cap: float | None) -> None:
        self._record(
            finish_logits_stage,
            FINISH_LOGITS,
            writes=[logits],
            logits=logits,
            vocab_size=logits.shape[1],
            multiplier=self._number(multiplier),
            cap=None if cap is None else self._number(cap),
        )

    def argmax(self, logits: Tensor, next_ids: Tensor) -> None:
        pass

    def _of_heads(self, norms: HeadNorms | None, rotation: Rotation | None, q: Tensor) -> dict[str, Any]:
        _, num_q_heads, head_dim = q.shape
        return {
            "num_q_heads": num_q_heads,
            "head_dim": head_dim,
            "q_norm": None if norms is None else norms.q,
            "together": norms is not None and len(norms.q) > head_dim,
            "after_rope": norms is not None and norms.after_rope,
            "eps": self._eps,
            "q": q,
            **rotation_arguments(rotation),
        }
