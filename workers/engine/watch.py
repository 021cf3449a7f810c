"""A step's attention with an eye on one row and layer of it; steps that are replayed from a graph pass it by."""

import torch
from torch import Tensor

from csattn.batch import DeviceSelection, StepRows
from csattn.selection import Selection
from workers.engine.attend_all import AttendAll
from workers.engine.on_device import SearchOnDevice
from workers.engine.on_host import SearchOnHost


class Watch:
    """`StepAttention` that hands everything on."""

    def __init__(self, inner: SearchOnDevice | SearchOnHost | AttendAll) -> None:
        self._inner = inner
        self.tails, self.lookahead, self.in_graph = inner.tails, inner.lookahead, inner.in_graph
        self._row = self._layer_idx = -1
        self._seen: tuple[Tensor, list[Selection]] | None = None

    def look_at(self, row: int, layer_idx: int) -> None:
        """In the next step that is made call by call."""
        self._row, self._layer_idx, self._seen = row, layer_idx, None

    def seen(self) -> tuple[Tensor, list[Selection]]:
        """The row's query [num_q_heads, head_dim] float32, on its device, and what was chosen.

        Of the context; and, where requests have such, of own segments.
        """
        assert self._seen is not None, "no step was made since `look_at`"
        return self._seen

    def begin_step(self, rows: StepRows) -> None:
        self._inner.begin_step(rows)

    def look_ahead(self, layer_idx: int, q: Tensor, rows: StepRows) -> None:
        self._inner.look_ahead(layer_idx, q, rows)

    def attend(self, layer_idx: int, q: Tensor, rows: StepRows, out: Tensor) -> None:
        self._inner.attend(layer_idx, q, rows, out)
        if layer_idx == self._layer_idx and not _is_capturing(q):
            own = getattr(self._inner, "own", None)
            chosen = [of.chosen(layer_idx, rows) for of in (self._inner, own) if of is not None]
            self._seen = q[self._row].float().clone(), [_of_row(selection, self._row) for selection in chosen]
            self._layer_idx = -1

    def end_step(self, rows: StepRows) -> None:
        self._inner.end_step(rows)


def _of_row(selection: DeviceSelection, row: int) -> Selection:
    return Selection(selection.kv_indices[row].cpu().numpy().copy(), selection.valid_len[row].cpu().numpy().copy())


def _is_capturing(q: Tensor) -> bool:
    return q.is_cuda and torch.cuda.is_current_stream_capturing()
