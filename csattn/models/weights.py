"""The weights of a decode step, by their role: see `module_weights` for those of a loaded model."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from csattn.lightning import CompressorWeights
from csattn.models.quantized_weight import QuantizedExperts, QuantizedWeight
from csattn.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Linear:
    """x @ weight.T + bias"""

    weight: Tensor  # [num_out, num_in]; of quantized weights, on a GPU, the packed words
    bias: Tensor | None = None  # [num_out]
    quantized: QuantizedWeight | None = None  # the same weights quantized: products read these

    @property
    def num_in(self) -> int:
        return self.weight.shape[1] if self.quantized is None else self.quantized.num_in

    def outputs(self, first: int, stop: int) -> "Linear":
        """Return the layer reduced to the outputs first ... stop - 1."""
        bias = None if self.bias is None else self.bias[first:stop]
        quantized = None if self.quantized is None else self.quantized.outputs(slice(first, stop))
        return Linear(self.weight[first:stop], bias, quantized)

    def plain(self, dtype: torch.dtype) -> Tensor:
        """Return the weights [num_out, num_in], decoded if only the quantized ones are stored."""
        if self.quantized is None or self.weight.is_floating_point():
            return self.weight
        return self.quantized.decoded(dtype)


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights of RMSNorm before RoPE: of q and k over each head or over all heads together, of v over each head."""

    q: Tensor  # [head_dim] or [num_q_heads * head_dim] float32
    k: Tensor  # [head_dim] or [num_kv_heads * head_dim] float32
    v: Tensor | None = None  # [head_dim] float32
    after_rope: bool = False  # the weights of q and k multiply after RoPE


@dataclass(frozen=True, slots=True)
class Frequencies:
    """The frequencies of one of a model's RoPEs."""

    angles: Tensor  # [rotated dimensions // 2] float32, radians per position
    scale: float = 1.0  # factor on cos and sin


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The experts' MLPs and the router.

    Each row of a matrix is contiguous, unless the matrix is quantized: then steps read `quantized`, and on a GPU the
    matrices here are its packed words.
    """

    router: Linear  # [num_experts, hidden_size]
    gates: Tensor  # [num_experts, intermediate_size, hidden_size]; of what enters the activation
    ups: Tensor | None  # [num_experts, intermediate_size, hidden_size]; None: experts are not gated
    down: Tensor  # [num_experts, hidden_size, intermediate_size]
    choice_bias: Tensor | None = None  # [num_experts] float32
    gate_bias: Tensor | None = None  # [num_experts, intermediate_size]
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None  # [num_experts, hidden_size]
    scales: Tensor | None = None  # [num_experts] float32
    by_token: Tensor | None = None  # [vocab_size, num_chosen] int32: the experts of each token id (hash routing)
    norms: "ExpertNorms | None" = None  # if `ExpertsSpec.has_own_norms`
    quantized: QuantizedExperts | None = None  # the same matrices quantized: steps read these

    def plain(self, dtype: torch.dtype) -> "ExpertWeights":
        """Return the weights with their matrices decoded, if only the quantized ones are stored."""
        if self.quantized is None or self.gates.is_floating_point():
            return self
        matrices = self.quantized.gate_up.decoded(dtype), self.quantized.down.decoded(dtype)
        gates, ups, down = by_expert(*matrices, len(self.gates), self.ups is not None)
        return replace(self, gates=gates, ups=ups, down=down)


@dataclass(frozen=True, slots=True)
class ExpertNorms:
    """Norms of experts with `ExpertsSpec.has_own_norms`: [hidden_size] float32 each."""

    router: Tensor  # of the router's input
    pre_experts: Tensor  # of the experts' input
    post_experts: Tensor  # of the experts' output
    post_mlp: Tensor  # of the output of the dense MLP


def by_expert(
    gate_up: Tensor,  # as in `QuantizedExperts`
    down: Tensor,  # [num_experts * hidden_size, intermediate_size]
    num_experts: int,
    gated: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return gates, ups and down in the shapes of `ExpertWeights`, as views."""
    gates_ups, downs = gate_up.view(num_experts, -1, gate_up.shape[1]), down.view(num_experts, -1, down.shape[1])
    if not gated:
        return gates_ups, None, downs
    gates, ups = gates_ups.chunk(2, dim=1)
    return gates, ups, downs


@dataclass(frozen=True, slots=True)
class RecurrentWeights:
    """Weights of a layer of `RecurrentSpec`, before its output projection."""

    inputs: tuple[Linear, ...]  # to its inputs, in the order of the spec's `in_width`
    conv: Tensor  # [num_channels, conv_len] float32
    conv_bias: Tensor | None  # [num_channels] float32
    memory: "MemoryWeights | None" = None  # None: a short convolution


