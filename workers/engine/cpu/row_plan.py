"""The order in which a step's rows are computed, and which of them are searched together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from csattn.search import LayerSearch
from csattn.search.workspace import TokenSelections, empty_token_selections
from csattn.selectors import search_bytes
from csattn.sketch.own import own_top_k
from workers.engine.cpu.context import CpuRequest, KeptChoice
from workers.engine.cpu.pool_searcher import RowSearch
from workers.engine.open_requests import StepCount
from workers.engine.own_segments import OwnSearch
from workers.model.cpu.cpu_model import CpuModel

KEPT = -1
MAX_PLANS = 32  # kept: steps differ in how many rows of a question they have, and in which of their tokens search


@dataclass(frozen=True, slots=True)
class RowKind:
    """What a plan depends on in a row besides its request slot."""

    token: int  # number of the token in its request, modulo the search period
    selects_per_row: bool
    attends_per_row: bool
    num_own_segments: int  # that it reads

    @classmethod
    def of(cls, request: CpuRequest, tail_len: int) -> "RowKind":
        """tail_len: rows of its tail that the row sees, its own included."""
        token = (tail_len - 1) % request.search_period
        per_row = request.selects_per_row(tail_len), request.attends_per_row(tail_len)
        return cls(token, *per_row, 0 if request.own is None else request.own.num_segments(tail_len))

    @property
    def is_searched(self) -> bool:
        """Whether it is searched together with others, if csattn chooses for it at all."""
        return self.token == 0 and not self.selects_per_row


@dataclass(frozen=True, slots=True)
class Group:
    """Adjacent rows that are searched together. Double buffering: one `out` is read while the other is made."""

    rows: slice
    late: tuple[RowSearch, RowSearch]  # with the layer's own queries
    early: tuple[RowSearch, RowSearch] | None  # with predicted queries; None: without lookahead


@dataclass(frozen=True, slots=True)
class RowPlan:
    """What stays the same in all steps whose rows have the same request slots and kinds.

    Rows are numbered as in `order`.
    """

    order: NDArray[np.int64]  # [num_rows]: the step's row that is computed as the i-th
    requests: list[CpuRequest]  # of the rows
    request_slots: list[int]
    context_lens: NDArray[np.int64]  # [num_rows]
    # the row whose choice each row reads, itself if it is searched; KEPT: the choice that its request keeps
    sources: list[int]
    keeping: dict[int, KeptChoice]  # of each request that keeps its choice, by the last row that is searched
    attends_per_row: list[bool]  # whether `RowByRow` attends for the row
    groups: list[Group]
    owns: list[OwnSearch | None]  # the search of the own segments that the row reads
    ahead: bool  # whether any row needs predicted queries

    def selection(self, row: int, indexed_idx: int) -> tuple[NDArray[np.int32], NDArray[np.int32]] | None:
        """Return kv_indices [num_index_heads, top_k] and valid_len that the row reads; None without a search."""
        source, kept = self.sources[row], self.requests[row].kept
        if source == KEPT:
            assert kept is not None
            return kept.kv_indices[indexed_idx], kept.valid_len[indexed_idx]
        for group in self.groups:
            if group.rows.start <= source < group.rows.stop:
                out, row = group.late[indexed_idx % 2].out, source - group.rows.start
                return out.kv_indices[row], out.valid_len[row]
        return None

    def own_searches(self, indexed_idx: int) -> list[LayerSearch]:
        """Return that layer's searches in own segments, to be run once the layer's queries are computed."""
        unique = {id(own): own for own in self.owns if own is not None}
        return [own.search(indexed_idx) for own in unique.values()]

    def counts(self, tail_lens: NDArray[np.int64], num_layers: int) -> list[StepCount]:
        """Return what each row has read, except what `RowByRow` counts."""
        counts = []
        for row, (request, tail_len) in enumerate(zip(self.requests, tail_lens.tolist(), strict=True)):
            more, (first, second) = StepCount(tokens=1, rest_bytes=request.rest_bytes), request.near
            own = self.owns[row]
            if own is not None:
                more.search_bytes += sum(search_bytes(sketch, own.q.shape[1]) for sketch in own.sketches)
                more.rest_bytes += sum(sketch.num_bytes for sketch in own.sketches)
            if not self.attends_per_row[row]:
                more.far_rows = num_layers * (request.top_k + (own.top_k if own else 0))
                resident = first + request.view.context_len - second + tail_len - (own.num_rows if own else 0)
                more.near_rows = num_layers * resident
            if any(group.rows.start <= row < group.rows.stop for group in self.groups):
                more.searches += num_layers
                more.search_bytes += request.search_bytes
            counts.append(more)
        return counts

    def keep(self, indexed_idx: int) -> None:
        """Store what tokens of later steps will read in that layer; it takes effect with `commit`."""
        for row, kept in self.keeping.items():
            chosen = self.selection(row, indexed_idx)
            assert chosen is not None
            kept.find(indexed_idx, *chosen)

    def commit(self) -> None:
        """Put the stored choices to use, once the step has succeeded."""
        for kept in self.keeping.values():
            kept.commit()

    def early(self, indexed_idx: int) -> list[RowSearch]:
        """Return the searches with predicted queries, which may start before the layer's own queries are computed."""
        if indexed_idx == 0:
            return []
        return [group.early[indexed_idx % 2] for group in self.groups if group.early is not None]

    def late(self, indexed_idx: int) -> list[RowSearch]:
        groups = [group for group in self.groups if indexed_idx == 0 or group.early is None]
        return [group.late[indexed_idx % 2] for group in groups]


