"""A language model described as data: a list of layers, each attention and an MLP. Whatever runs one reads this."""

from dataclasses import dataclass, field
from typing import Any, Literal

Activation = Literal["silu", "gelu_tanh", "quick_gelu", "relu", "relu2"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Causal attention to all rows, by the model's heads."""

    qkv_bias: bool = False
    out_bias: bool = False
    # RMSNorm before RoPE: of each head of q and of k, or of all of q and of all of k
    qk_norm: Literal["none", "head", "projection"] = "none"
    rotated: bool = True  # RoPE; False: none


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpec:
    """down(activation(gate(x)) * up(x)), or down(activation(up(x)))."""

    intermediate_size: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """stream += residual_multiplier * post_norm(attention(pre_norm(stream))), then the MLP likewise. Norms: RMSNorm."""

    mlp: MlpSpec
    attention: AttentionSpec = AttentionSpec()
    pre_norm: bool = True
    post_norm: bool = False
    residual_multiplier: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder. Heads are the same in every layer: a context's rows are of one shape."""

    layers: tuple[LayerSpec, ...]
    hidden_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    softmax_scale: float
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope: dict[str, Any] = field(default_factory=dict)  # as transformers' rope_parameters
    interleaved: bool = False  # RoPE turns dimensions 2i and 2i + 1 together; else i and i + half of those that turn
    embedding_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    logit_cap: float | None = None  # logits are cap * tanh(logit / cap)
    tied_embedding: bool = False  # the output head is the embedding

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def q_width(self) -> int:
        return self.num_q_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        return self.q_width + 2 * self.kv_width

    @property
    def intermediate_size(self) -> int:
        """The widest layer's."""
        return max(layer.mlp.intermediate_size for layer in self.layers)

    @property
    def streamed_params(self) -> int:
        """Parameters of the matrices that every decode step reads: all but the embedding, of which it reads a row."""
        attention = self.num_layers * self.hidden_size * (self.qkv_width + self.q_width)
        mlps = sum(self.hidden_size * mlp.intermediate_size * (2 + mlp.gated) for mlp in (x.mlp for x in self.layers))
        return attention + mlps + self.vocab_size * self.hidden_size


def llama_like(
    *,
    num_layers: int,
    intermediate_size: int,
    head_dim: int,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    **rest: Any,
) -> ModelSpec:
    """A model whose layers are all alike, as Llama's are. rest: of `ModelSpec`."""
    attention = AttentionSpec(qkv_bias=qkv_bias, qk_norm="head" if qk_norm else "none")
    layer = LayerSpec(attention=attention, mlp=MlpSpec(intermediate_size=intermediate_size))
    return ModelSpec(layers=(layer,) * num_layers, head_dim=head_dim, softmax_scale=head_dim**-0.5, **rest)
