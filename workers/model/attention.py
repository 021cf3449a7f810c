"""What the decode loop asks of an attention: the loop makes q, k and v, the attention knows where context rows are."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from csattn.batch import StepRows
from csattn.models.latent import LatentQueries
from workers.model.ops import DeltaState


class StepAttention(Protocol):
    """Attention of one decode step, layer by layer, on tensors whose addresses never change.

    Of one step the loop calls, in this order: `begin_step`; for each layer `look_ahead` of the layer after it (where
    `lookahead` is set and that has an index, but for the first that has), then its own `attend`; `end_step`. All of
    them enqueue on torch's current stream; work that `look_ahead` and `attend` put on others has to be back on it by
    the last `attend`. Rows whose
    context_ids is -1 are idle: what is written to their `out` is never read. Before a batch size is captured, one step
    of idle rows runs eagerly. The next product may start while the last kernel of `attend` ends: that kernel must not
    have ended before those in front of it.
    """

    @property
    def tails(self) -> Tensor | Sequence[Tensor]:
        """Of each layer [num_tails, num_kv_heads, tail_capacity, 2, head_dim].

        Before `attend` the loop writes each row's own K and V, after RoPE, to
        tails[layer_idx][tail_ids[b], :, tail_lens[b] - 1 - tail_starts[b]].
        """

    lookahead: bool  # wants the next layer's query, predicted from this layer's input
    # True: `look_ahead` and `attend` only enqueue device work, and the step is captured as one CUDA graph.
    # False: they run on the host at every step; the work between two of them is one captured graph.
    in_graph: bool

    def begin_step(self, rows: StepRows) -> None:
        """On the host, at every step, before any of its work is enqueued."""

    def look_ahead(self, layer_idx: int, q: Tensor, rows: StepRows) -> None:
        """Take the predicted query of that layer, after RoPE. q: [batch_size, num_q_heads, head_dim].

        Called before layer `layer_idx - 1` projects its own q, k and v. q keeps its contents until `attend` of
        `layer_idx` has returned: work on other streams must have read it by then, in stream order.
        """

    def attend(self, layer_idx: int, q: Tensor, rows: StepRows, out: Tensor) -> None:
        """Attend from each row to its context and its tail.

        q (after RoPE), out: [batch_size, num_q_heads, head_dim].
        """

    def end_step(self, rows: StepRows) -> None:
        """On the host, at every step, after all of its work has been enqueued."""


class KeepsStates(Protocol):
    """An attention of models some of whose layers keep a state instead of rows: there `attend` does nothing."""

    @property
    def states(self) -> Sequence[DeltaState | None]:
        """Of each layer; the loop reads and writes them."""


class AttendsLatents(Protocol):
    """An attention of models that keep latents: there it is asked instead of `attend`, and tails have one head."""

    def attend_latents(self, layer_idx: int, asked: LatentQueries, rows: StepRows, out: Tensor) -> None:
        """Attend from each row to what the layer, or one before it, chooses. out: [batch_size, num_heads, kv_rank]."""
