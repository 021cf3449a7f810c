"""Run searches: check what came in, cut the work into one job for each (token, head), run jobs."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.errors import ConfigError
from csattn.index import LayerIndex
from csattn.jit import readonly
from csattn.search import jobs
from csattn.search.weights import weight_room
from csattn.search.workspace import SearchWorkspace, TokenSelections, empty_token_selections
from csattn.selection import Selection
from csattn.table.rows import RowTable
from csattn.table.tail import ListTail, RowTail, Tail

NO_CODES = np.empty(0, np.int8)
NO_INDICES = np.empty(0, np.int32)
NO_SCORES = np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class LayerSearch:
    """One layer's search of one or more tokens of a request."""

    q: NDArray[np.float32]  # [num_tokens, num_q_heads, head_dim]
    index: LayerIndex
    tail: Tail | None
    sink_len: int
    window_len: int
    softmax_scale: float
    out: TokenSelections  # [num_tokens, num_heads, top_k]; the search chooses as many rows as it has room for

    @property
    def num_jobs(self) -> int:
        return len(self.q) * self.index.num_heads

    @property
    def num_scored_keys(self) -> int:
        """A measure of the work: keys scored, over all query rows."""
        tail_rows = self.tail.num_rows if self.tail is not None else 0
        return int(np.prod(self.q.shape[:2])) * (self.index.context_len + tail_rows)

    def check(self) -> None:
        """Raise AssertionError if the shapes do not fit together, ConfigError if the index cannot be searched."""
        num_tokens, num_q_heads, head_dim = self.q.shape
        heads = self.index.num_heads
        assert self.q.dtype == np.float32, f"q must be float32, got {self.q.dtype}"
        assert num_q_heads % heads == 0, f"{num_q_heads} query heads cannot be shared out to {heads} index heads"
        assert head_dim == self.index.query_basis.shape[1], f"q has head_dim {head_dim}, the index another"
        wanted = num_tokens, heads
        assert self.out.kv_indices.shape[:2] == wanted, f"out has shape {self.out.kv_indices.shape}, wanted {wanted}"
        assert self.out.valid_len.shape == wanted, f"out.valid_len has shape {self.out.valid_len.shape}"
        table = self.index.table
        if isinstance(table, RowTable) and weight_room(self.index.num_subspaces, table.largest_code) <= 0:
            raise ConfigError(
                f"{self.index.num_subspaces} subspaces of {table.score_bits}-bit scores do not fit into 16-bit sums; "
                f"rebuild the index with fewer subspaces or with 4-bit scores"
            )

    def run(self, first_job: int, last_job: int, workspace: SearchWorkspace) -> None:
        """Run the jobs [first_job, last_job); job t * num_heads + h serves head h of token t."""
        index, table, tail = self.index, self.index.table, self.tail
        group_size = self.q.shape[1] // index.num_heads
        tail_rows = tail.num_rows if tail is not None else 0
        common = (
            first_job,
            last_job,
            readonly(self.q),
            readonly(index.query_basis),
            readonly(index.codebooks),
            index.weigh_by_norm,
        )
        shape = table.context_len, tail_rows, self.sink_len, self.window_len
        score_type = np.dtype(np.int16 if isinstance(table, RowTable) else np.float32)
        scratch = workspace.arrays(score_type, group_size, table.context_len + tail_rows)
        rest = (shape, self.softmax_scale, *scratch, self.out.kv_indices, self.out.valid_len)
        if isinstance(table, RowTable):
            assert tail is None or isinstance(tail, RowTail), f"a table of rows cannot use {tail!r}"
            tail_codes = NO_CODES if tail is None else tail.codes
            jobs.search_rows(
                *common,
                _flat(table.codes, np.uint8),
                readonly(table.scales),
                table.score_bits,
                _flat(tail_codes, np.uint8),
                tail_codes.shape[-1],
                *rest,
            )
        else:
            assert tail is None or isinstance(tail, ListTail), f"a table of lists cannot use {tail!r}"
            jobs.search_lists(
                *common,
                _flat(table.indices, np.int32),
                _flat(table.scores, np.uint16),
                _flat(NO_INDICES if tail is None else tail.num_inserted, np.int32),
                _flat(NO_INDICES if tail is None else tail.inserted_indices, np.int32),
                _flat(NO_SCORES if tail is None else tail.inserted_scores, np.float32),
                *rest,
            )


def _flat(array: NDArray[Any], dtype: type[np.generic]) -> NDArray[Any]:
    """A read-only one-dimensional view of the same bytes as elements of `dtype`."""
    return readonly(array).reshape(-1).view(dtype)


def search(
    q: NDArray[np.float32],  # [num_q_heads, head_dim]
    index: LayerIndex,
    tail: Tail | None,
    top_k: int,
    sink_len: int,
    window_len: int,
    softmax_scale: float,
    workspace: SearchWorkspace,
    out: Selection,  # kv_indices [num_heads, top_k]
) -> None:
    """Choose, per index head, the top_k rows of the context and the tail that this token should fetch.

    `reference.search` is the definition. Runs in the calling thread; `SearchPool` has threads of its own.
    """
    assert out.kv_indices.shape[1] == top_k, f"out has room for {out.kv_indices.shape[1]} rows, wanted {top_k}"
    stacked = TokenSelections(out.kv_indices[None], out.valid_len[None])
    layer = LayerSearch(q[None], index, tail, sink_len, window_len, softmax_scale, stacked)
    layer.check()
    layer.run(0, layer.num_jobs, workspace)


def search_tokens(
    q: NDArray[np.float32],  # [num_tokens, num_q_heads, head_dim]
    index: LayerIndex,
    tail: Tail | None,
    top_k: int,
    sink_len: int,
    window_len: int,
    softmax_scale: float,
    workspace: SearchWorkspace,
) -> TokenSelections:
    """`search` for several tokens that see the same context and tail."""
    out = empty_token_selections(q.shape[0], index.num_heads, top_k)
    layer = LayerSearch(q, index, tail, sink_len, window_len, softmax_scale, out)
    layer.check()
    layer.run(0, layer.num_jobs, workspace)
    return out
