"""The data that the operations of a decode step read and write, all of it in fixed tensors. `TorchOps` defines them.

RMSNorm before a product is never an operation of its own. The operation that writes the residual stream also prepares
it for its next readers, and a product's operand (`Normed`) says which norm applies. Each implementation chooses what to
prepare: on a GPU it is the stream times the norm's weight, with partial sums of the stream's squares, so that the
reader divides the finished product by the root mean square; on a tape it is the normed stream itself.
"""

from dataclasses import dataclass

from torch import Tensor

from csattn.models.query import Queries

LEAST_SUM = 1e-20  # added to the sum by which experts' shares are divided: sigmoids may all be 0
SQUARES_BLOCK = 32  # columns of the residual stream whose squares are summed in one part
ALIKE_ROWS = 16  # on a GPU, a row's results have the same bits in steps of up to so many rows
# Up to so many rows, CUDA C multiplies weights of 8 or 4 bits. Beyond, inputs are as many bytes as weights, and larger
# tiles of Triton's read them less often.
QUANTIZED_ROWS = 8


@dataclass(frozen=True, slots=True)
class Exchange:
    """Memory by which kernels on several GPUs sum what each has computed: see `exchange_kernels.sum_over_devices`."""

    inbox: Tensor  # [2, num_devices, batch_size, width] int64: this device's
    inboxes: tuple[int, ...]  # the address of each device's
    counts: Tensor  # int32: how many sums each program has taken part in
    rank: int


@dataclass(frozen=True, slots=True)
class Stream:
    """The residual stream of a step, and what is prepared of it for its next readers."""

    hidden: Tensor  # [batch_size, hidden_size]
    scaled: Tensor  # [batch_size, hidden_size]: hidden * weight of the next norm
    # [batch_size, hidden_size]: hidden * weight of the norm of the layer after; only written if `Readers.ahead` is set
    scaled_ahead: Tensor
    squares: Tensor  # [num_squares, batch_size] float32: sums of hidden² over blocks of SQUARES_BLOCK columns
    # The readers' norms subtract the mean, so writers may already do so: see `workers.model.weights` for products.
    centred: bool = False
    # Where each of several GPUs adds a part, kernels sum the parts: products tile by tile, others row by row.
    tile_sums: Exchange | None = None
    row_sums: Exchange | None = None


@dataclass(frozen=True, slots=True)
class Readers:
    """The norms through which the stream is read next. Without `norm`, all readers read the stream itself."""

    norm: Tensor | None  # [hidden_size] float32
    ahead: Tensor | None = None  # [hidden_size] float32: the norm of the layer after, if scaled_ahead is needed


@dataclass(frozen=True, slots=True)
class Normed:
    """The operand of a product: norm(x), or x itself."""

    x: Tensor  # [batch_size, num_in]: the stream's scaled or scaled_ahead, or any other tensor
    squares: Tensor | None = None  # the stream's squares; None: the operand is x itself


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """The state that requests keep in a layer of `RecurrentSpec` instead of KV rows, indexed by tail.

    There are one or two versions of it. A step reads that `version` of a request and writes the other one; a single
    version is updated in place.
    """

    conv: Tensor  # [num_tails, versions, num_channels, conv_len - 1] float32: the last inputs of each channel
    memory: Tensor  # [num_tails, versions, ...] float32: sizes as in the spec's `parts`
    version: Tensor  # [num_tails] int64


@dataclass(frozen=True, slots=True)
class HeadBuffers:
    """The activations of layers with the same heads, which use these buffers one after another."""

    qkv: Tensor  # [batch_size, qkv_width]
    q: Tensor  # [batch_size, num_q_heads, head_dim]
    attended: Tensor  # [batch_size, num_q_heads, head_dim]
    gates: Tensor | None  # [batch_size, q_width]
    q_only: Tensor | None  # [batch_size, q_width]: queries alone, for layers that attend to another layer's rows


@dataclass(frozen=True, slots=True)
class ExpertBuffers:
    """The activations of MoE layers with the same experts, which use these buffers one after another."""

    logits: Tensor  # [batch_size, num_experts] float32: the router's
    chosen: Tensor  # [batch_size, num_chosen] int32: ids of experts
    shares: Tensor  # [batch_size, num_chosen] float32: their routing weights
    gated: Tensor  # [batch_size, num_chosen, intermediate_size]
    parts: Tensor  # [batch_size, num_chosen, hidden_size]


@dataclass(frozen=True, slots=True)
class StreamsBuffers:
    """Several residual streams of a step (hyper-connections). A branch reads a mixture of them, and adds to a `Stream`.

    Between two branches they are mixed: see `csattn.models.streams`.
    """

    streams: Tensor  # [batch_size, num, hidden_size]
    post: Tensor  # [batch_size, num] float32: the weight of the branch's output in each stream
    comb: Tensor  # [batch_size, num, num] float32: at [i, j], the weight of stream i in the new stream j
    products: Tensor  # [batch_size, num_mixes] float32: products with the mixing matrix, an intermediate result


@dataclass(frozen=True, slots=True)
class RecurrentBuffers:
    """The activations of layers of the same `RecurrentSpec`, which use these buffers one after another."""

    inputs: Tensor  # [batch_size, in_width]: the output of the weights' `inputs`
    mixed: Tensor  # [batch_size, num_channels]: channels after the convolution
    out: Tensor  # [batch_size, out_width]; undefined for idle rows


@dataclass(frozen=True, slots=True)
class LatentBuffers:
    """The activations of layers of latent attention (MLA), which use these buffers one after another."""

    inputs: Tensor  # [batch_size, sum of in_widths]
    q_latents: Tensor  # [batch_size, q_rank]
    # [batch_size, q_width + index_q_width]; the same tensor as `inputs` if queries are projected without a latent
    projected: Tensor
    queries: Queries
    attended: Tensor  # [batch_size, num_heads, kv_rank]
    values: Tensor  # [batch_size, v_width]


@dataclass(frozen=True, slots=True)
class CompressedBuffers:
    """The activations of layers of compressed attention, which use these buffers one after another."""

    latents: Tensor  # [batch_size, q_rank]
    normed: Tensor  # [batch_size, q_rank]
    projected: Tensor  # [batch_size, q_width + index_q_width]
    inputs: Tensor  # [batch_size, sum of in_widths]
    attended: Tensor  # [num_groups, batch_size, width]: outputs of groups of heads, for the grouped output projection
    grouped: Tensor  # [batch_size, out_width]


def num_squares(hidden_size: int) -> int:
    return -(-hidden_size // SQUARES_BLOCK)
