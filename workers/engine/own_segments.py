"""Segments of a request's own rows, made beside the steps."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.config import SearchConfig, SketchConfig
from csattn.search import LayerSearch
from csattn.search.workspace import TokenSelections
from csattn.selection import Selection
from csattn.sketch import SketchIndex
from csattn.sketch.own import Growth, join_segments, make_segments
from csattn.torch_threads import Map

OF_OWN = SketchConfig()  # how rows of requests without a context are coded

Sketches = list[SketchIndex]  # per layer
Placed = list[Any]  # likewise, as steps read them


def grows_alone(config: SearchConfig) -> bool:
    """Whether rows of a request without a context become segments: which has nothing that tells queries ahead."""
    return not config.lookahead and config.rest in (None, "sketch")


def join_sketches(before: Sketches, segment: Sketches) -> Sketches:
    return [join_segments(parts) for parts in zip(before, segment, strict=True)]


@dataclass(slots=True, eq=False)
class _Making:
    """A segment that is made, some layers at a time."""

    rows: Iterator[Tensor]  # of the layers that are not made yet
    made: Sketches = field(default_factory=list)
    placed: Placed = field(default_factory=list)  # when all are made
    num_asked: int = 0  # layers
    tasks: list[Future[None]] = field(default_factory=list)


class OwnSegments:
    """Of one request. A segment is begun once its rows are there, and waited for only by a row that is to read it.

    Making one takes a core for as long as a dozen steps take or more. So its layers are spread over the first half of
    the rows that come before it is read; requests whose rows come at the same time take turns.
    """

    def __init__(
        self,
        slot: int,
        num_layers: int,
        # from a first of the request's own rows to behind a last: each layer's, [num_kv_heads, number, 2, head_dim]
        rows: Callable[[int, int], Iterable[Tensor]],
        config: SearchConfig,
        sketch: SketchConfig,  # how segments are made
        growth: Growth,
        beside: Executor,  # one thread: what is handed over first is done first
        place: Callable[[Sketches], Placed] = list,  # a segment, in that thread
        join: Callable[[Placed, Placed], Placed] = join_sketches,  # a segment to those before it
        layers_at_once: int = 1,
        side_by_side: Map = map,  # of threads, for what runs on the CPU
    ) -> None:
        self.config = config
        self._rows, self._sketch, self._growth, self._beside = rows, sketch, growth, beside
        self._place, self._join = place, join
        self._slot, self._num_layers, self._layers_at_once = slot, num_layers, layers_at_once
        self._side_by_side = side_by_side
        self._num_begun = 0
        self._making: deque[_Making] = deque()  # segments that are not joined to those before them
        self._joined: dict[int, Placed] = {}  # the first so many segments; what no row reads any more is gone
        self._is_closed = False

    def num_segments(self, tail_len: int) -> int:
        """In use for a row that sees so many rows of the tail."""
        return self._growth.num_segments(tail_len, self.config.window_len)

    def num_rows(self, num_segments: int) -> int:
        return num_segments * self._growth.segment_len

    def grow(self, tail_len: int) -> None:
        """Begin what is due when so many rows are there, and let go of what is read no more."""
        segment_len = self._growth.segment_len
        while (end := (self._num_begun + 1) * segment_len) <= tail_len:
            self._making.append(_Making(iter(self._rows(end - segment_len, end))))
            self._num_begun += 1
        for number, segment in enumerate(self._making, self._num_begun - len(self._making)):
            self._ask(segment, self._num_due(tail_len - (number + 1) * segment_len))
        in_use = self.num_segments(tail_len + 1)
        if in_use in self._joined:
            self._joined = {number: placed for number, placed in self._joined.items() if number >= in_use}

    def sketches(self, num_segments: int) -> Placed:
        """Of so many segments, per layer; made, or waited for."""
        for number in range(max(self._joined, default=0) + 1, num_segments + 1):
            segment, before = self._finished(self._making[0]), self._joined.get(number - 1)
            self._joined[number] = segment if before is None else self._join(before, segment)
            self._making.popleft()
        return self._joined[num_segments]

    def finish(self) -> None:
        """Until nothing is under way: rows may move."""
        for segment in self._making:
            self._ask(segment, self._num_layers)
            wait(segment.tasks)

    def close(self) -> None:
        """What is under way is given up; then its rows may be overwritten."""
        self._is_closed = True
        wait([task for segment in self._making for task in segment.tasks if not task.cancel()])

    def _num_due(self, num_rows: int) -> int:
        """Layers that are to be made of a segment behind which so many rows have come."""
        num_turns = -(-self._num_layers // self._layers_at_once)
        by_row = num_turns / (self._growth.num_near(self.config.window_len) / 2)
        due = 1 + math.floor(num_rows * by_row - self._slot * by_row % 1)
        return min(self._num_layers, due * self._layers_at_once)

    def _ask(self, segment: _Making, num_layers: int) -> None:
        if num_layers > segment.num_asked:
            segment.num_asked = num_layers
            segment.tasks.append(self._beside.submit(self._make, segment, num_layers))

    def _finished(self, segment: _Making) -> Placed:
        self._ask(segment, self._num_layers)
        for task in segment.tasks:
            task.result()
        return segment.placed

    def _make(self, segment: _Making, num_layers: int) -> None:
        """Up to so many layers."""
        while (num_left := num_layers - len(segment.made)) and not self._is_closed:
            rows = torch.stack(list(islice(segment.rows, min(num_left, self._layers_at_once))))
            segment.made += make_segments(rows, self._sketch, self._side_by_side)
        if len(segment.made) == self._num_layers:
            segment.placed = self._place(segment.made)


@dataclass(frozen=True, slots=True)
class OwnSearch:
    """Neighbouring rows of one request that read the same of its own segments: each chooses anew, in every step."""

    rows: slice
    sketches: Sketches
    q: NDArray[np.float32]  # [num_rows, num_q_heads, head_dim]: what they attend with
    q_ahead: tuple[NDArray[np.float32], ...]  # what they choose by, of even and of odd layers; empty: by q
    softmax_scale: float
    out: TokenSelections  # of the layer at hand; with the rest, where they choose by q
    of_layers: dict[int, LayerSearch]

    def search(self, layer_idx: int) -> LayerSearch:
        """The layer's search, made once."""
        if layer_idx not in self.of_layers:
            q = self.q_ahead[layer_idx % 2] if self.q_ahead and layer_idx else self.q
            self.of_layers[layer_idx] = LayerSearch(
                q, self.sketches[layer_idx], None, 0, 0, self.softmax_scale, self.out
            )
        return self.of_layers[layer_idx]

    @property
    def num_rows(self) -> int:
        """That can be chosen."""
        return self.sketches[0].context_len

    @property
    def top_k(self) -> int:
        return int(self.out.kv_indices.shape[2])

    def selection(self, row: int) -> Selection:
        """Of a row of the step, in the layer at hand: rows of its tail."""
        return self.out[row - self.rows.start]
