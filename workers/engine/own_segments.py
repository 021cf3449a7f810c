"""Segments of a request's own rows, made beside the steps."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, wait
from contextlib import suppress
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

OWN_SKETCH = SketchConfig()  # how own rows of requests without a context are coded

Sketches = list[SketchIndex]  # per layer
Placed = list[Any]  # per layer, as steps read them


def grows_without_context(config: SearchConfig) -> bool:
    """Whether own rows of a request without a context become segments: lookahead needs a context's query predictor."""
    return not config.lookahead and config.rest in (None, "sketch")


def join_sketches(before: Sketches, segment: Sketches) -> Sketches:
    return [join_segments(parts) for parts in zip(before, segment, strict=True)]


@dataclass(slots=True, eq=False)
class _Making:
    """A segment in the making, some layers at a time."""

    rows: Iterator[Tensor]  # of the layers that are not made yet
    made: Sketches = field(default_factory=list)
    placed: Placed = field(default_factory=list)  # filled when all layers are made
    num_scheduled: int = 0  # layers that are made or scheduled
    tasks: list[Future[None]] = field(default_factory=list)


class OwnSegments:
    """The segments of one request. One is begun once its rows are there, and waited for only by a row that reads it.

    Making a segment keeps a core busy for a dozen steps or more. Its layers are therefore spread over the first half of
    the rows that arrive before it is read; requests whose rows arrive at the same time take turns.
    """

    def __init__(
        self,
        request_slot: int,
        num_layers: int,
        # (start, stop) -> these own rows of each layer, [num_kv_heads, stop - start, 2, head_dim]
        rows: Callable[[int, int], Iterable[Tensor]],
        config: SearchConfig,
        sketch: SketchConfig,  # how segments are made
        growth: Growth,
        executor: Executor,  # one thread, which works in the order of submission
        place: Callable[[Sketches], Placed] = list,  # makes a segment readable for steps, in that thread
        join: Callable[[Placed, Placed], Placed] = join_sketches,  # appends a segment to those before it
        layers_at_once: int = 1,
        parallel_map: Map = map,  # over threads, for work on the CPU
    ) -> None:
        self.config = config
        self._rows, self._sketch, self._growth, self._executor = rows, sketch, growth, executor
        self._place, self._join = place, join
        self._request_slot, self._num_layers, self._layers_at_once = request_slot, num_layers, layers_at_once
        self._parallel_map = parallel_map
        self._num_begun = 0
        self._making: deque[_Making] = deque()  # segments that are not joined to those before them
        self._joined: dict[int, Placed] = {}  # by number, so many first segments; dropped once no row reads them
        self._is_closed = False

    def num_segments(self, tail_len: int) -> int:
        """Return how many segments are in use for a row that sees tail_len rows of the tail."""
        return self._growth.num_segments(tail_len, self.config.window_len)

    def num_rows(self, num_segments: int) -> int:
        return num_segments * self._growth.segment_len

    def grow(self, tail_len: int) -> None:
        """Begin what is due when there are tail_len rows, and drop what no row will read."""
        segment_len = self._growth.segment_len
        while (end := (self._num_begun + 1) * segment_len) <= tail_len:
            self._making.append(_Making(iter(self._rows(end - segment_len, end))))
            self._num_begun += 1
        for number, segment in enumerate(self._making, self._num_begun - len(self._making)):
            with suppress(RuntimeError):  # no thread can be started now: the step that reads the segment must have one
                self._schedule(segment, self._num_due(tail_len - (number + 1) * segment_len))
        in_use = self.num_segments(tail_len + 1)
        if in_use in self._joined:
            self._joined = {number: placed for number, placed in self._joined.items() if number >= in_use}

    def sketches(self, num_segments: int) -> Placed:
        """Return the first num_segments segments, joined, per layer; wait until they are made."""
        for number in range(max(self._joined, default=0) + 1, num_segments + 1):
            segment, before = self._finished(self._making[0]), self._joined.get(number - 1)
            self._joined[number] = segment if before is None else self._join(before, segment)
            self._making.popleft()
        return self._joined[num_segments]

    def finish(self) -> None:
        """Finish all segments that are begun; then rows may move."""
        for segment in self._making:
            self._schedule(segment, self._num_layers)
            wait(segment.tasks)

    def close(self) -> None:
        """Give up segments in the making; then their rows may be overwritten."""
        self._is_closed = True
        wait([task for segment in self._making for task in segment.tasks if not task.cancel()])

    def _num_due(self, num_rows: int) -> int:
        """Return how many layers of a segment are due when num_rows rows have followed it."""
        num_turns = -(-self._num_layers // self._layers_at_once)
        by_row = num_turns / (self._growth.num_near(self.config.window_len) / 2)
        due = 1 + math.floor(num_rows * by_row - self._request_slot * by_row % 1)
        return min(self._num_layers, due * self._layers_at_once)

    def _schedule(self, segment: _Making, num_layers: int) -> None:
        if num_layers > segment.num_scheduled:
            segment.tasks.append(self._executor.submit(self._make, segment, num_layers))
            segment.num_scheduled = num_layers

    def _finished(self, segment: _Making) -> Placed:
        self._schedule(segment, self._num_layers)
        for task in segment.tasks:
            task.result()
        return segment.placed

    def _make(self, segment: _Making, num_layers: int) -> None:
        """Make the first num_layers layers of the segment, as far as they are missing."""
        while (num_missing := num_layers - len(segment.made)) and not self._is_closed:
            rows = torch.stack(list(islice(segment.rows, min(num_missing, self._layers_at_once))))
            segment.made += make_segments(rows, self._sketch, self._parallel_map)
        if len(segment.made) == self._num_layers:
            segment.placed = self._place(segment.made)


@dataclass(frozen=True, slots=True)
class OwnSearch:
    """Adjacent rows of one request that read the same own segments. Every row is searched: no search period applies."""

    rows: slice
    sketches: Sketches
    q: NDArray[np.float32]  # [num_rows, num_q_heads, head_dim]: attends
    q_ahead: tuple[NDArray[np.float32], ...]  # predicted queries of even and odd layers, which choose; empty: q does
    softmax_scale: float
    out: TokenSelections  # of the current layer; with attention to the rest, if q chooses
    of_layers: dict[int, LayerSearch]

    def search(self, indexed_idx: int) -> LayerSearch:
        """Return the layer's search, which is made once."""
        if indexed_idx not in self.of_layers:
            q = self.q_ahead[indexed_idx % 2] if self.q_ahead and indexed_idx else self.q
            self.of_layers[indexed_idx] = LayerSearch(
                q, self.sketches[indexed_idx], None, 0, 0, self.softmax_scale, self.out
            )
        return self.of_layers[indexed_idx]

    @property
    def num_rows(self) -> int:
        """Own rows that can be chosen."""
        return self.sketches[0].context_len

    @property
    def top_k(self) -> int:
        return int(self.out.kv_indices.shape[2])

    def selection(self, row: int) -> Selection:
        """Return what a row of the step has chosen in the current layer: rows of its tail."""
        return self.out[row - self.rows.start]
