"""Records the stages of a step, and makes tapes of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from csattn.cpu.addresses import Stage
from csattn.cpu.arguments import words_of
from csattn.cpu.tape import Tape
from workers.model.cpu.row_stages import PREPARE, prepare_stage
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
