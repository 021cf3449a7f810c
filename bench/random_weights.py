"""Random weights for a model of any shape, for measuring speed."""

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from csattn.lightning.operands.compressor import CompressorWeights
from csattn.models.latent_spec import CompressedSpec, LatentSpec
from csattn.models.quantized_model import HEAD_ROUNDING
from csattn.models.quantized_weight import ROUNDINGS, QuantizedExperts, QuantizedWeight, Rounding
from csattn.models.recurrent_spec import ConvSpec, DeltaSpec, RecurrentSpec, ScanSpec
from csattn.models.rope import model_frequencies
from csattn.models.share import require_shares, share_of_head, share_of_layer, share_of_spec
from csattn.models.spec import ExpertsSpec, HeadsSpec, LayerSpec, ModelSpec
from csattn.models.weights import (
    CompressedStepWeights,
    ExpertNorms,
    ExpertWeights,
    Frequencies,
    HeadNorms,
    InputWeights,
    LatentWeights,
    LayerInputWeights,
    LayerWeights,
    Linear,
    MemoryWeights,
    ModelWeights,
    RecurrentWeights,
    StreamWeights,
    by_expert,
)
from csattn.share import Share
from workers.model.weights import require_dtype

Few = Rounding | Literal["mxfp4"]  # formats of linear layers and experts; mxfp4: of experts only
FEW: tuple[Few, ...] = (*ROUNDINGS, "mxfp4")


