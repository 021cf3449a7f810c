"""A model's step on the CPU as tapes: weights are read where the model has them, rows are as many as come."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.cpu.addresses import Stage
from csattn.cpu.tape import Tape
from csattn.errors import ModelError
from csattn.models.families import require_supported
from csattn.models.rope import model_frequencies
from workers.cpu_model.linear_stage import ADD, GATE, LINEAR, SET, linear_pieces, linear_stage
from workers.cpu_model.row_stages import EMBED, NORMALISE, PREDICT, ROTATE, row_stage
from workers.model_runner.shapes import shape_of
from workers.model_runner.weights import require_plain

DTYPES = ("float32", "bfloat16", "float16")


class CpuModel:
    """Owns the rows of a step, its tensors and the requests' own KV. The model stays as it is, and must live.

    A step is `begin`, then per layer attention from `q` to `attended` (the caller's) and `after[layer_idx]`. The last
    of those leaves the logits. With `ahead`, `q_ahead[layer_idx % 2]` holds the predicted queries of layer_idx once the
    layer two before it is done.
    """

    def __init__(self, model: Any, max_rows: int, num_tails: int, tail_capacity: int) -> None:
        require_supported(model.config)
        require_plain(model)
        self.kind = str(model.dtype).removeprefix("torch.")
        if self.kind not in DTYPES or model.device.type != "cpu":
            raise ModelError(
                f"a step on the CPU wants weights in {', '.join(DTYPES)} there, got {model.dtype} on {model.device}"
            )
        self.model, self.max_rows, self.shape = model, max_rows, shape_of(model.config)
        shape = self.shape
        frequencies, self._rope_scale = model_frequencies(model.model.rotary_emb)
        self._frequencies: NDArray[np.float32] = frequencies.numpy()
        self._eps = np.array([shape.norm_eps])
        self.num_rows, self.token_ids, self.tail_ids, self.tail_lens = (
            np.zeros(n, np.int64) for n in (1, *3 * [max_rows])
        )
        self.maps = np.zeros(
            (shape.num_layers, max_rows), np.int64
        )  # addresses: what predicts the layer's queries, 0: none

        def room(*sizes: int) -> NDArray[np.float32]:
            return np.zeros((max_rows, *sizes), np.float32)

        half, heads = shape.head_dim // 2, (shape.num_q_heads, shape.head_dim)
        self._cos, self._sin = room(half), room(half)
        self._hidden, self._normed, self._normed_ahead = (room(shape.hidden_size) for _ in range(3))
        self._qkv, self._early, self._gated = room(shape.qkv_width), room(shape.q_width), room(shape.intermediate_size)
        self.q, self.q_ahead = room(*heads), (room(*heads), room(*heads))
        self.attended, self.logits = room(shape.q_width), room(shape.vocab_size)
        size = shape.num_layers, num_tails, shape.num_kv_heads, tail_capacity, 2, shape.head_dim
        # numpy's zeros cost memory once they are written, torch's at once
        tails = np.zeros(size, np.float32 if model.dtype.itemsize == 4 else np.int16)
        self.tails = torch.from_numpy(tails).view(model.dtype)
        self._tapes: list[_RowTape] = []
        self.begin = {ahead: self._tape(self._begin, ahead) for ahead in (False, True)}
        self.after = {
            ahead: [self._tape(self._after, layer_idx, ahead) for layer_idx in range(shape.num_layers)]
            for ahead in (False, True)
        }

    def set_rows(self, token_ids: list[int], positions: list[int], tail_ids: list[int], tail_lens: list[int]) -> None:
        """The rows of the next step; tail_lens with the rows' own tokens."""
        num_rows = len(token_ids)
        for place, values in ((self.token_ids, token_ids), (self.tail_ids, tail_ids), (self.tail_lens, tail_lens)):
            place[:num_rows] = values
        for row, position in enumerate(positions):  # one by one: the same bits whatever rows are beside it
            angles = np.float32(position) * self._frequencies
            np.multiply(np.cos(angles), np.float32(self._rope_scale), out=self._cos[row])
            np.multiply(np.sin(angles), np.float32(self._rope_scale), out=self._sin[row])
        if num_rows != self.num_rows[0]:
            self.num_rows[0] = num_rows
            for tape in self._tapes:
                tape.set_rows(num_rows)

    def _tape(self, write: Any, *args: Any) -> Tape:
        tape = _RowTape()
        write(tape, *args)
        self._tapes.append(tape)
        return tape.tape

    def _begin(self, tape: "_RowTape", ahead: bool) -> None:
        tape.add(
            row_stage("embed", self.kind),
            EMBED,
            per_row=1,
            token_ids=self.token_ids,
            embedding=self.model.model.embed_tokens.weight,
            vocab_size=self.shape.vocab_size,
            width=self.shape.hidden_size,
            out=self._hidden,
        )
        self._project(tape, 0, ahead)

    def _after(self, tape: "_RowTape", layer_idx: int, ahead: bool) -> None:
        """The rest of a layer behind its attention, and the next one's start, or the logits."""
        layer, shape = self.model.model.layers[layer_idx], self.shape
        self._linear(tape, self.attended, layer.self_attn.o_proj.weight, self._hidden, ADD)
        self._normalise(tape, layer.post_attention_layernorm.weight)
        mlp = layer.mlp
        self._linear(tape, self._normed, mlp.gate_proj.weight, self._gated, GATE, up_weight=mlp.up_proj.weight)
        self._linear(tape, self._gated, mlp.down_proj.weight, self._hidden, ADD)
        if layer_idx + 1 < shape.num_layers:
            self._project(tape, layer_idx + 1, ahead)
            return
        self._normalise(tape, self.model.model.norm.weight)
        self._linear(tape, self._normed, self.model.lm_head.weight, self.logits, SET)

    def _project(self, tape: "_RowTape", layer_idx: int, ahead: bool) -> None:
        """A layer's q, k and v; k and v go to the tails. With `ahead`, the next layer's queries are predicted."""
        layers, shape = self.model.model.layers, self.shape
        attention = layers[layer_idx].self_attn
        next_layer = layers[layer_idx + 1] if ahead and layer_idx + 1 < shape.num_layers else None
        next_norm = None if next_layer is None else next_layer.input_layernorm.weight
        self._normalise(tape, layers[layer_idx].input_layernorm.weight, next_norm)
        column = 0
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
            out = self._qkv[:, column:]
            self._linear(tape, self._normed, linear.weight, out, SET, linear.bias, waits=column == 0)
            column += linear.weight.shape[0]
        if next_layer is not None:
            linear = next_layer.self_attn.q_proj
            self._linear(tape, self._normed_ahead, linear.weight, self._early, SET, linear.bias, waits=False)
        common: dict[str, Any] = {"cos": self._cos, "sin": self._sin, "eps": self._eps, "head_dim": shape.head_dim}
        tape.add(
            row_stage("rotate", self.kind),
            ROTATE,
            per_row=1,
            qkv=self._qkv,
            num_q_heads=shape.num_q_heads,
            num_kv_heads=shape.num_kv_heads,
            tails=self.tails[layer_idx],
            tail_capacity=self.tails.shape[3],
            tail_ids=self.tail_ids,
            tail_lens=self.tail_lens,
            q=self.q,
            q_norm=_norm(attention, "q_norm"),
            k_norm=_norm(attention, "k_norm"),
            **common,
        )
        if next_layer is not None:
            tape.add(
                row_stage("predict", self.kind),
                PREDICT,
                per_row=shape.num_q_heads,
                waits=False,
                early=self._early,
                num_q_heads=shape.num_q_heads,
                q_norm=_norm(next_layer.self_attn, "q_norm"),
                maps=self.maps[layer_idx + 1],
                q=self.q_ahead[(layer_idx + 1) % 2],
                **common,
            )

    def _normalise(self, tape: "_RowTape", weight: Tensor, weight_ahead: Tensor | None = None) -> None:
        tape.add(
            row_stage("normalise", self.kind),
            NORMALISE,
            per_row=1,
            x=self._hidden,
            width=self.shape.hidden_size,
            weight=weight,
            out=self._normed,
            weight_ahead=weight_ahead,
            out_ahead=self._normed_ahead,
            eps=self._eps,
        )

    def _linear(
        self,
        tape: "_RowTape",
        x: NDArray[np.float32],  # [max_rows, num_in]
        weight: Tensor,  # [num_out, num_in]
        out: NDArray[np.float32],  # [max_rows, at least num_out]; rows may lie further apart
        mode: int,
        bias: Tensor | None = None,
        waits: bool = True,
        up_weight: Tensor | None = None,
    ) -> None:
        num_out, num_in = weight.shape
        tape.add(
            linear_stage(self.kind),
            LINEAR,
            fixed=linear_pieces(num_out),
            waits=waits,
            num_rows=self.num_rows,
            x=x,
            num_in=num_in,
            weight=weight,
            num_out=num_out,
            out=out,
            out_width=out.strides[0] // 4,
            bias=bias,
            mode=mode,
            up_weight=up_weight,
        )


class _RowTape:
    """A tape whose stages have pieces by the number of rows."""

    def __init__(self) -> None:
        self.tape = Tape()
        self._fixed: list[int] = []
        self._per_row: list[int] = []

    def add(
        self,
        stage: Stage,
        names: tuple[str, ...],  # of its arguments, in their order
        *,
        fixed: int = 0,
        per_row: int = 0,
        waits: bool = True,
        **values: Any,  # the arguments: numbers, arrays and tensors
    ) -> None:
        assert values.keys() == set(names), f"the stage wants {names}, got {tuple(values)}"
        self.tape.add(stage, np.array([word(values[name]) for name in names], np.int64), waits=waits)
        self._fixed.append(fixed)
        self._per_row.append(per_row)

    def set_rows(self, num_rows: int) -> None:
        self.tape.pieces[:] = np.array(self._fixed) + num_rows * np.array(self._per_row)


def word(value: Any) -> int:
    """A stage's argument: a number, or where an array begins; None is 0."""
    if value is None:
        return 0
    if isinstance(value, Tensor):
        assert value.is_contiguous()
        return value.data_ptr()
    return value.ctypes.data if isinstance(value, np.ndarray) else int(value)


def _norm(attention: Any, name: str) -> Tensor | None:
    """Qwen3's norm of each head."""
    norm = getattr(attention, name, None)
    return None if norm is None else norm.weight
