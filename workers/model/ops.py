"""What the operations of a decode step work on, all of it fixed tensors. `TorchOps` says what these do.

RMSNorm before a product is nowhere an operation of its own. Whoever writes the residual stream also prepares it for its
next readers, and a product says what it reads. What is prepared is for the implementation to choose: on a GPU the
stream times the norm's weight and, in parts, the sum of its squares, so that the reader divides the finished product by
the root mean square; on a tape the normed stream itself.
"""

from dataclasses import dataclass

from torch import Tensor

from csattn.models.latent import LatentQueries

LEAST_SUM = 1e-20  # added to what shares of experts are divided by: sigmoids may all be 0
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
class Exchange:
    """Memory by which kernels on several GPUs add up what each has, in the order of their ranks: see `_sum_of_devices`.

    Each device writes into the inboxes of all others, and reads its own.
    """

    inboxes: Tensor  # [num_devices] int64: where each device's begins, [2, num_devices, batch_size, hidden_size] int64
    counts: Tensor  # [batch_size] int32: sums so far
    rank: int

    @property
    def num_devices(self) -> int:
        return len(self.inboxes)


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
class StreamsRoom:
    """Several residual streams of a step, of which `Stream` is what a branch reads and what it adds to.

    Between two branches they are mixed: see `csattn.models.streams`.
    """

    streams: Tensor  # [batch_size, num, hidden_size]
    post: Tensor  # [batch_size, num] float32: how much of what the branch adds each gets
    comb: Tensor  # [batch_size, num, num] float32: at [i, j], how much of stream i becomes stream j's
    products: Tensor  # [batch_size, num_mixes] float32: of matrices, on the way


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


@dataclass(frozen=True, slots=True)
class CompressedRoom:
    """What becomes of a step in layers of compressed attention, one after the other."""

    latents: Tensor  # [batch_size, q_rank]
    normed: Tensor  # likewise
    projected: Tensor  # [batch_size, q_width + index_q_width]
    inputs: Tensor  # [batch_size, sum of in_widths]
    attended: Tensor  # [num_groups, batch_size, width]: what groups of heads give, for the output projection
    grouped: Tensor  # [batch_size, out_width]


def num_squares(hidden_size: int) -> int:
    return -(-hidden_size // SQUARES_BLOCK)