def random_weights(
    spec: ModelSpec,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    few: Few | None = None,  # format of weights in few bits; None: dtype
    share: Share | None = None,  # the part of the model for one of several devices; None: all of it
) -> ModelWeights:
    """Make weights that keep activations near 1; the same seed gives the same weights on the same kind of device.

    A share has the same numbers as in the whole model, of which at most one whole layer, or the head, is in memory at a
    time. Raises ConfigError for models that cannot be shared out.
    """
    require_dtype(dtype)
    if share is not None:
        assert few is None, "random weights of few bits are not shared out"
        require_shares(spec, share.num_devices)
    generator = torch.Generator(device).manual_seed(seed)
    into_stream = (2 * spec.num_layers) ** -0.5  # each layer adds to the residual stream twice

    def matrix(num_out: int, num_in: int, gain: float = 1.0) -> Tensor:
        empty = torch.empty(num_out, num_in, dtype=dtype, device=device)
        return empty.normal_(std=gain * num_in**-0.5, generator=generator)

    def linear(
        num_out: int,
        num_in: int,
        bias: bool = False,
        gain: float = 1.0,
        to: Rounding | None = None if few == "mxfp4" else few,
    ) -> Linear:
        zeros = torch.zeros(num_out, dtype=dtype, device=device) if bias else None
        weight = matrix(num_out, num_in, gain)
        if to is None:
            return Linear(weight, zeros)
        quantized = QuantizedWeight.rounded(weight, to)
        return Linear(quantized.words, zeros, quantized)

    def norm(size: int, there: bool = True) -> Tensor | None:
        return torch.ones(size, device=device) if there else None

    def has_bias(of: RecurrentSpec) -> bool:
        return not isinstance(of, DeltaSpec) and of.bias

    def recurrent(of: RecurrentSpec) -> RecurrentWeights:
        conv = torch.randn(of.num_channels, of.conv_len, device=device, generator=generator) * of.conv_len**-0.5
        inputs = (linear(of.in_width, spec.hidden_size, has_bias(of)),)
        biased = of.bias if isinstance(of, ConvSpec) else isinstance(of, ScanSpec) and of.conv_bias
        conv_bias = torch.zeros(of.num_channels, device=device) if biased else None
        if isinstance(of, ConvSpec):
            return RecurrentWeights(inputs, conv, conv_bias)
        num_heads, width = (of.num_heads, of.out_width) if isinstance(of, ScanSpec) else (of.num_v_heads, of.v_dim)
        of_heads, norm = torch.ones(num_heads, device=device), torch.ones(width, device=device)
        skip = of_heads if isinstance(of, ScanSpec) else None
        return RecurrentWeights(inputs, conv, conv_bias, MemoryWeights(of_heads, of_heads, norm, skip))

    def latent(of: LatentSpec, bias: bool) -> LatentWeights:
        index_norm = None
        if of.indexer is not None:
            index_norm = torch.stack([torch.ones(of.indexer.head_dim), torch.zeros(of.indexer.head_dim)]).to(device)
        num_queries = of.q_width + of.index_q_width
        return LatentWeights(
            inputs=(linear(sum(of.in_widths), spec.hidden_size, bias),),
            queries=() if of.q_rank is None else (linear(num_queries, of.q_rank),),
            up_k=matrix(of.num_heads * of.nope_dim, of.kv_rank).view(of.num_heads, of.nope_dim, of.kv_rank),
            up_v=matrix(of.num_heads * of.v_dim, of.kv_rank).view(of.num_heads, of.v_dim, of.kv_rank),
            q_norm=None if of.q_rank is None else torch.ones(of.q_rank, device=device),
            kv_norm=torch.ones(of.kv_rank, device=device),
            index_norm=index_norm,
        )

    def compressed(of: CompressedSpec) -> CompressedStepWeights:
        angles = torch.logspace(0, -4, of.rope_dim // 2, device=device)

        def rows(dim: int) -> CompressorWeights:
            return CompressorWeights(
                position_bias=torch.zeros(of.ratio, of.series * dim, device=device),
                norm_weight=torch.ones(dim, device=device),
                inv_freq=angles,
            )

        return CompressedStepWeights(
            latents=linear(of.q_rank, spec.hidden_size),
            latent_norm=torch.ones(of.q_rank, device=device),
            queries=(linear(of.q_width + of.index_q_width, of.q_rank),),
            inputs=(linear(sum(of.in_widths), spec.hidden_size),),
            kv_norm=torch.ones(of.head_dim, device=device),
            groups=linear(of.out_width, of.q_width // of.num_groups),
            sinks=torch.zeros(of.num_heads, device=device),
            angles=angles,
            rows=rows(of.head_dim) if of.ratio else None,
            keys=None if of.indexer is None else rows(of.indexer.head_dim),
            eps=spec.norm_eps,
        )

    def mix(joins: bool = False) -> StreamWeights | None:
        if (of := spec.streams) is None:
            return None
        num_out, num_in = of.num if joins else of.num_mixes, of.num * spec.hidden_size
        weight = torch.empty(num_out, num_in, device=device).normal_(std=num_in**-0.5, generator=generator)
        return StreamWeights(weight, torch.zeros(num_out, device=device), torch.ones(1 if joins else 3, device=device))

    def in_few(weight: Tensor, of: Few) -> QuantizedWeight:
        return _in_mxfp4(weight, generator) if of == "mxfp4" else QuantizedWeight.rounded(weight, of)

    def experts(of: ExpertsSpec) -> ExpertWeights:
        sizes = of.num_experts, (1 + of.gated) * of.intermediate_size, spec.hidden_size
        both = matrix(sizes[0] * sizes[1], sizes[2])
        down = matrix(sizes[0] * sizes[2], of.intermediate_size, into_stream)
        quantized = None if few is None else QuantizedExperts(in_few(both, few), in_few(down, few))
        if quantized is not None:
            both, down = quantized.gate_up.words, quantized.down.words
        gates, ups, down = by_expert(both, down, of.num_experts, of.gated)
        zeros = torch.zeros(sizes[:2], dtype=dtype, device=device) if of.bias else None
        gate_bias, up_bias = (None, None) if zeros is None else zeros.chunk(2, dim=1)
        return ExpertWeights(
            router=linear(of.num_experts, spec.hidden_size, of.bias, to=None),
            gates=gates,
            ups=ups,
            down=down,
            scales=torch.ones(of.num_experts, device=device) if of.has_scales else None,
            by_token=torch.randint(
                of.num_experts, (spec.vocab_size, of.num_chosen), dtype=torch.int32, device=device, generator=generator
            )
            if of.by_token
            else None,
            norms=ExpertNorms(*torch.ones(4, spec.hidden_size, device=device)) if of.has_own_norms else None,
            choice_bias=torch.zeros(of.num_experts, device=device) if of.has_choice_bias else None,
            gate_bias=gate_bias,
            up_bias=up_bias,
            down_bias=torch.zeros(sizes[0], sizes[2], dtype=dtype, device=device) if of.bias else None,
            quantized=quantized,
        )

    def layer(of: LayerSpec, heads: HeadsSpec) -> LayerWeights:
        attention, mlp, hidden_size = of.attention, of.mlp, spec.hidden_size
        sizes = {"none": None, "head": (heads.head_dim,) * 2, "projection": (heads.q_width, heads.kv_width)}
        ones = torch.ones(heads.head_dim, device=device) if attention.v_norm else None
        plain = not (of.mlp_only or of.recurrent or of.latent or of.compressed)
        of_heads = sizes[attention.qk_norm] if plain else None
        q_norm, k_norm = (torch.ones(size, device=device) for size in of_heads or (0, 0))
        attended = of.latent.v_width if of.latent else heads.q_width
        out_bias = attention.out_bias
        if of.recurrent is not None:
            attended, out_bias = of.recurrent.out_width, has_bias(of.recurrent)
        if of.compressed is not None:
            attended = of.compressed.out_width
        return LayerWeights(
            input_norm=norm(hidden_size, of.pre_norm),
            qkv=(
                linear(
                    heads.q_width if attention.rows_of is not None else heads.qkv_width, hidden_size, attention.qkv_bias
                ),
            )
            if plain
            else (),
            gates=(linear(heads.q_width, hidden_size, attention.gate_bias),) if attention.gated and plain else (),
            recurrent=None if of.recurrent is None else recurrent(of.recurrent),
            latent=None if of.latent is None else latent(of.latent, attention.qkv_bias),
            compressed=None if of.compressed is None else compressed(of.compressed),
            head_norms=HeadNorms(q_norm, k_norm, ones, attention.norms_after_rope) if of_heads else None,
            sinks=torch.zeros(spec.num_q_heads, device=device) if attention.sinks and plain else None,
            out=None if of.mlp_only else linear(hidden_size, attended, out_bias, into_stream),
            post_attention_norm=norm(hidden_size, of.post_norm),
            pre_mlp_norm=norm(hidden_size, of.pre_norm and of.has_mlp and not (of.parallel or of.mlp_only)),
            gate_up=() if mlp is None else (linear((1 + mlp.gated) * mlp.intermediate_size, hidden_size, mlp.bias),),
            down=None if mlp is None else linear(hidden_size, mlp.intermediate_size, mlp.bias, into_stream),
            experts=tuple(experts(each) for each in of.experts),
            post_mlp_norm=norm(hidden_size, of.post_norm),
            layer_input=LayerInputWeights(
                linear(width, hidden_size),
                linear(hidden_size, width, False, into_stream),
                torch.ones(hidden_size, device=device),
            )
            if (width := spec.layer_input_width)
            else None,
            attention_mix=mix(),
            mlp_mix=mix(),
        )

    def inputs(width: int) -> InputWeights:
        all_widths = spec.num_layers * width
        table, norm = matrix(spec.vocab_size, all_widths, width**0.5), torch.ones(width, device=device)
        return InputWeights(linear(all_widths, spec.hidden_size), spec.hidden_size**-0.5, norm, table, width**0.5)

    def own_layer(layer_idx: int) -> LayerWeights:
        of, heads = spec.layers[layer_idx], spec.heads_of(layer_idx)
        whole = layer(of, heads)
        return whole if share is None else _copied(share_of_layer(whole, heads, of, share))

    def own_head() -> Linear:
        bias = torch.zeros(spec.vocab_size, dtype=dtype, device=device) if spec.head_bias else None
        if few == "int4" and not spec.tied_embedding:
            return linear(spec.vocab_size, spec.hidden_size, spec.head_bias, to=HEAD_ROUNDING["int4"])
        whole = Linear(embedding if spec.tied_embedding else matrix(spec.vocab_size, spec.hidden_size), bias)
        if share is None:
            return whole
        part = share_of_head(whole, share)
        return part if spec.tied_embedding else _joined((part,))[0]

    layers = tuple(map(own_layer, range(spec.num_layers)))
    embedding = matrix(spec.vocab_size, spec.hidden_size, spec.hidden_size**0.5)
    return ModelWeights(
        spec=spec if share is None else share_of_spec(spec, share.num_devices),
        embedding=embedding,
        layers=layers,
        final_norm=torch.ones(spec.hidden_size, device=device),
        head=own_head(),
        inputs=inputs(spec.layer_input_width) if spec.layer_input_width else None,
        ropes=tuple(_frequencies(spec, number, device) for number in range(len(spec.ropes))),
        join=mix(joins=True),
    )


def _copied(part: LayerWeights) -> LayerWeights:
    """Copy a layer's share to its own memory, so that the whole layer can be freed."""
    return replace(
        part,
        qkv=_joined(part.qkv),
        gates=_joined(part.gates),
        gate_up=_joined(part.gate_up),
        experts=tuple(map(_experts_copied, part.experts)),
    )


def _experts_copied(part: ExpertWeights) -> ExpertWeights:
    """Copy an expert layer's share, with gates and ups in one matrix, which steps on a device need."""
    assert part.ups is not None, "experts of models that are split are gated"
    gates, ups = torch.cat([part.gates, part.ups], dim=1).chunk(2, dim=1)
    gate_bias, up_bias = part.gate_bias, part.up_bias
    if gate_bias is not None and up_bias is not None:
        gate_bias, up_bias = torch.cat([gate_bias, up_bias], dim=1).chunk(2, dim=1)
    return replace(part, gates=gates, ups=ups, gate_bias=gate_bias, up_bias=up_bias, down=part.down.contiguous())


def _joined(linears: tuple[Linear, ...]) -> tuple[Linear, ...]:
    """Join linear layers into one, which steps on a device need."""
    if not linears:
        return ()
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return (Linear(torch.cat([linear.weight for linear in linears]), torch.cat(biases) if biases else None),)


def _in_mxfp4(weight: Tensor, generator: torch.Generator) -> QuantizedWeight:
    """Return random MXFP4 weights with the shape of `weight` and about its standard deviation."""
    scale = torch.log2(weight.float().std() / 3).round() + 127
    codes = torch.randint(0, 16, weight.shape, dtype=torch.uint8, device=weight.device, generator=generator)
    scales = scale.to(torch.uint8).expand(len(weight), -(-weight.shape[1] // 32))
    return QuantizedWeight.pack("fp4", codes, scales, 32)


def _frequencies(spec: ModelSpec, number: int, device: torch.device | str) -> Frequencies:
    """Return the frequencies of the RoPE with that number."""
    rope, first = spec.ropes[number], spec.layers[0]
    if rope.parameters is None:
        return Frequencies(torch.empty(0, device=device))
    rotated = [spec.heads_of(i) for i, layer in enumerate(spec.layers) if layer.attention.rope == number]
    parameters = rope.parameters
    if first.compressed is not None:
        head_dim = first.compressed.head_dim
    elif first.latent is not None:  # a factor, if any, is of a whole head
        head_dim, parameters = first.latent.rope_dim, parameters | {"partial_rotary_factor": None}
    else:
        head_dim = rotated[0].head_dim
    angles, scale = rotary_frequencies(parameters, head_dim, spec.max_positions)
    return Frequencies(angles.to(device), scale)


def rotary_frequencies(
    rope_parameters: dict[str, Any],  # as in a transformers config
    head_dim: int,
    max_positions: int,
) -> tuple[Tensor, float]:
    """Return the angle per position of each rotated pair of dimensions, float32, and the factor on cos and sin."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters, rotary_dim = dict(rope_parameters), head_dim
    if parameters.get("rope_type") != "proportional":  # there, unrotated pairs have angle 0
        rotary_dim = int(head_dim * (parameters.pop("partial_rotary_factor", None) or 1.0))
    config = LlamaConfig(
        head_dim=rotary_dim,
        hidden_size=rotary_dim,
        num_attention_heads=1,
        max_position_embeddings=max_positions,
        rope_parameters=parameters,
    )
    return model_frequencies(LlamaRotaryEmbedding(config))
