"""The operations of a decode step, all on fixed tensors.

RMSNorm before a product is nowhere an operation of its own. Whoever writes the residual stream also prepares it for its
next readers, and a product says what it reads. What is prepared is for the implementation to choose: on a GPU the
stream times the norm's weight and, in parts, the sum of its squares, so that the reader divides the finished product by
the root mean square; on a tape the normed stream itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from csattn.batch import StepRows
from csattn.models.latent import LatentQueries
from csattn.models.spec import Activation, DeltaSpec, ExpertsSpec, LatentSpec, Temper
from csattn.models.weights import (
    DeltaWeights,
    ExpertWeights,
    Frequencies,
    HeadNorms,
    InputWeights,
    LatentWeights,
    Linear,
)

SQUARES_BLOCK = 32  # columns of the residual stream whose squares are summed in one part


@dataclass(frozen=True, slots=True)
class Stream:
    """The residual stream of a step, as its readers want it."""

    hidden: Tensor  # [batch_size, hidden_size]
    scaled: Tensor  # [batch_size, hidden_size]: hidden * weight of the norm that reads it next
    scaled_ahead: Tensor  # likewise for the layer after that one; only written where it is asked for
    squares: Tensor  # [num_squares, batch_size] float32: sums of hidden² over blocks of SQUARES_BLOCK columns
    # readers take the mean off it, so whoever writes it may do so before: see `workers.model.weights` for products
    centred: bool = False


@dataclass(frozen=True, slots=True)
class Readers:
    """The norms of those who read the stream next. Without `norm` they read it as it is, and all the same."""

    norm: Tensor | None  # [hidden_size] float32
    ahead: Tensor | None  # [hidden_size] float32: of the layer after that one, if scaled_ahead is wanted
    eps: float


@dataclass(frozen=True, slots=True)
class Normed:
    """What a product reads: norm(x), or x itself."""

    x: Tensor  # [batch_size, num_in]: the stream's scaled or scaled_ahead, or anything else
    squares: Tensor | None = None  # the stream's; None: x itself
    eps: float = 0.0


@dataclass(frozen=True, slots=True)
class Rotation:
    """RoPE of a step's positions: it turns the first dimensions of each head, the others stay."""

    cos: Tensor  # [batch_size, rotated dimensions // 2] float32
    sin: Tensor
    q_scale: Tensor  # [batch_size] float32: what queries are multiplied with
    interleaved: bool = False  # dimensions 2i and 2i + 1 turn together; else i and i + half of those that turn


@dataclass(frozen=True, slots=True)
class DeltaState:
    """What requests keep in one layer instead of rows, in each of their tails' places: one or two versions.

    A step reads version `turn` of a request and writes the other, of one the same.
    """

    conv: Tensor  # [num_tails, versions, num_channels, conv_len - 1] float32: the channels' last inputs
    memory: Tensor  # [num_tails, versions, num_v_heads, k_dim, v_dim] float32
    turn: Tensor  # [num_tails] int64


@dataclass(frozen=True, slots=True)
class HeadRoom:
    """What becomes of a step in layers whose heads are alike, one after the other."""

    qkv: Tensor  # [batch_size, qkv_width]
    q: Tensor  # [batch_size, num_q_heads, head_dim]
    attended: Tensor  # likewise
    gates: Tensor | None  # [batch_size, q_width]
    alone: Tensor | None  # [batch_size, q_width]: in place of qkv, of layers without rows of their own


@dataclass(frozen=True, slots=True)
class ExpertRoom:
    """What becomes of a step in layers of experts, one after the other."""

    logits: Tensor  # [batch_size, num_experts] float32
    chosen: Tensor  # [batch_size, num_chosen] int32
    shares: Tensor  # likewise float32
    gated: Tensor  # [batch_size, num_chosen, intermediate_size]
    parts: Tensor  # [batch_size, num_chosen, hidden_size]


@dataclass(frozen=True, slots=True)
class DeltaRoom:
    """What becomes of a step in layers that keep a state, one after the other."""

    inputs: Tensor  # [batch_size, in_width]: what `DeltaWeights.inputs` give
    mixed: Tensor  # [batch_size, num_channels]
    out: Tensor  # [batch_size, v_width]; of idle rows any


@dataclass(frozen=True, slots=True)
class LatentRoom:
    """What becomes of a step in layers of latents, one after the other."""

    inputs: Tensor  # [batch_size, sum of in_widths]
    q_latents: Tensor  # [batch_size, q_rank]
    projected: Tensor  # [batch_size, q_width + index_q_width]; where queries are projected at once, `inputs`
    queries: LatentQueries
    attended: Tensor  # [batch_size, num_heads, kv_rank]
    values: Tensor  # [batch_size, v_width]


class StepOps(Protocol):
    """Each operation only enqueues work; on a CPU it is done when the call returns, or noted on a tape."""

    def break_chain(self) -> None:
        """Say that the next operation is the first of a graph, or that others have started work beside it."""

    def begin(
        self,
        rows: StepRows,
        embedding: Tensor,  # [vocab_size, hidden_size]
        multiplier: float,
        stream: Stream,  # all of it is written
        readers: Readers,
    ) -> None:
        """Start the stream with the tokens' rows."""

    def turn(self, rows: StepRows, frequencies: Frequencies, temper: Temper | None, rotation: Rotation) -> None:
        """Write the rotation of the rows' positions."""

    def linear(
        self,
        x: Normed,
        linears: Sequence[Linear],
        out: Tensor,  # [batch_size, outputs of all], of any float type
    ) -> None:
        """out = linears(x), side by side"""

    def mlp(
        self,
        x: Normed,
        gate_up: Sequence[Linear],  # as in `LayerWeights`
        gated: bool,
        activation: Activation,
        out: Tensor,  # [batch_size, intermediate_size]
    ) -> None:
        """out = activation(gate(x)) * up(x), or activation(up(x))"""

    def choose_experts(
        self,
        bias: Tensor | None,  # [num_experts] float32
        scales: Tensor | None,  # likewise: of shares
        spec: ExpertsSpec,
        room: ExpertRoom,  # of which `logits` are read; `chosen` and `shares` are written
    ) -> None:
        """Each row's experts, the best first, of equals the first, and their shares."""

    def experts(self, x: Normed, weights: ExpertWeights, spec: ExpertsSpec, room: ExpertRoom) -> None:
        """gated = activation(gates(x)) * ups(x) of each chosen expert; where shares are the input's, of share * x"""

    def experts_add(
        self,
        weights: ExpertWeights,
        spec: ExpertsSpec,
        room: ExpertRoom,  # of which `parts` are to be written to
        multiplier: float,
        stream: Stream,  # all of it is written
        readers: Readers,
    ) -> None:
        """hidden += multiplier * the sum of share * down(gated) over chosen experts; without shares that were x's"""

    def experts_out(
        self,
        weights: ExpertWeights,
        spec: ExpertsSpec,
        room: ExpertRoom,  # of which `parts` are to be written to
        out: Tensor,  # [batch_size, hidden_size]
    ) -> None:
        """out = what `experts_add` would add"""

    def read_normed(self, stream: Stream, norm: Tensor, eps: float, out: Tensor) -> Normed:
        """The stream behind another norm [hidden_size] float32 than its next readers'.

        out: [batch_size, hidden_size], written; it is what products then read.
        """

    def add_norms(self, x: Tensor, norm: Tensor, other: Tensor, other_norm: Tensor, eps: float) -> None:
        """x = norm(x) + other_norm(other), both [batch_size, hidden_size], norms [hidden_size] float32"""

    def linear_add(
        self,
        x: Tensor,  # [batch_size, num_in]
        linear: Linear,
        multiplier: float,
        stream: Stream,  # all of it is written
        readers: Readers,
    ) -> None:
        """hidden += multiplier * linear(x)"""

    def add_normed(
        self,
        x: Tensor,  # [batch_size, hidden_size], of any float type
        norm: Tensor | None,  # [hidden_size] float32; None: x itself, the sum of what several devices have
        eps: float,
        multiplier: float,
        scale: float,
        stream: Stream,  # all of it is written
        readers: Readers,
    ) -> None:
        """hidden = scale * (hidden + multiplier * norm(x))"""

    def rotate_append(
        self,
        qkv: Tensor,  # [batch_size, (num_q_heads + 2 * num_kv_heads) * head_dim]; without a tail queries alone
        norms: HeadNorms | None,
        eps: float,
        rotation: Rotation | None,
        rows: StepRows,
        tail: Tensor | None,  # [num_tails, num_kv_heads, tail_capacity, 2, head_dim]: one layer's
        q: Tensor,  # [batch_size, num_q_heads, head_dim]
    ) -> None:
        """q = q_scale * rope(q of qkv); rows that are not idle append their K, after RoPE, and V to their tail.

        What has norms is normed before.
        """

    def copy_rows(self, source: Tensor, tail: Tensor, rows: StepRows) -> None:
        """Append to a layer's tails what rows that are not idle have appended to another's. Both like `tail` above."""

    def make_inputs(
        self,
        projected: Tensor,  # [batch_size, num_layers * layer_input_width]: the embedding's projection
        weights: InputWeights,
        eps: float,
        rows: StepRows,
        out: Tensor,  # [num_layers, batch_size, layer_input_width], written
    ) -> None:
        """What each layer takes of the rows' tokens: see `InputWeights`."""

    def take_input(self, gates: Tensor, activation: Activation, given: Tensor) -> None:
        """gates = activation(gates) * given, both [batch_size, layer_input_width]"""

    def gate(self, x: Tensor, gates: Tensor) -> None:
        """x *= sigmoid(gates), both [batch_size, q_width]"""

    def delta(
        self,
        weights: DeltaWeights,
        spec: DeltaSpec,
        eps: float,
        rows: StepRows,
        state: DeltaState,  # those of the rows' tails are written, of rows that are not idle
        room: DeltaRoom,  # of which `inputs` are read, `mixed` is to be written to, `out` written
    ) -> None:
        """Each row's part of its request's memory, which it changes. Rows of a request in their order."""

    def append_latents(
        self,
        weights: LatentWeights,
        spec: LatentSpec,
        rotation: Rotation,
        rows: StepRows,
        tail: Tensor,  # [num_tails, 1, tail_capacity, 2, head_dim]: one layer's
        room: LatentRoom,  # of which `inputs` are read, and `q_latents` written
    ) -> None:
        """Norm the queries' latents, where there are any; rows that are not idle append theirs to their tail."""

    def ask_latents(
        self,
        weights: LatentWeights,
        spec: LatentSpec,
        rotation: Rotation,
        room: LatentRoom,  # of which `inputs` and `projected` are read, and `queries` written
    ) -> None:
        """What rows ask of latents and of index keys: see `csattn.models.latent.latent_queries`."""

    def latent_values(self, weights: LatentWeights, spec: LatentSpec, room: LatentRoom) -> None:
        """values = each head's values of what it has attended to"""

    def predict_query(
        self,
        early: Tensor,  # [batch_size, num_q_heads * head_dim]: a later layer's projection of this layer's input
        norms: HeadNorms | None,  # of that layer
        eps: float,
        maps: Any,  # [num_contexts, num_q_heads, head_dim + 1, head_dim]; on a tape [batch_size] addresses of such
        rotation: Rotation | None,
        rows: StepRows,
        q: Tensor,  # [batch_size, num_q_heads, head_dim]
    ) -> None:
        """q = q_scale * rope([norm(early), 1] @ maps[row's context]); for idle rows any finite number."""

    def finish_logits(
        self,
        logits: Tensor,  # [batch_size, vocab_size] float32, written
        multiplier: float,
        cap: float | None,
    ) -> None:
        """logits *= multiplier, then logits = cap * tanh(logits / cap) where there is a cap"""

    def likeliest(
        self,
        logits: Tensor,  # [batch_size, vocab_size] float32
        next_ids: Tensor,  # [batch_size] int64
    ) -> None:
        """The token id of each row's largest logit, of equals the first; -1 where that is NaN or infinity."""

    def advance(self, rows: StepRows, next_ids: Tensor) -> None:
        """Feed the rows these tokens, 0 for -1; those not idle go one position and one row of their tail further."""


def num_squares(hidden_size: int) -> int:
    return -(-hidden_size // SQUARES_BLOCK)