@dataclass(frozen=True, slots=True)
class MemoryWeights:
    """How linear attention or a state space updates and reads its memory. num_heads: of linear attention's values."""

    decay: Tensor  # [num_heads] float32, positive
    step_bias: Tensor  # [num_heads] float32: of a token's step in time, by which the memory decays
    norm: Tensor  # [v_dim] or, of a state space, [out_width] float32
    skip: Tensor | None = None  # [num_heads] float32: the share of a token's own values in a state space's output


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Weights of latent attention (MLA). The up-projections of latents are absorbed into queries and outputs."""

    inputs: tuple[Linear, ...]  # of the layer's input, to `LatentSpec.in_widths`
    q_norm: Tensor | None  # [q_rank] float32
    kv_norm: Tensor  # [kv_rank] float32
    queries: tuple[Linear, ...]  # of queries' latents: to queries of all heads (nope, then rope), and to the indexer's
    up_k: Tensor  # [num_heads, nope_dim, kv_rank], contiguous in each head
    up_v: Tensor  # [num_heads, v_dim, kv_rank], contiguous in each head
    index_norm: Tensor | None  # [2, index head_dim] float32: LayerNorm's weights and biases


@dataclass(frozen=True, slots=True)
class CompressedStepWeights:
    """Weights of compressed attention in steps, except the last projection; `CompressedWeights` is for prefill."""

    latents: Linear  # [q_rank, hidden_size], to queries' latents
    latent_norm: Tensor  # [q_rank] float32
    queries: tuple[Linear, ...]  # of these latents: to queries of all heads, and to the indexer's
    inputs: tuple[Linear, ...]  # of the layer's input, to `CompressedSpec.in_widths`
    kv_norm: Tensor  # [head_dim] float32
    groups: Linear  # [num_groups * out_rank, width]: a matrix for each group of heads, stacked
    sinks: Tensor  # [num_heads] float32
    angles: Tensor  # [rope_dim // 2] float32: of RoPE, radians per position
    rows: CompressorWeights | None  # None: the layer has no compressed rows
    keys: CompressorWeights | None  # None: the layer has no indexer
    eps: float


@dataclass(frozen=True, slots=True)
class LayerInputWeights:
    """Weights of what a layer adds after its MLP: norm(projection(activation(gate(stream)) * the token's input))."""

    gate: Linear  # [layer_input_width, hidden_size]
    projection: Linear  # [hidden_size, layer_input_width]
    norm: Tensor  # [hidden_size] float32


@dataclass(frozen=True, slots=True)
class StreamWeights:
    """Weights, all float32, that compute how residual streams are mixed or joined: see `csattn.models.streams`.

    num_out: `StreamsSpec.num_mixes`, or the number of streams if they are joined.
    """

    matrix: Tensor  # [num_out, num * hidden_size]: of the concatenated streams
    bias: Tensor  # [num_out]
    scales: Tensor  # [3]: of pre, post and comb (see `Mixture`); [1] if streams are joined

    @property
    def joins(self) -> bool:
        """Whether these join the streams after the last layer, instead of mixing them around a branch."""
        return len(self.scales) == 1


@dataclass(frozen=True, slots=True)
class InputWeights:
    """Per-layer inputs of a token: (norm(projection(embedding) * scale) + table[token] * table_scale) / sqrt(2)."""

    projection: Linear  # [num_layers * layer_input_width, hidden_size]
    scale: float
    norm: Tensor  # [layer_input_width] float32, for the part of each layer
    table: Tensor  # [vocab_size, num_layers * layer_input_width]
    table_scale: float


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The outputs of the layers in a tuple of Linears are concatenated. Norms are [hidden_size] float32, or None."""

    input_norm: Tensor | None
    qkv: tuple[Linear, ...]
    gates: tuple[Linear, ...]  # of attention's output
    recurrent: RecurrentWeights | None  # in place of qkv and gates, as are the next two
    latent: LatentWeights | None
    compressed: CompressedStepWeights | None
    head_norms: HeadNorms | None
    sinks: Tensor | None  # [num_q_heads] float32
    out: Linear | None  # None: the layer is an MLP alone
    post_attention_norm: Tensor | None
    pre_mlp_norm: Tensor | None
    gate_up: tuple[Linear, ...]  # gates, then ups; an MLP without gates has ups alone; empty without an MLP
    down: Linear | None
    experts: tuple[ExpertWeights, ...]
    post_mlp_norm: Tensor | None
    scale: float = 1.0  # factor of the stream that leaves the layer
    layer_input: LayerInputWeights | None = None
    attention_mix: StreamWeights | None = None  # mixing around attention, with several streams
    mlp_mix: StreamWeights | None = None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights of a model, on one device and in one dtype, except norms and frequencies, which are float32."""

    spec: ModelSpec
    embedding: Tensor  # [vocab_size, hidden_size]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden_size]
    head: Linear  # [vocab_size, hidden_size]; the embedding itself if they are tied
    ropes: tuple[Frequencies, ...]  # in the order of the spec's
    inputs: InputWeights | None = None  # of per-layer inputs, if the model has them
    join: StreamWeights | None = None  # joins several streams after the last layer

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype
