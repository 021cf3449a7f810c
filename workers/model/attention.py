"""What the decode loop asks of an attention: the loop makes q, k and v, the attention knows where context rows are."""

from collections.abc import Sequence

from torch import Tensor

from csattn.batch import StepRows
from csattn.models.latent import LatentQueries
from workers.model.ops import CompressedRoom, DeltaState


class StepAttention:
    """Attention of one decode step, layer by layer, on tensors whose addresses never change.

    Of one step the loop calls, in this order: `begin_step`; for each layer `look_ahead` of the layer after it (where
    `lookahead` is set and that has an index, but for the first that has), then its own `attend`; `end_step`. All of
    them enqueue on torch's current stream; work that `look_ahead` and `attend` put on others has to be back on it by
    the last `attend`. Rows whose
    context_ids is -1 are idle: what is written to their `out` is never read. Before a batch size is captured, one step
    of idle rows runs eagerly. The next product may start while the last kernel of `attend` ends: that kernel must not
    have ended before those in front of it.
    """

    # Of each layer [num_tails, num_kv_heads, tail_capacity, 2, head_dim], of latents with one head. Before `attend` the
    # loop writes each row's own K and V, after RoPE, to
    # tails[layer_idx][tail_ids[b], :, tail_lens[b] - 1 - tail_starts[b]].
    tails: Tensor | Sequence[Tensor]
    # Of each layer, where some keep a state instead of rows: the loop reads and writes it, and `attend` does nothing.
    states: Sequence[DeltaState | None] = ()
    lookahead = False  # wants the next layer's query, predicted from this layer's input
    # True: `look_ahead` and `attend` only enqueue device work, and the step is captured as one CUDA graph.
    # False: they run on the host at every step; the work between two of them is one captured graph.
    in_graph = True

    def begin_step(self, rows: StepRows) -> None:
        """On the host, at every step, before any of its work is enqueued."""

    def look_ahead(self, layer_idx: int, q: Tensor, rows: StepRows) -> None:
        """Take the predicted query of that layer, after RoPE. q: [batch_size, num_q_heads, head_dim].

        Called before layer `layer_idx - 1` projects its own q, k and v. q keeps its contents until `attend` of
        `layer_idx` has returned: work on other streams must have read it by then, in stream order.
        """
        raise AssertionError("nothing is looked ahead for")

    def attend(self, layer_idx: int, q: Tensor, rows: StepRows, out: Tensor) -> None:
        """Attend from each row to its context and its tail.

        q (after RoPE), out: [batch_size, num_q_heads, head_dim].
        """
        raise AssertionError("no layer attends to rows")

    def attend_latents(self, layer_idx: int, asked: LatentQueries, rows: StepRows, out: Tensor) -> None:
        """Asked instead of `attend` in layers that keep latents: from each row to what the layer, or one before it,
        chooses. out: [batch_size, num_heads, kv_rank]."""
        raise AssertionError("no layer keeps latents")

    def attend_compressed(self, layer_idx: int, room: CompressedRoom, rows: StepRows) -> None:
        """Asked instead of `attend` in layers of compressed attention: `projected` and `inputs` are there, `attended`
        is wanted. All that the layer keeps of tokens is the attention's affair."""
        raise AssertionError("no layer has compressed rows")

    def end_step(self, rows: StepRows) -> None:
        """On the host, at every step, after all of its work has been enqueued."""
