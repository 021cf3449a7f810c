"""In what order a step's rows are worked on, and which of them are searched for together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from csattn.search.workspace import TokenSelections, empty_token_selections
from workers.cpu_model.model import CpuModel
from workers.engine.cpu_context import CpuRequest
from workers.engine.searcher import RowSearch


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbouring rows that are searched for together. Of two selections one is read while the other is made."""

    rows: slice
    requests: list[CpuRequest]  # of the rows
    selections: tuple[TokenSelections, TokenSelections]
    late: tuple[RowSearch, RowSearch]  # with the layer's own queries
    early: tuple[RowSearch, RowSearch] | None  # with predicted ones; None: they wait


@dataclass(frozen=True, slots=True)
class RowPlan:
    """What does not change from step to step while the same slots are in it."""

    order: NDArray[np.int64]  # [num_rows]: the step's row that is worked on as the i-th
    requests: list[CpuRequest]  # of the rows as they are worked on
    groups: list[Group]
    ahead: bool

    def early(self, layer_idx: int) -> list[RowSearch]:
        """The searches that may start before the layer's own queries are there."""
        if layer_idx == 0:
            return []
        return [group.early[layer_idx % 2] for group in self.groups if group.early is not None]

    def late(self, layer_idx: int) -> list[RowSearch]:
        groups = [group for group in self.groups if layer_idx == 0 or group.early is None]
        return [group.late[layer_idx % 2] for group in groups]


def plan_rows(model: CpuModel, requests: Sequence[CpuRequest], softmax_scale: float) -> RowPlan:
    """requests: of the step's rows. Rows of one request keep their order."""
    order = sorted(range(len(requests)), key=lambda row: (*map(str, requests[row].together), requests[row].slot))
    ordered = [requests[row] for row in order]
    groups, first = [], 0
    for _, together in groupby(ordered, key=lambda request: request.together):
        members = list(together)
        if members[0].top_k > 0:
            groups.append(_group(model, first, members, softmax_scale))
        first += len(members)
    return RowPlan(np.array(order), ordered, groups, any(request.looks_ahead for request in ordered))


def _group(model: CpuModel, first: int, requests: list[CpuRequest], softmax_scale: float) -> Group:
    request, rows = requests[0], slice(first, first + len(requests))
    one, two = (empty_token_selections(len(requests), request.num_index_heads, request.top_k) for _ in range(2))
    if request.searches_attend:
        sizes = len(requests), model.shape.num_q_heads, model.shape.head_dim + 2
        one, two = (replace(selections, rest=np.zeros(sizes, np.float32)) for selections in (one, two))

    def search(q: NDArray[np.float32], out: TokenSelections) -> RowSearch:
        config = request.view.config
        return RowSearch(
            context_id=request.context_id,
            q=q[rows],
            top_k=request.top_k,
            sink_len=config.sink_len,
            window_len=config.window_len,
            softmax_scale=softmax_scale,
            out=out,
        )

    late = search(model.q, one), search(model.q, two)
    early = (search(model.q_ahead[0], one), search(model.q_ahead[1], two)) if request.looks_ahead else None
    return Group(rows, requests, (one, two), late, early)
