"""A language model described as data: a list of layers, each attention and an MLP. Whatever runs one reads this."""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from csattn.reach import Reach

# The last two are of gates and ups together. clamped: min(gate, 7) * sigmoid(1.702 * min(gate, 7)) * (clip(up, -7, 7)
# + 1), and limited: silu(min(gate, 10)) * clip(up, -10, 10).
Activation = Literal["silu", "gelu_tanh", "quick_gelu", "relu", "relu2", "clamped", "limited"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Temper:
    """Queries grow with their position p, by 1 + beta * log(1 + floor((p + offset) / every))."""

    beta: float
    every: int
    offset: int = 0

    def scales(self, positions: Tensor) -> Tensor:
        """float32, like positions."""
        return 1 + self.beta * torch.log1p(torch.floor((positions.float() + self.offset) / self.every))


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """What a position does to queries and keys."""

    # as transformers' rope_parameters; None: nothing is turned
    parameters: dict[str, Any] | None = field(default_factory=dict)
    interleaved: bool = False  # dimensions 2i and 2i + 1 turn together; else i and i + half of those that turn
    temper: Temper | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsSpec:
    """Of a layer's attention."""

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
    """Causal attention by the model's heads: to all rows, or to those within reach."""

    qkv_bias: bool = False
    out_bias: bool = False
    # RMSNorm before RoPE: of each head of q and of k, or of all of q and of all of k
    qk_norm: Literal["none", "head", "projection"] = "none"
    # These are not in a repr, of which models' fingerprints are made: a model's weights tell of them.
    v_norm: bool = field(default=False, repr=False)  # RMSNorm of each head of v, without weights
    k_is_v: bool = field(default=False, repr=False)  # values are what keys are projected to, before their norm and RoPE
    # the layer before it whose rows it attends to, with the same heads and as far; None: it has its own
    rows_of: int | None = field(default=None, repr=False)
    rope: int | None = 0  # which of the model's; None: none
    reach: Reach | None = None  # None: all rows, which an index is made of
    gated: bool = False  # what is attended to is multiplied by the sigmoid of a product as wide
    sinks: bool = False  # each query head has a logit of its own in the softmax, without a row
    logit_cap: float | None = None  # logits are cap * tanh(logit / cap)


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpec:
    """down(activation(gate(x)) * up(x)), or down(activation(up(x)))."""

    intermediate_size: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """The sum of a token's experts, each a gated MLP times its share. Which they are, scores of a product tell."""

    num_experts: int
    num_chosen: int  # for a token
    intermediate_size: int
    scores: Literal["softmax", "sigmoid", "softmax_of_chosen", "root_softplus"]  # the last: sqrt(softplus(x))
    activation: Activation = "silu"
    bias: bool = False
    has_choice_bias: bool = False  # it is added to scores to choose, not to share
    groups: tuple[int, int] = (1, 1)  # of so many groups, chosen are the experts of so many, by their best two scores
    normed: bool = False  # shares are divided by their sum
    scale: float = 1.0  # of shares
    on_input: bool = False  # the share is the input's factor, not the output's
    # not in a repr: a model's weights tell of them
    has_scales: bool = field(default=False, repr=False)  # each expert has a factor of its shares, behind all else
    # they, and what tells which they are, read the stream by norms of their own; what they give, and what the MLP
    # beside them does, have norms before they are added
    apart: bool = field(default=False, repr=False)
    by_token: bool = field(default=False, repr=False)  # a table of the vocabulary tells which are a token's


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSpec:
    """Gated DeltaNet (arXiv:2412.06464) in attention's place: a memory of fixed size, which each token changes."""

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    conv_len: int  # tokens that a convolution over each channel sees

    @property
    def num_channels(self) -> int:
        """Of queries, keys and values."""
        return 2 * self.num_k_heads * self.k_dim + self.v_width

    @property
    def v_width(self) -> int:
        return self.num_v_heads * self.v_dim

    @property
    def in_width(self) -> int:
        """Channels, gates, and two numbers of each head: how much is written, and forgotten."""
        return self.num_channels + self.v_width + 2 * self.num_v_heads

    @property
    def parts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes of the last inputs of the channels, and of the memory."""
        return self.state_sizes[:2], self.state_sizes[2:]

    @property
    def state_sizes(self) -> tuple[int, int, int, int, int]:
        """Both."""
        return self.num_channels, self.conv_len - 1, self.num_v_heads, self.k_dim, self.v_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerSpec:
    """A learned indexer (DeepSeek-V3.2): see `csattn.lightning`. It chooses among all rows that a token may see."""

    num_heads: int
    head_dim: int
    interleaved: bool  # RoPE of its first dimensions


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Attention in latent space (MLA, arXiv:2405.04434) in attention's place.

    A token's row is its latent, the value of all heads, and besides, for keys alone, a part that RoPE turns; behind
    them lies its index key, where the layer has an indexer.
    """

    num_heads: int
    q_rank: int | None  # of queries' own latents; None: they are projected at once
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    indexer: IndexerSpec | None = None  # without one, a layer attends to what was chosen last for the token
    top_k: int | None = None  # rows that are chosen; None: all are attended to

    @property
    def row_width(self) -> int:
        """Numbers of a row."""
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
        """Of what the layer's input is projected to.

        Queries or their latents, the row's key, its index key, and how much each of the indexer's heads counts.
        """
        of_index = (0, 0) if self.indexer is None else (self.indexer.head_dim, self.indexer.num_heads)
        return self.q_rank or self.q_width, self.key_width, *of_index

    def num_params(self, hidden_size: int) -> int:
        """Of its matrices."""
        of_queries = 0 if self.q_rank is None else self.q_rank * (self.q_width + self.index_q_width)
        of_latents = self.kv_rank * self.num_heads * (self.nope_dim + self.v_dim)
        return hidden_size * (sum(self.in_widths) + self.v_width) + of_queries + of_latents


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedSpec:
    """DeepSeek-V4's attention in attention's place: see `csattn.lightning.compressed`.

    A token attends to its own and the last rows before it, and to rows that stand for several earlier tokens each: to
    all of these, or to those that an indexer chooses. A row is key and value of all heads; its last channels turn.
    """

    num_heads: int
    head_dim: int  # of a row, too
    q_rank: int  # of queries' own latents
    rope_dim: int
    window: int  # rows that a token sees one by one, its own among them
    num_groups: int  # of heads that the output is projected of, each to `out_rank` numbers first
    out_rank: int
    ratio: int = 0  # tokens that a compressed row stands for; 0: there are none
    overlaps: bool = False  # a compressed row is also made of the `ratio` tokens before its own
    indexer: IndexerSpec | None = None  # its keys are compressed likewise; None: all compressed rows are attended to
    top_k: int = 0  # compressed rows that are chosen

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def index_q_width(self) -> int:
        return self.indexer.num_heads * self.indexer.head_dim if self.indexer is not None else 0

    @property
    def series(self) -> int:
        """How many compressed rows a token adds to: the one that stands for it and, with overlap, the one after it."""
        return (1 + self.overlaps) if self.ratio else 0

    @property
    def key_dim(self) -> int:
        """Of an index key; 0: there are none."""
        return self.indexer.head_dim if self.indexer is not None else 0

    @property
    def compressed_widths(self) -> tuple[int, int]:
        """Of what a token adds to compressed rows, as much again for how much it counts; and to their index keys."""
        return self.series * self.head_dim, self.series * self.key_dim

    @property
    def in_widths(self) -> tuple[int, ...]:
        """Of what the layer's input is projected to, queries' latents aside: the token's row, what it adds to
        compressed rows and how much that counts, likewise for index keys, and how much each index head counts."""
        of_rows, of_keys = self.compressed_widths
        num_index_heads = self.indexer.num_heads if self.indexer is not None else 0
        return self.head_dim, of_rows, of_rows, of_keys, of_keys, num_index_heads

    @property
    def out_width(self) -> int:
        return self.num_groups * self.out_rank

    @property
    def span(self) -> int:
        """Tokens that a compressed row is made of."""
        return self.ratio * self.series

    def context_numbers(self, context_len: int) -> int:
        """Of what is kept of a context: its last rows, compressed rows and index keys."""
        num_rows = context_len // self.ratio if self.ratio else 0
        return min(self.window - 1, context_len) * self.head_dim + num_rows * (self.head_dim + self.key_dim)

    def num_params(self, hidden_size: int) -> int:
        """Of its matrices."""
        of_heads = self.q_width * (self.q_rank + self.out_rank) + self.out_width * hidden_size
        return self.num_row_params(hidden_size) + of_heads

    def num_row_params(self, hidden_size: int) -> int:
        """Of those that make rows, and choose them, for all heads."""
        return hidden_size * (self.q_rank + sum(self.in_widths)) + self.q_rank * self.index_q_width


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsSpec:
    """Several residual streams in place of one (hyper-connections, mHC, arXiv:2512.24880): see `streams`.

    A branch of a layer reads a mixture of them; what it gives is added to each of them, which are mixed besides, by
    matrices whose rows and columns sum up to 1.
    """

    num: int
    iterations: int  # of Sinkhorn's algorithm, by which these matrices become such
    eps: float  # that keeps weights and their sums from 0

    @property
    def num_mixes(self) -> int:
        """Weights of what a branch reads of them, of what it adds to each, and of how they are mixed."""
        return (2 + self.num) * self.num

    def num_params(self, num_layers: int, hidden_size: int) -> int:
        """Of the matrices that these are computed by: two of each layer, and one of how streams are joined."""
        return (2 * num_layers * self.num_mixes + self.num) * self.num * hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """stream += residual_multiplier * post_norm(attention(pre_norm(stream))), then the MLP likewise."""

    mlp: MlpSpec | None
    experts: tuple[ExpertsSpec, ...] = ()  # whose sums are added to the MLP's
    attention: AttentionSpec = AttentionSpec()
    delta: DeltaSpec | None = None  # in its place
    latent: LatentSpec | None = None  # likewise
    compressed: CompressedSpec | None = field(default=None, repr=False)  # likewise
    pre_norm: bool = True
    post_norm: bool = False
    residual_multiplier: float = 1.0
    # all of the stream is multiplied by a number of the layer's when it leaves it
    scaled: bool = field(default=False, repr=False)
    parallel: bool = False  # the MLP reads what attention reads, and has no norm of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder. Heads are the same in all layers that attend to everything, and in all that do not.

    Rows of latents, and of compressed attention, are kept as those of one KV head: `head_dim` is half of their width.
    Norms are RMSNorm, or of a stream of which the mean is taken (`centred`), which makes them LayerNorm without biases.
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
    # KV heads and width of layers that attend within reach; None: as of the others
    local_heads: tuple[int, int] | None = field(default=None, repr=False)
    # numbers of each token's that a layer takes besides the stream: see `LayerInputWeights`; 0: none
    layer_input_width: int = field(default=0, repr=False)
    streams: StreamsSpec | None = field(default=None, repr=False)
    ropes: tuple[RopeSpec, ...] = (RopeSpec(),)
    centred: bool = False
    embedding_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    logit_cap: float | None = None  # logits are cap * tanh(logit / cap)
    tied_embedding: bool = False  # the output head is the embedding
    head_bias: bool = field(default=False, repr=False)  # a model's weights tell of it

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def indexed_layers(self) -> tuple[int, ...]:
        """Those that attend to everything: an index is made of their rows. A learned indexer has made its own."""
        others = (x.delta or x.latent or x.compressed or x.attention.reach for x in self.layers)
        return tuple(i for i, is_other in enumerate(others) if not is_other)

    @property
    def compressed(self) -> tuple[CompressedSpec, ...]:
        """Of its layers, which all have such attention, or none has."""
        return tuple(layer.compressed for layer in self.layers if layer.compressed is not None)

    def is_predicted(self, layer_idx: int) -> bool:
        """Whether its queries are told from the input of the layer before: of indexed layers, all but the first."""
        return layer_idx in self.indexed_layers[1:]

    @property
    def heads(self) -> HeadsSpec:
        """Of layers that attend to everything."""
        return HeadsSpec(num_q_heads=self.num_q_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)

    def heads_of(self, layer_idx: int) -> HeadsSpec:
        """Of that layer."""
        if self.local_heads is None or self.layers[layer_idx].attention.reach is None:
            return self.heads
        num_kv_heads, head_dim = self.local_heads
        return HeadsSpec(num_q_heads=self.num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)

    @property
    def lenders(self) -> frozenset[int]:
        """Layers to whose rows others attend, too."""
        return frozenset(x.attention.rows_of for x in self.layers if x.attention.rows_of is not None)

    @property
    def streamed_params(self) -> int:
        """Parameters of the matrices that a token's step reads: of the embedding a row, of experts the chosen."""
        columns, others = self.vocab_size + 3 * self.num_layers * self.layer_input_width, 0
        for layer_idx, layer in enumerate(self.layers):
            if layer.delta is not None:
                columns += layer.delta.in_width + layer.delta.v_width
            elif layer.latent is not None:
                others += layer.latent.num_params(self.hidden_size)
            elif layer.compressed is not None:
                others += layer.compressed.num_params(self.hidden_size)
            else:
                heads, has_rows = self.heads_of(layer_idx), layer.attention.rows_of is None
                columns += heads.qkv_width if has_rows else heads.q_width
                columns += (1 + layer.attention.gated) * heads.q_width
            columns += layer.mlp.intermediate_size * (2 + layer.mlp.gated) if layer.mlp is not None else 0
            columns += sum(x.num_experts + 3 * x.num_chosen * x.intermediate_size for x in layer.experts)
        if self.streams is not None:
            others += self.streams.num_params(self.num_layers, self.hidden_size)
        return self.hidden_size * columns + others
