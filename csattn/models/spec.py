"""A language model described as data. Whatever runs one reads this.

It is a list of layers, each attention (or what takes its place), an MLP, or both.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from csattn.models.latent_spec import CompressedSpec, LatentSpec
from csattn.models.recurrent_spec import RecurrentSpec
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
    If `recurrent`, `latent` or `compressed` is set, it takes the place of `attention`.
    """

    mlp: MlpSpec | None
    experts: tuple[ExpertsSpec, ...] = ()
    attention: AttentionSpec = AttentionSpec()
    recurrent: RecurrentSpec | None = None  # the layer keeps a state of fixed size, and no rows
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
