"""The operations of a decode step, all on fixed tensors.

RMSNorm is nowhere an operation of its own. Whoever writes the residual stream also writes it times the next norm's
weight and, in parts, the sum of its squares; whoever reads it divides the finished product by the root mean square.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from csattn.batch import StepRows

SQUARES_BLOCK = 64  # columns of the residual stream whose squares are summed in one part


@dataclass(frozen=True, slots=True)
class Stream:
    """The residual stream of a step, as its readers want it."""

    hidden: Tensor  # [batch_size, hidden_size]
    scaled: Tensor  # [batch_size, hidden_size]: hidden * weight of the norm that reads it next
    scaled_ahead: Tensor  # likewise for the layer after that one; only written where it is asked for
    squares: Tensor  # [num_squares, batch_size] float32: sums of hidden² over blocks of SQUARES_BLOCK columns


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Qwen3's RMSNorm of each head, before RoPE."""

    q: Tensor  # [head_dim]
    k: Tensor  # [head_dim]


@dataclass(frozen=True, slots=True)
class Rotation:
    """RoPE of a step's positions."""

    cos: Tensor  # [batch_size, head_dim // 2] float32
    sin: Tensor


class StepOps(Protocol):
    """Each operation only enqueues work; on a CPU it is done when the call returns."""

    def break_chain(self) -> None:
        """Say that the next operation is the first of a graph, or that others have started work beside it."""

    def begin(
        self,
        rows: StepRows,
        embedding: Tensor,  # [vocab_size, hidden_size]
        stream: Stream,  # all of it is written
        norm: Tensor,  # [hidden_size]: of the first layer
        norm_ahead: Tensor | None,  # [hidden_size]: of the second, if scaled_ahead is wanted
        inverse_frequencies: Tensor,  # [head_dim // 2] float32: RoPE's angle per position
        rope_scale: float,  # on cos and sin
        rotation: Rotation,  # written
    ) -> None:
        """Start the stream with the tokens' rows, and the rotation with their positions."""

    def likeliest(
        self,
        logits: Tensor,  # [batch_size, vocab_size] float32
        next_ids: Tensor,  # [batch_size] int64
    ) -> None:
        """The token id of each row's largest logit, of equals the first; -1 where that is NaN or infinity."""

    def advance(self, rows: StepRows, next_ids: Tensor) -> None:
        """Feed the rows these tokens, 0 for -1; those not idle go one position and one row of their tail further."""

    def normed_linear(
        self,
        scaled: Tensor,  # [batch_size, hidden_size]: the stream's scaled or scaled_ahead
        squares: Tensor,
        eps: float,
        weight: Tensor,  # [num_out, hidden_size]
        bias: Tensor | None,  # [num_out]
        out: Tensor,  # [batch_size, num_out], of any float type
    ) -> None:
        """out = norm(hidden) @ weight.T + bias"""

    def normed_gate_up(
        self,
        scaled: Tensor,
        squares: Tensor,
        eps: float,
        weight: Tensor,  # [2 * intermediate_size, hidden_size]: gates, then ups
        out: Tensor,  # [batch_size, intermediate_size]
    ) -> None:
        """out = silu(norm(hidden) @ gate.T) * (norm(hidden) @ up.T)"""

    def linear_add(
        self,
        x: Tensor,  # [batch_size, num_in]
        weight: Tensor,  # [hidden_size, num_in]
        stream: Stream,  # all of it is written
        norm: Tensor,  # [hidden_size]: of whoever reads the stream next
        norm_ahead: Tensor | None,
    ) -> None:
        """hidden += x @ weight.T"""

    def rotate_append(
        self,
        qkv: Tensor,  # [batch_size, (num_q_heads + 2 * num_kv_heads) * head_dim]
        norms: HeadNorms | None,
        eps: float,
        rotation: Rotation,
        rows: StepRows,
        tail: Tensor,  # [num_tails, num_kv_heads, tail_capacity, 2, head_dim]: one layer's
        q: Tensor,  # [batch_size, num_q_heads, head_dim]
    ) -> None:
        """q = rope(q of qkv); rows that are not idle append their K, after RoPE, and V to their tail."""

    def predict_query(
        self,
        early: Tensor,  # [batch_size, num_q_heads * head_dim]: a later layer's projection of this layer's input
        q_norm: Tensor | None,  # [head_dim]: of that layer
        eps: float,
        maps: Tensor,  # [num_contexts, num_q_heads, head_dim + 1, head_dim]
        rotation: Rotation,
        rows: StepRows,
        q: Tensor,  # [batch_size, num_q_heads, head_dim]
    ) -> None:
        """q = rope([norm(early), 1] @ maps[row's context]); for idle rows any finite number."""


def num_squares(hidden_size: int) -> int:
    return -(-hidden_size // SQUARES_BLOCK)