class RowPlans:
    """Plans of steps, for reuse: the same ones recur while the same requests are open."""

    def __init__(self, model: CpuModel, softmax_scale: float) -> None:
        self._model, self._scale = model, softmax_scale
        self._plans: dict[tuple[tuple[int, RowKind], ...], RowPlan] = {}  # by request slot and kind of their rows

    def plan(self, requests: Sequence[CpuRequest], lens: NDArray[np.int64]) -> RowPlan:
        """Return a step's plan. requests: of its rows; lens: rows of its tail that each row sees, its own included."""
        rows = [RowKind.of(request, n) for request, n in zip(requests, lens.tolist(), strict=True)]
        key = tuple((request.request_slot, row) for request, row in zip(requests, rows, strict=True))
        if (plan := self._plans.get(key)) is None:
            self._forget_shorter(key)
            if len(self._plans) >= MAX_PLANS:
                self.forget()
            plan = self._plans[key] = plan_rows(self._model, requests, rows, self._scale)
        return plan

    def forget(self) -> None:
        self._plans.clear()

    def _forget_shorter(self, key: tuple[tuple[int, RowKind], ...]) -> None:
        """Drop plans with fewer own segments: they do not recur, and keep old sketches in memory."""
        fewest: dict[int, int] = {}
        for request_slot, row in key:
            fewest[request_slot] = min(row.num_own_segments, fewest.get(request_slot, row.num_own_segments))
        self._plans = {
            rows: plan
            for rows, plan in self._plans.items()
            if all(row.num_own_segments >= fewest.get(request_slot, 0) for request_slot, row in rows)
        }


def plan_rows(
    model: CpuModel, requests: Sequence[CpuRequest], rows: Sequence[RowKind], softmax_scale: float
) -> RowPlan:
    """Make the plan of a step. requests, rows: of the step's rows."""

    def key(row: int) -> tuple[object, ...]:
        return *map(str, requests[row].together), not rows[row].is_searched, requests[row].request_slot

    def own_key(row: int) -> tuple[int, int]:
        return requests[row].request_slot, rows[row].num_own_segments

    order = sorted(range(len(requests)), key=key)  # a stable sort: a request's rows of one kind stay in order
    ordered = [requests[row] for row in order]
    groups, first = [], 0
    for (*_, reuses, _), together in groupby(order, key=lambda row: (*key(row)[:-1], 0)):
        members = [requests[row] for row in together]
        if members[0].top_k > 0 and not reuses:
            groups.append(_group(model, first, members, softmax_scale))
        first += len(members)
    ahead = any(
        request.looks_ahead and (row.is_searched or row.selects_per_row or row.num_own_segments > 0)
        for request, row in zip(requests, rows, strict=True)
    )
    searched = {requests[row].request_slot: i for i, row in enumerate(order) if rows[row].is_searched}
    keeping = {row: kept for row in searched.values() if (kept := ordered[row].kept) is not None}
    owns: list[OwnSearch | None] = []
    for (_, num_segments), alike in groupby(order, key=own_key):
        num_alike, request = len(list(alike)), ordered[len(owns)]
        at = slice(len(owns), len(owns) + num_alike)
        owns += [_own_search(model, at, request, num_segments, softmax_scale) if num_segments else None] * num_alike
    return RowPlan(
        np.array(order),
        ordered,
        [request.request_slot for request in ordered],
        np.array([request.view.context_len for request in ordered], np.int64),
        _sources(requests, rows, order),
        keeping,
        [rows[row].attends_per_row for row in order],
        groups,
        owns,
        ahead,
    )


def _sources(requests: Sequence[CpuRequest], rows: Sequence[RowKind], order: Sequence[int]) -> list[int]:
    """Return `RowPlan.sources`: a token that is not searched reads what the last searched one before it has chosen."""
    last: dict[int, int] = {}  # by request slot: the last of the step's rows that is searched
    source = []
    for row, request in enumerate(requests):
        if rows[row].token == 0:
            last[request.request_slot] = row
        source.append(last.get(request.request_slot, KEPT))
    place = {row: i for i, row in enumerate(order)} | {KEPT: KEPT}
    return [place[source[row]] for row in order]


def _own_search(
    model: CpuModel, rows: slice, request: CpuRequest, num_segments: int, softmax_scale: float
) -> OwnSearch:
    own, spec = request.own, model.spec
    assert own is not None
    num_rows, num_tokens = own.num_rows(num_segments), rows.stop - rows.start
    out = empty_token_selections(num_tokens, spec.num_kv_heads, own_top_k(own.config, num_rows))
    q_ahead: tuple[NDArray[np.float32], ...] = ()
    if request.looks_ahead:
        q_ahead = tuple(q[rows] for q in model.q_ahead)
    else:
        out = replace(out, rest=np.zeros((num_tokens, spec.num_q_heads, spec.head_dim + 2), np.float32))
    return OwnSearch(rows, own.sketches(num_segments), model.q[rows], q_ahead, softmax_scale, out, {})


def _group(model: CpuModel, first: int, requests: list[CpuRequest], softmax_scale: float) -> Group:
    request, rows = requests[0], slice(first, first + len(requests))
    one, two = (empty_token_selections(len(requests), request.num_index_heads, request.top_k) for _ in range(2))
    if request.searches_attend:
        sizes = len(requests), model.spec.num_q_heads, model.spec.head_dim + 2
        one, two = (replace(selections, rest=np.zeros(sizes, np.float32)) for selections in (one, two))

    def search(q: NDArray[np.float32], out: TokenSelections) -> RowSearch:
        config = request.view.config
        return RowSearch(request.context_id, q[rows], config.sink_len, config.window_len, softmax_scale, out)

    late = search(model.q, one), search(model.q, two)
    early = (search(model.q_ahead[0], one), search(model.q_ahead[1], two)) if request.looks_ahead else None
    return Group(rows, late, early)
