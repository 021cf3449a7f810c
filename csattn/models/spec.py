"""A language model described as data. Whatever runs one reads this.

It is a list of layers, each attention (or what takes its place), an MLP, or both.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from csattn.reach import Reach

# The last two combine gate and up. clamped: min(gate, 7) * sigmoid(1.702 * min(gate, 7)) * (clip(up, -7, 7) + 1);
# limited: silu(min(gate, 10)) * clip(up, -10, 10).
Activation = Literal["silu", "gelu_tanh", "quick_gelu", "relu", "relu2", "clamped", "limited"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Temper:
    """Attention temperature: a query at position p is multiplied by 1 + beta * log(1 + floor((p + offset) / every))."""

    beta: float
    every: int
    offset: int = 0

    def scales(self, positions: Tensor) -> Tensor:
        """Return the factors at these positions: float32, the shape of positions."""
        return 1 + self.beta * torch.log1p(torch.floor((positions.float() + self.offset) / self.every))


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """How positions enter queries and keys: RoPE, and a temperature of queries."""

    # as transformers' rope_parameters; None: no rotation
    parameters: dict[str, Any] | None = field(default_factory=dict)
    interleaved: bool = False  # dimensions 2i and 2i + 1 form a pair; else i and i + half of the rotated ones
    temper: Temper | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsSpec:
    """The heads of a layer's attention."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def q_width(self) -> int:
        return self.num_q_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        return self.q_width + 2 * self.kv_width


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Causal attention over KV heads: to all earlier rows, or to those within `reach`."""

    qkv_bias: bool = False
    out_bias: bool = False
    # RMSNorm of q and k before RoPE: over each head, or over the whole projection
    qk_norm: Literal["none", "head", "projection"] = "none"
    norms_after_rope: bool = False  # the weights of these norms multiply after RoPE
    v_norm: bool = False  # RMSNorm of each head of v, without weights
    k_is_v: bool = False  # values are the projected keys before norm and RoPE
    # the earlier layer whose rows this one attends to, with the same heads and reach; None: it has its own
    rows_of: int | None = None
    rope: int | None = 0  # index into `ModelSpec.ropes`; None: no RoPE
    reach: Reach | None = None  # None: all rows, and the layer gets an index
    gated: bool = False  # attention's output is multiplied by the sigmoid of a gate projection of its width
    gate_bias: bool = False
    sinks: bool = False  # sink logits: each query head has one more logit in its softmax, without a row
    logit_cap: float | None = None  # logits are cap * tanh(logit / cap)


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpec:
    """down(activation(gate(x)) * up(x)), or, if not gated, down(activation(up(x)))."""

    intermediate_size: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A mixture of experts: each expert is an MLP, and a token's outputs are summed with its shares as weights.

    A router projection gives a score for each expert, by which a token's experts are chosen and weighted.
    """

    num_experts: int
    num_chosen: int  # experts of a token
    intermediate_size: int
    scores: Literal["softmax", "sigmoid", "softmax_of_chosen", "root_softplus"]  # the last: sqrt(softplus(x))
    activation: Activation = "silu"
    gated: bool = True  # as in `MlpSpec`
    bias: bool = False
    has_choice_bias: bool = False  # a bias that is added to scores for the choice, not for shares
    # number of groups, and of those kept to choose from: the groups with the largest sums of their two best scores
    groups: tuple[int, int] = (1, 1)
    normed: bool = False  # shares are divided by their sum
    scale: float = 1.0  # factor of shares
    on_input: bool = False  # the share multiplies the expert's input, not its output
    has_scales: bool = False  # each expert has a factor, applied to its shares last
    # Experts and router read the residual stream through norms of their own; the outputs of the experts and of the
    # dense MLP are normed before they are added.
    has_own_norms: bool = False
    by_token: bool = False  # hash routing: a table gives the experts of each token id


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSpec:
    """Linear attention (Gated DeltaNet, arXiv:2412.06464): each token updates a memory of fixed size."""

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    conv_len: int  # kernel size in tokens of the causal convolution over each channel

    @property
    def num_channels(self) -> int:
        """Channels of queries, keys and values together."""
        return 2 * self.num_k_heads * self.k_dim + self.out_width

    @property
    def out_width(self) -> int:
        return self.num_v_heads * self.v_dim

    @property
    def in_width(self) -> int:
        """Width of the input projections: channels, gates, and two numbers a head (write strength and decay)."""
        return self.num_channels + self.out_width + 2 * self.num_v_heads

    @property
    def parts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the convolution's state (the last inputs of each channel) and of the memory."""
        return (self.num_channels, self.conv_len - 1), (self.num_v_heads, self.k_dim, self.v_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanSpec:
    """State space layer (Mamba-2, arXiv:2405.21060): each token updates a memory of fixed size."""

    num_heads: int
    num_groups: int  # of heads: those of a group write and read their memories at the same places
    head_dim: int
    state_dim: int  # of the memory, numbers for each dimension of a head
    conv_len: int  # as in `DeltaSpec`
    bias: bool = False  # of the input and output projections
    conv_bias: bool = False
    least_step: float = 0.0  # a token's step in time is at least so long (transformers ignores it in decode steps)

    @property
    def num_channels(self) -> int:
        """Channels of values, and of where each group writes and reads."""
        return self.out_width + 2 * self.num_groups * self.state_dim

    @property
    def out_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def in_width(self) -> int:
        """Width of the input projections: channels, gates, and a number for each head (its step in time)."""
        return self.num_channels + self.out_width + self.num_heads

    @property
    def parts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """As in `DeltaSpec`."""
        return (self.num_channels, self.conv_len - 1), (self.num_heads, self.state_dim, self.head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvSpec:
    """Short convolution with gates before and after it (LFM2, arXiv:2511.23404)."""

    num_channels: int
    conv_len: int  # as in `DeltaSpec`
    bias: bool = False  # of the projections and of the convolution

    @property
    def out_width(self) -> int:
        return self.num_channels

    @property
    def in_width(self) -> int:
        """Width of the input projections: channels, then for each a gate before and one after the convolution."""
        return 3 * self.num_channels

    @property
    def parts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """As in `DeltaSpec`, without a memory."""
        return (self.num_channels, self.conv_len - 1), (0, 0, 0)


RecurrentSpec = DeltaSpec | ScanSpec | ConvSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerSpec:
    """A learned indexer (DeepSeek-V3.2, see `csattn.lightning`). It chooses among all rows that a token may see."""

    num_heads: int
    head_dim: int
    interleaved: bool  # as in `RopeSpec`, for RoPE of its first dimensions


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Attention in latent space (MLA, arXiv:2405.04434).

    A token's row is its latent, which is key and value of all heads, followed by the rotated (RoPE) part of the key
    and, if the layer has an indexer, by its index key.
    """

    num_heads: int
    q_rank: int | None  # width of queries' latents; None: queries are projected directly
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    indexer: IndexerSpec | None = None  # None, with a top_k: the rows that an earlier layer's indexer chose last
    top_k: int | None = None  # rows chosen for a token; None: it attends to all

    @property
    def row_width(self) -> int:
        """Width of a row: latent, rotated part and index key."""
        return self.key_width + (self.indexer.head_dim if self.indexer is not None else 0)

    @property
    def key_width(self) -> int:
        return self.kv_rank + self.rope_dim

    @property
    def q_width(self) -> int:
        return self.num_heads * (self.nope_dim + self.rope_dim)

    @property
    def v_width(self) -> int:
        return self.num_heads * self.v_dim

    @property
    def index_q_width(self) -> int:
        return self.indexer.num_heads * self.indexer.head_dim if self.indexer is not None else 0

    @property
    def in_widths(self) -> tuple[int, int, int, int]:
        """Widths of the projections of the layer's input.

        Queries (or their latents), the row's key, its index key, and a weight for each of the indexer's heads.
        """
        of_index = (0, 0) if self.indexer is None else (self.indexer.head_dim, self.indexer.num_heads)
        return self.q_rank or self.q_width, self.key_width, *of_index

    def num_params(self, hidden_size: int) -> int:
        """Number of parameters of the layer's attention matrices."""
        of_queries = 0 if self.q_rank is None else self.q_rank * (self.q_width + self.index_q_width)
        of_latents = self.kv_rank * self.num_heads * (self.nope_dim + self.v_dim)
        return hidden_size * (sum(self.in_widths) + self.v_width) + of_queries + of_latents


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedSpec:
    """DeepSeek-V4's attention: see `csattn.lightning.compressed`.

    A token attends to a sliding window of rows, and to compressed rows, each of which stands for several earlier
    tokens: to all of them, or to those that an indexer chooses. A row is key and value of all heads; RoPE rotates its
    last channels.
    """

    num_heads: int
    head_dim: int  # also the width of a row
    q_rank: int  # width of queries' latents
    rope_dim: int
    window: int  # uncompressed rows that a token sees, including its own
    num_groups: int  # of heads: the output projection first maps each group to `out_rank` numbers
    out_rank: int
    ratio: int = 0  # tokens that a compressed row stands for; 0: the layer has no compressed rows
    overlaps: bool = False  # a compressed row also includes the `ratio` tokens before its own
    indexer: IndexerSpec | None = None  # its keys are compressed in the same way; None: a token attends to all
    top_k: int = 0  # compressed rows chosen for a token

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def index_q_width(self) -> int:
        return self.indexer.num_heads * self.indexer.head_dim if self.indexer is not None else 0

    @property
    def series(self) -> int:
        """How many compressed rows a token contributes to: its own and, with overlap, the next one."""
        return (1 + self.overlaps) if self.ratio else 0

    @property
    def key_dim(self) -> int:
        """Width of an index key; 0: no index keys."""
        return self.indexer.head_dim if self.indexer is not None else 0

    @property
    def compressed_widths(self) -> tuple[int, int]:
        """Widths of a token's contributions to compressed rows and to index keys. Gate logits have the same widths."""
        return self.series * self.head_dim, self.series * self.key_dim

    @property
    def in_widths(self) -> tuple[int, ...]:
        """Widths of the projections of the layer's input, except the queries' latent: the token's row, its
        contributions to compressed rows and their gates, the same for index keys, and a weight for each index head."""
        of_rows, of_keys = self.compressed_widths
        num_index_heads = self.indexer.num_heads if self.indexer is not None else 0
        return self.head_dim, of_rows, of_rows, of_keys, of_keys, num_index_heads

    @property
    def out_width(self) -> int:
        return self.num_groups * self.out_rank

    @property
    def span(self) -> int:
        """Number of tokens that a compressed row is computed from, overlap included."""
        return self.ratio * self.series

    def context_numbers(self, context_len: int) -> int:
        """How many numbers the layer keeps of a context: its last rows, compressed rows and index keys."""
        num_rows = context_len // self.ratio if self.ratio else 0
        return min(self.window - 1, context_len) * self.head_dim + num_rows * (self.head_dim + self.key_dim)

    def num_params(self, hidden_size: int) -> int:
        """Number of parameters of the layer's attention matrices."""
        of_heads = self.q_width * (self.q_rank + self.out_rank) + self.out_width * hidden_size
        return self.num_row_params(hidden_size) + of_heads

    def num_row_params(self, hidden_size: int) -> int:
        """Number of parameters of the matrices that are common to all heads: they make rows, and choose them."""
        return hidden_size * (self.q_rank + sum(self.in_widths)) + self.q_rank * self.index_q_width


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsSpec:
    """Several residual streams (hyper-connections, mHC, arXiv:2512.24880): see `csattn.models.streams`.

    A branch (attention or MLP) reads a weighted sum of the streams. Its output is added to each stream with a weight,
    and the streams are mixed by a doubly stochastic matrix (rows and columns sum to 1).
    """

    num: int
    iterations: int  # of Sinkhorn's algorithm, which makes the matrices doubly stochastic
    eps: float  # keeps weights and their sums above 0

    @property
    def num_mixes(self) -> int:
        """Number of weights before a branch: to read the streams, to add to them, and to mix them."""
        return (2 + self.num) * self.num

    def num_params(self, num_layers: int, hidden_size: int) -> int:
        """Number of parameters of the matrices that compute these weights: two a layer, and one that joins streams."""
        return (2 * num_layers * self.num_mixes + self.num) * self.num * hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """stream += residual_multiplier * post_norm(attention(pre_norm(stream))), then the same with the MLP, if any.

    The outputs of the MLP and of experts are one output, except for experts with norms of their own.
    If `delta`, `scan`, `conv`, `latent` or `compressed` is set, it takes the place of `attention`.
    """

    mlp: MlpSpec | None
    experts: tuple[ExpertsSpec, ...] = ()
    attention: AttentionSpec = AttentionSpec()
    delta: DeltaSpec | None = None
    scan: ScanSpec | None = None
    conv: ConvSpec | None = None
    latent: LatentSpec | None = None
    compressed: CompressedSpec | None = None
    pre_norm: bool = True
    post_norm: bool = False
    residual_multiplier: float = 1.0
    mlp_multiplier: float = 1.0  # another factor of what the MLP and experts add
    # the stream that leaves the layer is multiplied by a learned scalar
    scaled: bool = False
    parallel: bool = False  # the MLP reads the same normed input as attention
    mlp_only: bool = False  # no attention, nor anything in its place; the layer keeps nothing

    @property
    def has_mlp(self) -> bool:
        return self.mlp is not None or bool(self.experts)

    @property
    def recurrent(self) -> RecurrentSpec | None:
        """What the layer has in place of attention if it keeps a state of fixed size, and no rows."""
        return self.delta or self.scan or self.conv


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder. All layers that attend to everything have the same heads, and so have all local layers.

    Rows of latents and of compressed attention are stored as those of one KV head: `head_dim` is half of their width.
    Norms are RMSNorm, or LayerNorm without biases if `centred` (the mean of the stream is subtracted).
    """

    layers: tuple[LayerSpec, ...]
    hidden_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    softmax_scale: float
    vocab_size: int
    max_positions: int
    norm_eps: float
    # number of KV heads and head_dim of local layers (those with a `reach`); None: as in the others
    local_heads: tuple[int, int] | None = None
    # width of the per-layer input of each token, beside the stream: see `LayerInputWeights`; 0: none
    layer_input_width: int = 0
    streams: StreamsSpec | None = None
    ropes: tuple[RopeSpec, ...] = (RopeSpec(),)
    centred: bool = False
    embedding_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    logit_cap: float | None = None  # logits are cap * tanh(logit / cap)
    tied_embedding: bool = False  # the output head is the embedding
    head_bias: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def indexed_layers(self) -> tuple[int, ...]:
        """Layers that attend to all rows by KV heads: they get an index. A learned indexer brings its own."""
        others = (x.mlp_only or x.recurrent or x.latent or x.compressed or x.attention.reach for x in self.layers)
        return tuple(i for i, is_other in enumerate(others) if not is_other)

    @property
    def compressed(self) -> tuple[CompressedSpec, ...]:
        """The specs of compressed attention: one for each layer, or none, because all layers have it or none."""
        return tuple(layer.compressed for layer in self.layers if layer.compressed is not None)

    def is_predicted(self, layer_idx: int) -> bool:
        """Whether its queries are predicted from the previous layer's input: so in all indexed layers but the first."""
        return layer_idx in self.indexed_layers[1:]

    @property
    def heads(self) -> HeadsSpec:
        """Heads of the layers that attend to everything."""
        return HeadsSpec(num_q_heads=self.num_q_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)

    def heads_of(self, layer_idx: int) -> HeadsSpec:
        """Heads of that layer."""
        if self.local_heads is None or self.layers[layer_idx].attention.reach is None:
            return self.heads
        num_kv_heads, head_dim = self.local_heads
        return HeadsSpec(num_q_heads=self.num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)

    @property
    def kv_sources(self) -> frozenset[int]:
        """Layers whose rows later layers attend to as well (KV sharing)."""
        return frozenset(x.attention.rows_of for x in self.layers if x.attention.rows_of is not None)

    @property
    def streamed_params(self) -> int:
        """Number of parameters in the matrices that a decode step of one token reads, of experts only the chosen ones.

        The output head counts, the row read from the embedding does not.
        """
        columns, others = self.vocab_size + 3 * self.num_layers * self.layer_input_width, 0
        for layer_idx, layer in enumerate(self.layers):
            if layer.recurrent is not None:
                columns += layer.recurrent.in_width + layer.recurrent.out_width
            elif layer.latent is not None:
                others += layer.latent.num_params(self.hidden_size)
            elif layer.compressed is not None:
                others += layer.compressed.num_params(self.hidden_size)
            elif not layer.mlp_only:
                heads, has_rows = self.heads_of(layer_idx), layer.attention.rows_of is None
                columns += heads.qkv_width if has_rows else heads.q_width
                columns += (1 + layer.attention.gated) * heads.q_width
            columns += layer.mlp.intermediate_size * (2 + layer.mlp.gated) if layer.mlp is not None else 0
            columns += sum(x.num_experts + (2 + x.gated) * x.num_chosen * x.intermediate_size for x in layer.experts)
        if self.streams is not None:
            others += self.streams.num_params(self.num_layers, self.hidden_size)
        return self.hidden_size * columns + others
