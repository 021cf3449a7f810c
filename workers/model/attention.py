"""The interface of the decode loop to attention: the loop computes q, k and v, attention owns the context rows."""

from collections.abc import Sequence

from torch import Tensor

from csattn.batch import StepRows
from csattn.models.query import Queries
from workers.model.ops import CompressedBuffers, RecurrentState


class StepAttention:
    """Attention of one decode step, layer by layer, on tensors whose addresses never change.

    In each step the loop calls `begin_step`; then for each layer `look_ahead` for the layer after it (if `lookahead` is
    set and that layer is an indexed one other than the first), and its own `attend`; at last `end_step`. All of them
    enqueue work on torch's current stream. That stream must have joined the work that `look_ahead` and `attend` enqueue
    on other streams by the last `attend`. Rows whose tail_lens is 0 are idle: what is written to their `out` is never
    read. A context_ids of -1 alone means a request without a context. Before a batch size is captured, one step of idle
    rows runs eagerly. The next product may start while the last kernel of `attend` is still running (programmatic
    dependent launch), so that kernel must not finish before the kernels enqueued earlier.
    """

    # Of each layer [num_tails, num_kv_heads, tail_capacity, 2, head_dim]; latents have one head. Before `attend` the
    # loop writes each row's own K and V, after RoPE, to
    # tails[layer_idx][tail_ids[b], :, tail_lens[b] - 1 - tail_starts[b]].
    tails: Tensor | Sequence[Tensor]
    # One for each layer if some layers keep a recurrent state instead of rows, else empty. The loop reads and writes
    # the states, and `attend` does nothing in these layers.
    states: Sequence[RecurrentState | None] = ()
    lookahead = False  # whether to call `look_ahead` with the next layer's query, predicted from this layer's input
    # True: `look_ahead` and `attend` only enqueue device work, and the step is captured as one CUDA graph.
    # False: they run on the host at every step; the work between two of them is one captured graph.
    in_graph = True

    def begin_step(self, rows: StepRows) -> None:
        """Called on the host at every step, before any of its work is enqueued."""

    def look_ahead(self, layer_idx: int, q: Tensor, rows: StepRows) -> None:
        """Receive the predicted query of layer `layer_idx`, after RoPE. q: [batch_size, num_q_heads, head_dim].

        Called before layer `layer_idx - 1` projects its own q, k and v. q keeps its contents until `attend` of
        `layer_idx` has returned: work on other streams must have read it by then, in stream order.
        """
        raise AssertionError("nothing is looked ahead for")

    def attend(self, layer_idx: int, q: Tensor, rows: StepRows, out: Tensor) -> None:
        """Attend from each row to its context and its tail, and write the result to `out`.

        q (after RoPE), out: [batch_size, num_q_heads, head_dim].
        """
        raise AssertionError("no layer attends to rows")

    def attend_latents(self, layer_idx: int, queries: Queries, rows: StepRows, out: Tensor) -> None:
        """Called instead of `attend` in layers of latents (MLA): attend from each row to the rows that the indexer of
        this layer, or of an earlier one, chooses. out: [batch_size, num_heads, kv_rank]."""
        raise AssertionError("no layer keeps latents")

    def attend_compressed(self, layer_idx: int, buffers: CompressedBuffers, rows: StepRows) -> None:
        """Called instead of `attend` in layers of compressed attention: compute `attended` from `projected` and
        `inputs`. The attention owns everything that such a layer keeps of tokens."""
        raise AssertionError("no layer has compressed rows")

    def end_step(self, rows: StepRows) -> None:
        """Called on the host at every step, after all of its work has been enqueued."""

    def abandon(self) -> None:
        """End what still waits for a step that has failed, if anything does."""
