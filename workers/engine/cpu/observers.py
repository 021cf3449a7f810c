"""Observers of the CPU engine's steps, and what they are shown."""

import numpy as np
import torch
from numpy.typing import NDArray

from csattn.selection import Selection, join_choices
from workers.engine.cpu.row_by_row import RowByRow
from workers.engine.cpu.row_plan import RowPlan
from workers.engine.fidelity import Seen, fidelity
from workers.model.cpu.cpu_model import CpuModel
from workers.serving.step_engine import Fidelity


class Observers:
    """Shows requests' observers all layers of their rows, and measures the fidelity of one watched row and layer."""

    def __init__(
        self,
        model: CpuModel,
        plan: RowPlan,
        row_by_row: RowByRow,
        tail_lens: NDArray[np.int64],  # [num_rows]: rows of its tail that each row sees
        watch: tuple[int, int] | None,  # a row of the step, and a layer
    ) -> None:
        self._model, self._plan, self._row_by_row, self._tail_lens = model, plan, row_by_row, tail_lens
        self._watched = None if watch is None else (int(np.flatnonzero(plan.order == watch[0])[0]), watch[1])
        self.fidelity: Fidelity | None = None  # of the row and layer that are watched

    def show(self, indexed_idx: int) -> None:
        """Show a layer to the observers, once the step's rows have attended in it."""
        for row, request in enumerate(self._plan.requests):
            if request.observer is not None:
                request.observer(self._seen(row, indexed_idx))
        if self._watched is not None and self._watched[1] == indexed_idx:
            row = self._watched[0]
            self.fidelity = fidelity(self._seen(row, indexed_idx), self._plan.requests[row].context.kv[indexed_idx])

    def _seen(self, row: int, indexed_idx: int) -> Seen:
        request, tail_len = self._plan.requests[row], int(self._tail_lens[row])
        q, own = torch.from_numpy(self._model.q[row]), self._plan.owns[row]
        chosen = self._row_by_row.chosen(row, indexed_idx)
        if own is not None and isinstance(chosen, Selection):
            chosen = join_choices(chosen, own.selection(row), request.view.context_len)
        return Seen(
            indexed_idx,
            request.view,
            q,
            self._model.indexed_tails[indexed_idx][request.request_slot, :, :tail_len],
            own.num_rows if own is not None else request.num_outside_window(tail_len),
            chosen,
            torch.from_numpy(self._model.attended[row]).view_as(q),
            self._model.sinks[self._model.spec.indexed_layers[indexed_idx]],
        )
