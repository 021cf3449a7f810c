"""Run searches: check what came in, cut the work into one job for each (token, head), run jobs."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from csattn.index import LayerIndex
from csattn.search import reference
from csattn.search.workspace import SearchWorkspace, TokenSelections, empty_token_selections
from csattn.selection import Selection
from csattn.table.tail import Tail


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
        return self.q.shape[0] * self.index.num_heads

    @property
    def num_scored_keys(self) -> int:
        """A measure of the work: keys scored, over all query rows."""
        tail_rows = self.tail.num_rows if self.tail is not None else 0
        return self.q.shape[0] * self.q.shape[1] * (self.index.context_len + tail_rows)

    def check(self) -> None:
        """Raise AssertionError if the shapes do not fit together."""
        num_tokens, num_q_heads, head_dim = self.q.shape
        heads = self.index.num_heads
        assert self.q.dtype == np.float32, f"q must be float32, got {self.q.dtype}"
        assert num_q_heads % heads == 0, f"{num_q_heads} query heads cannot be shared out to {heads} index heads"
        assert head_dim == self.index.query_basis.shape[1], f"q has head_dim {head_dim}, the index another"
        wanted = num_tokens, heads
        assert self.out.kv_indices.shape[:2] == wanted, f"out has shape {self.out.kv_indices.shape}, wanted {wanted}"
        assert self.out.valid_len.shape == wanted, f"out.valid_len has shape {self.out.valid_len.shape}"

    def run(self, first_job: int, last_job: int, workspace: SearchWorkspace) -> None:
        """Run the jobs [first_job, last_job); job t * num_heads + h serves head h of token t."""
        for job in range(first_job, last_job):
            token, head = divmod(job, self.index.num_heads)
            if head == 0:
                reference.search(
                    self.q[token],
                    self.index,
                    self.tail,
                    self.out.kv_indices.shape[2],
                    self.sink_len,
                    self.window_len,
                    self.softmax_scale,
                    self.out[token],
                )


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
