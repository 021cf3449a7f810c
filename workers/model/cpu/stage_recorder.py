"""Records the stages of a step, and makes tapes of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from csattn.cpu.addresses import KindStage, Stage
from csattn.cpu.arguments import words_of
from csattn.cpu.tape import Tape
from csattn.models.query import Rotation
from csattn.models.spec import Activation
from csattn.models.weights import Linear
from workers.model.cpu.linear_stage import ACTIVATIONS, LINEAR, groups_of_piece, linear_stage, num_groups
from workers.model.cpu.quantized_products import FLOATS, FORMATS
from workers.model.cpu.row_stages import PREPARE, ROTATION, prepare_stage
from workers.model.ops import Readers, Stream


class StageRecorder:
    """Records stages until `cut`, which makes a tape of them.

    Stages are ordered into levels by their data dependencies. A level begins when the one before it is done; the stages
    of one level are independent and run concurrently.
    """

    def __init__(self, kind: str, num_rows: NDArray[np.int64], eps: float, num_threads: int = 1) -> None:
        """kind: the dtype of the model's weights. num_rows: [1], the rows of the next run. eps: of all norms.
        num_threads: of the team."""
        self._kind, self._num_rows, self._num_threads, self._eps = kind, num_rows, num_threads, np.array([eps])
        self._recorded: list[_Stage] = []
        self._numbers: dict[float, NDArray[np.float64]] = {}
        self._levels = _Levels()

    def cut(self) -> "RowTape":
        """Return a tape of the stages recorded since the last cut."""
        noted, self._recorded, self._levels = self._recorded, [], _Levels()
        return RowTape(noted)

    def _record(
        self,
        stage: Stage,
        names: tuple[str, ...],  # of its arguments, in order
        *,
        writes: Sequence[Tensor],  # it reads all tensors among its arguments
        reads: Sequence[Tensor] = (),  # others, of which the arguments have the address
        fixed: int = 0,  # pieces, for any number of rows; 0: per_row pieces for each row
        per_row: int = 1,
        **values: Any,  # the arguments: numbers, arrays and tensors
    ) -> None:
        arguments = words_of(names, values)
        tensors = [value for value in values.values() if isinstance(value, Tensor)]
        level, held = self._levels.of([*reads, *tensors], writes), (*reads, *writes, *values.values())
        self._recorded.append(_Stage(stage, arguments, fixed, 0 if fixed else per_row, level, held))

    def _linear(
        self,
        x: Tensor,
        linear: Linear,
        out: Tensor,  # its row stride may exceed its width
        activation: Activation | None = None,
        up: Linear | None = None,
        multiplier: float | None = None,
    ) -> None:
        num_out, num_in = linear.weight.shape
        both = (linear,) if up is None else (linear, up)
        weights, scales, format, group_size = weights_of_product(both)
        groups = groups_of_piece(num_out, self._num_threads)
        self._record(
            KindStage(linear_stage, str(linear.weight.dtype).removeprefix("torch.")),  # may not be the model's dtype
            LINEAR,
            reads=[] if multiplier is None else [out],
            writes=[out],
            fixed=-(-num_groups(num_out) // groups),
            num_rows=self._num_rows,
            x=x,
            num_in=num_in,
            format=format,
            group_size=group_size,
            weight=weights[0],
            scales=scales[0],
            bias=linear.bias,
            activation=ACTIVATIONS.index(activation),
            up_weight=None if up is None else weights[1],
            up_scales=None if up is None else scales[1],
            up_bias=None if up is None else up.bias,
            num_out=num_out,
            groups=groups,
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
        scale: float = 1.0,
    ) -> None:
        """Record the stage that adds norm(added) to the stream, if given, and norms it for its next readers."""
        changed = [stream.hidden] if stream.centred or added is not None else []
        self._record(
            prepare_stage,
            PREPARE,
            writes=[stream.scaled, stream.scaled_ahead, *changed],
            hidden=stream.hidden,
            width=stream.hidden.shape[1],
            added=added,
            added_norm=added_norm,
            multiplier=self._number(multiplier),
            scale=self._number(scale),
            norm=readers.norm,
            out=stream.scaled,
            norm_ahead=readers.ahead,
            out_ahead=stream.scaled_ahead,
            eps=self._eps,
            centred=stream.centred,
        )

    def _number(self, value: float) -> NDArray[np.float64]:
        """Return an array that holds the number, for stages to read by its address."""
        return self._numbers.setdefault(value, np.array([value]))


def rotation_arguments(rotation: Rotation | None) -> dict[str, Any]:
    """Return the arguments named ROTATION."""
    if rotation is None:
        return dict.fromkeys(ROTATION)
    fields = {"cos": rotation.cos, "sin": rotation.sin, "q_scale": rotation.q_scale}
    return fields | {"half": rotation.cos.shape[1], "interleaved": rotation.interleaved}


def weights_of_product(linears: Sequence[Linear]) -> tuple[list[Tensor], list[Tensor | None], int, int]:
    """Return the weights and scales of linear layers that one stage multiplies, their format's number and group size.

    They are quantized weights if all layers have them in the same format, with the same group size and their inputs in
    the original order; else floats.
    """
    quantized = [x.quantized for x in linears if x.quantized is not None]
    quantized = [x for x in quantized if x.format in FORMATS and x.order is None]
    kinds = {(x.format, x.group_size) for x in quantized}
    if len(quantized) < len(linears) or len(kinds) > 1:
        return [x.weight for x in linears], [None for _ in linears], FLOATS, 0
    [(format, group_size)] = kinds
    return [x.words for x in quantized], [x.scales.contiguous() for x in quantized], FORMATS.index(format), group_size


class RowTape:
    """A tape whose stages' numbers of pieces depend on the number of rows."""

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
    """A recorded stage. Its level is the length of the longest chain of stages that it depends on."""

    stage: Stage
    arguments: NDArray[np.int64]
    fixed: int
    per_row: int
    level: int
    held: tuple[Any, ...]  # keeps alive the memory whose addresses are among the arguments


class _Levels:
    """Orders stages by their dependencies: readers of a tensor wait for its writers, writers for its earlier readers.

    Writers of one tensor with no reader in between do not wait for each other: they write different parts of it.
    """

    def __init__(self) -> None:
        self._written: dict[int, int] = {}  # by tensor, the last level that writes it
        self._read: dict[int, int] = {}  # by tensor, the last level that reads it

    def of(self, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> int:
        read, written = ([tensor.untyped_storage().data_ptr() for tensor in tensors] for tensors in (reads, writes))
        before = [self._written.get(tensor, -1) for tensor in read] + [self._read.get(tensor, -1) for tensor in written]
        level = 1 + max(before, default=-1)
        for levels, tensors in ((self._read, read), (self._written, written)):
            levels.update({tensor: max(level, levels.get(tensor, -1)) for tensor in tensors})
        return level
