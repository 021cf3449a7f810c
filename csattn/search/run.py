"""Searches of a layer: check the arguments, describe them to the kernels, and run these in the calling thread."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.cpu.addresses import Stage, compiled_address
from csattn.index import ListIndex
from csattn.search import choose, score, sketch_stages
from csattn.search.plan import MAX_JOBS, MAX_PIECES, SEARCH
from csattn.search.sketch import describe_sketch, query_bytes
from csattn.search.work import FIRST_STAGE, NUM_CALLS, SEARCH_RECORD, begin, finish
from csattn.search.workspace import LIST_SCORE_BYTES, SKETCH_SCORE_BYTES, SearchWorkspace, TokenSelections
from csattn.sketch.index import SketchIndex
from csattn.table.tail import ListTail

# For each stage, the function of a piece and the one that ends the stage. Arguments: addresses of SEARCH and SCRATCH,
# job, piece. Returns 0: done; from the latter, 1: run all pieces again. They are compiled when the first search needs
# them, and `work` calls them by address: compiled into one kernel, they would be optimised again in every function that
# calls another, which takes three times as long.
SKETCH_STAGES: tuple[Stage, ...] = (
    sketch_stages.project_piece,
    sketch_stages.quantise_job,
    sketch_stages.score_piece,
    sketch_stages.guess_job,
    sketch_stages.copy_piece,
    choose.choose_job,
)
REST_STAGE: tuple[Stage, ...] = sketch_stages.attend_piece, sketch_stages.join_job  # after those, if the rest is wanted
LIST_STAGES: tuple[Stage, ...] = (
    score.match_piece,
    score.number_lists_job,
    score.score_piece,
    choose.guess_job,
    choose.copy_piece,
    choose.choose_job,
)


class LayerSearch:
    """One layer's search for one or more tokens of a request.

    Making one costs more than starting it, so keep it. It refers to its arrays: write new queries to q, search again,
    and find the new choice in out. Rows appended to the tail meanwhile are searched, too. It runs once at a time.
    """

    def __init__(
        self,
        q: NDArray[np.float32],  # [num_tokens, num_q_heads, head_dim]
        index: ListIndex | SketchIndex,
        tail: ListTail | None,
        sink_len: int,
        window_len: int,
        softmax_scale: float,
        out: TokenSelections,  # written: [num_tokens, num_heads, top_k]; its last axis sets how many rows are chosen
    ) -> None:
        self.q, self.index, self.tail, self.out = q, index, tail, out
        self.sink_len, self.window_len, self.softmax_scale = sink_len, window_len, softmax_scale
        self._check()
        self._sketch = describe_sketch(index) if isinstance(index, SketchIndex) else None
        self._record = self._describe()
        self._tail_array: NDArray[Any] | None = None
        self._calls = np.zeros(NUM_CALLS, np.int64)
        self._calls[SEARCH_RECORD] = self._record.ctypes.data
        for i, stage in enumerate(self._stages):
            self._calls[FIRST_STAGE + i] = compiled_address(stage)

    @property
    def _stages(self) -> tuple[Stage, ...]:
        if not isinstance(self.index, SketchIndex):
            return LIST_STAGES
        return SKETCH_STAGES + (REST_STAGE if self.out.rest is not None else ())

    @property
    def _group_size(self) -> int:
        """Query heads that share an index head."""
        return int(self.q.shape[1] // self.index.num_heads)

    @property
    def room(self) -> tuple[int, int, int, int, int]:
        """The arguments of `SearchWorkspace.prepare`."""
        num_keys = self.index.context_len + (self.tail.num_rows if self.tail is not None else 0)
        if isinstance(self.index, SketchIndex):
            part_words = self.out.rest.shape[2] if self.out.rest is not None else 0
            num_bytes = query_bytes(self.index, self._group_size)
            return self._group_size, num_bytes, SKETCH_SCORE_BYTES, num_keys, part_words
        return self._group_size, 16 * self._group_size * self.index.num_subspaces, LIST_SCORE_BYTES, num_keys, 0

    @property
    def num_jobs(self) -> int:
        return int(self.out.valid_len.size)

    @property
    def num_scored_keys(self) -> int:
        """Keys scored, summed over all query rows: a measure of the work."""
        tail_rows = self.tail.num_rows if self.tail is not None else 0
        return int(self.q.shape[0] * self.q.shape[1] * (self.index.context_len + tail_rows))

    def begin_in(self, workspace: SearchWorkspace, first_job: int, number: int = 1) -> int:
        """Open jobs from first_job on, at most MAX_JOBS, to the threads that use this workspace; return how many."""
        if self.tail is not None:
            self._describe_tail(self.tail.num_rows)
        workspace.prepare(*self.room)
        num_jobs = min(MAX_JOBS, self.num_jobs - first_job)
        begin(workspace.calls, self._calls, workspace.progress, workspace.control, first_job, num_jobs, number)
        return num_jobs

    @property
    def calls_address(self) -> int:
        """The address of this search's `calls` (see `work`), as `begin` takes them. It never changes."""
        return int(self._calls.ctypes.data)

    def run(self, workspace: SearchWorkspace) -> None:
        """Search in the calling thread."""
        for first_job in range(0, self.num_jobs, MAX_JOBS):
            num_jobs = self.begin_in(workspace, first_job)
            finish(workspace.calls, workspace.progress, workspace.control, num_jobs)

    def _check(self) -> None:
        """Raise AssertionError if the shapes do not fit together."""
        num_tokens, num_q_heads, head_dim = self.q.shape
        heads, of_sketch = self.index.num_heads, isinstance(self.index, SketchIndex)
        assert num_q_heads % heads == 0, f"{num_q_heads} query heads cannot be divided among {heads} index heads"
        assert head_dim == self.index.key_mean.shape[-1], f"q has head_dim {head_dim}, the index another"
        wanted = num_tokens, heads
        assert self.out.kv_indices.shape[:2] == wanted, f"out has shape {self.out.kv_indices.shape}, wanted {wanted}"
        assert self.out.valid_len.shape == wanted, f"out.valid_len has shape {self.out.valid_len.shape}"
        if self.out.rest is not None:
            assert of_sketch, "lists cannot estimate the rows that are not chosen"
            rest_shape = num_tokens, num_q_heads, head_dim + 2
            assert self.out.rest.shape == rest_shape, f"out.rest has shape {self.out.rest.shape}, wanted {rest_shape}"
        assert of_sketch or self._group_size <= MAX_PIECES, f"more than {MAX_PIECES} query heads share an index head"
        assert self.tail is None or not of_sketch, f"a sketch cannot use {self.tail!r}"

    def _describe(self) -> NDArray[Any]:
        """Return the SEARCH record, with the tail's fields left at zero."""
        index = self.index
        values: dict[str, Any] = {
            "q": _address(self.q, np.float32),
            "kv_indices": _address(self.out.kv_indices, np.int32, is_written=True),
            "valid_len": _address(self.out.valid_len, np.int32, is_written=True),
            "num_tokens": self.q.shape[0],
            "num_heads": index.num_heads,
            "group_size": self._group_size,
            "head_dim": self.q.shape[2],
            "top_k": self.out.kv_indices.shape[2],
            "context_len": index.context_len,
            "sink_len": self.sink_len,
            "window_len": self.window_len,
            "softmax_scale": self.softmax_scale,
            "num_stages": len(self._stages) // 2,
        }
        if isinstance(index, SketchIndex):
            assert self._sketch is not None
            uses_marks = index.uses_marks(self.out.kv_indices.shape[2])
            rest = _address(self.out.rest, np.float32, is_written=True) if self.out.rest is not None else 0
            values |= {"sketch": self._sketch.ctypes.data, "num_parts": index.num_segments}
            values |= {"uses_marks": uses_marks, "rest": rest}
        else:
            values |= _describe_lists(index)
        return np.array([tuple(values.get(name, 0) for name in SEARCH.names or ())], SEARCH)

    def _describe_tail(self, tail_rows: int) -> None:
        """Update the record's fields about the tail: its number of rows, and the addresses of its arrays."""
        fields, tail = self._record, self.tail
        fields["tail_rows"] = tail_rows
        if tail is not None and tail.inserted_indices is not self._tail_array:
            self._tail_array = tail.inserted_indices
            fields["num_inserted"] = _address(tail.num_inserted, np.int32)
            fields["inserted_indices"] = _address(tail.inserted_indices, np.int32)
            fields["inserted_scores"] = _address(tail.inserted_scores, np.float32)
            fields["kept_least"] = _address(tail.kept_least, np.float32)
            fields["kept_position"] = _address(tail.kept_position, np.int32)
            fields["tail_room"] = tail.inserted_indices.shape[-1]


def _describe_lists(index: ListIndex) -> dict[str, int]:
    return {
        "num_parts": index.num_subspaces,
        "codebook_columns": _address(index.codebook_columns, np.float32),
        "num_subspaces": index.num_subspaces,
        "num_centroids": index.num_centroids,
        "centroid_room": index.codebook_columns.shape[3],
        "weigh_by_norm": index.weigh_by_norm,
        "listed": _address(index.table.listed, np.uint32),
        "starts": _address(index.table.starts, np.int32),
        "list_scores": _address(index.table.scores, np.float16),
        "list_len": index.table.list_len,
        "score_room": index.table.scores.shape[3],
    }


def _address(array: NDArray[Any], dtype: Any, is_written: bool = False) -> int:
    """Return the array's address, after checking what kernels rely on: that it has this dtype and is contiguous."""
    assert array.dtype == dtype, f"an array of {array.dtype} came where {np.dtype(dtype)} was wanted"
    assert array.flags.c_contiguous, f"an array of shape {array.shape} must be contiguous, not strided {array.strides}"
    assert array.flags.writeable or not is_written, f"an array of shape {array.shape} cannot be written"
    address: int = array.__array_interface__["data"][0]
    return address
