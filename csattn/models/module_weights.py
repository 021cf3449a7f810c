"""Finds the weights of a decode step in the modules of a loaded model.

They are views of the model's own tensors. Only norms, small vectors, tables of tokens' experts (hash routing) and the
quantized matrices of a shared expert are copied.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from csattn.errors import ModelError
from csattn.lightning import CompressedWeights
from csattn.models.description import describe
from csattn.models.families import CHOICE_BIAS, EXPERTS_OF_TOKENS, FAMILIES, LAYER_SCALE, Family
from csattn.models.latent_spec import LatentSpec
from csattn.models.positions import rope_parameters
from csattn.models.quantized_weight import QuantizedExperts
from csattn.models.recurrent_spec import ConvSpec, RecurrentSpec, ScanSpec
from csattn.models.rope import model_frequencies, rotary_of
from csattn.models.spec import AttentionSpec, ExpertsSpec, HeadsSpec, ModelSpec
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
)


def weights_of(model: Any) -> ModelWeights:
    """Return the weights of a transformers causal language model. Raises ModelError for an unsupported family."""
    spec, family, body = describe(model.config), FAMILIES[model.config.model_type], model.model
    return ModelWeights(
        spec=spec,
        embedding=family.part(body, "embed_tokens").weight.detach(),
        layers=tuple(
            layer_weights(layer, i, spec, family, getattr(body, "rotary_emb", None))
            for i, layer in enumerate(body.layers)
        ),
        final_norm=_norm(family.part(body, "norm"), family),
        head=_linear(model.lm_head),
        ropes=(
            *(_frequencies(body, name) for name in (rope_parameters(model.config) if spec.ropes else ())),
            *(Frequencies(torch.empty(0, device=model.device)) for rope in spec.ropes if rope.parameters is None),
        ),
        inputs=_inputs(body, family) if spec.layer_input_width else None,
        join=None if spec.streams is None else stream_weights(body.hc_head, "hc_"),
    )


def _frequencies(body: Any, layer_type: str) -> Frequencies:
    angles, scale = model_frequencies(rotary_of(body, layer_type), layer_type)
    # norms of heads after RoPE cancel RoPE's factor; a step norms them before (Llama 4's have no weights)
    drops_scale = FAMILIES[body.config.model_type].norms_after_rope
    drops_scale |= any(hasattr(getattr(layer, "self_attn", None), "qk_norm") for layer in body.layers)
    return Frequencies(angles, 1.0 if drops_scale else scale)


def _inputs(body: Any, family: Family) -> InputWeights:
    return InputWeights(
        projection=_linear(body.per_layer_model_projection),
        scale=body.per_layer_model_projection_scale,
        norm=_norm(body.per_layer_projection_norm, family),
        table=body.embed_tokens_per_layer.weight.detach(),
        table_scale=float(body.embed_tokens_per_layer.scalar_embed_scale),
    )


def layer_weights(layer: Any, layer_idx: int, spec: ModelSpec, family: Family, rotary: Any) -> LayerWeights:
    """Return the weights of a decoder layer of transformers. rotary: the model's `rotary_emb`, if it has one."""
    of_layer, mlp = spec.layers[layer_idx], getattr(layer, family.mlp)
    attention = None if of_layer.recurrent or of_layer.mlp_only else family.part(layer, "self_attn")
    state = family.part(layer, "linear_attn")
    heads, block = spec.heads_of(layer_idx), mlp
    if family.experts_at is not None:
        block = getattr(layer, family.experts_at) if family.experts_at else layer
    elif of_layer.experts:  # beside them a shared expert may serve all tokens
        mlp = getattr(block, "shared_expert", None) or family.part(block, "shared_experts")
    norms = [None if name is None else _norm(getattr(layer, name), family) for name in family.norms]
    head_norms = None
    if attention is not None and hasattr(attention, "qk_norm"):  # without weights
        ones = attention.q_proj.weight.new_ones(heads.head_dim, dtype=torch.float32)
        head_norms = HeadNorms(ones, ones)
    elif attention is not None and of_layer.attention.qk_norm != "none":
        of_k = of_q = _norm(family.part(attention, "q_norm"), family)
        if of_layer.attention.rows_of is None:  # else it is never read
            of_k = _norm(family.part(attention, "k_norm"), family)
        of_v = of_k.new_ones(heads.head_dim) if of_layer.attention.v_norm else None
        head_norms = HeadNorms(of_q, of_k, of_v, family.norms_after_rope)
    return LayerWeights(
        input_norm=norms[0],
        qkv=() if of_layer.latent or of_layer.compressed else _qkv(attention, of_layer.attention, heads, family),
        gates=_gates(attention, heads, family),
        recurrent=None if of_layer.recurrent is None else _recurrent(state, of_layer.recurrent),
        latent=None if of_layer.latent is None else latent_weights(attention, of_layer.latent),
        compressed=None if of_layer.compressed is None else _compressed(attention, rotary),
        head_norms=head_norms,
        sinks=None if of_layer.compressed or (sinks := _or_none(attention, "sinks")) is None else sinks.float(),
        out=None if of_layer.mlp_only else _linear(_out_of(layer, attention, family)),
        post_attention_norm=norms[1],
        pre_mlp_norm=norms[2],
        gate_up=()
        if of_layer.mlp is None
        else _parts(mlp, family, "gate_up_proj", ("gate_proj", "up_proj") if family.gated else ("up_proj",)),
        down=None if of_layer.mlp is None else _linear(family.part(mlp, "down_proj")),
        experts=tuple(
            _shared(block) if number else _routed(block, experts, family, spec.vocab_size)
            for number, experts in enumerate(of_layer.experts)
        ),
        post_mlp_norm=norms[3],
        scale=float(getattr(layer, LAYER_SCALE)) if of_layer.scaled else 1.0,
        layer_input=LayerInputWeights(
            gate=_linear(layer.per_layer_input_gate),
            projection=_linear(layer.per_layer_projection),
            norm=_norm(layer.post_per_layer_input_norm, family),
        )
        if spec.layer_input_width
        else None,
        attention_mix=None if spec.streams is None else stream_weights(layer.attn_hc),
        mlp_mix=None if spec.streams is None else stream_weights(layer.ffn_hc),
    )


def stream_weights(module: Any, prefix: str = "") -> StreamWeights:
    """Return the stream weights that a module has as fn, base and scale. prefix: of these names."""
    return StreamWeights(*(getattr(module, prefix + name).detach().float() for name in ("fn", "base", "scale")))


def _qkv(attention: Any, of: AttentionSpec, heads: HeadsSpec, family: Family) -> tuple[Linear, ...]:
    if attention is None:
        return ()
    if of.rows_of is not None:
        return (_linear(attention.q_proj),)
    if of.k_is_v:
        return _linear(attention.q_proj), _linear(attention.k_proj), _linear(attention.k_proj)
    if family.gated_attention == "with_queries":
        return (*_of_heads(attention.q_proj, heads, 0), _linear(attention.k_proj), _linear(attention.v_proj))
    widths = [heads.q_width, *2 * [heads.kv_width]]
    return _parts(attention, family, "qkv_proj", ("q_proj", "k_proj", "v_proj"), widths)


def _gates(attention: Any, heads: HeadsSpec, family: Family) -> tuple[Linear, ...]:
    if attention is None or family.gated_attention is None:
        return ()
    alone = family.gated_attention == "alone"
    return (_linear(attention.gate_proj),) if alone else _of_heads(attention.q_proj, heads, 1)


def _of_heads(module: Any, heads: HeadsSpec, second: int) -> tuple[Linear, ...]:
    """The first half of every head's outputs in a projection (second = 0), or the second half (second = 1)."""
    number, size = heads.num_q_heads, heads.head_dim
    return _by_head(_linear(module), number, (size, size))[second * number :][:number]


def _recurrent(module: Any, spec: RecurrentSpec) -> RecurrentWeights:
    conv = module.conv if isinstance(spec, ConvSpec) else module.conv1d
    return RecurrentWeights(
        inputs=_recurrent_inputs(module, spec),
        conv=conv.weight.detach().squeeze(1).float().contiguous(),
        conv_bias=None if conv.bias is None else conv.bias.detach().float().clone(),
        memory=None
        if isinstance(spec, ConvSpec)
        else MemoryWeights(
            decay=module.A_log.detach().float().exp(),
            step_bias=module.dt_bias.detach().float().clone(),
            norm=module.norm.weight.detach().float().clone(),
            skip=module.D.detach().float().clone() if isinstance(spec, ScanSpec) else None,
        ),
    )


def _recurrent_inputs(module: Any, spec: RecurrentSpec) -> tuple[Linear, ...]:
    if isinstance(spec, ConvSpec):  # stored: gates before, gates after, channels
        before, after, channels = _split(_linear(module.in_proj), 3 * [spec.num_channels])
        return channels, before, after
    if isinstance(spec, ScanSpec):  # stored: gates, channels, steps
        widths = spec.out_width, spec.num_channels, spec.num_heads
        gates, channels, steps = _split(_linear(module.in_proj), widths)
        return channels, gates, steps
    if hasattr(module, "in_proj_qkvz"):  # stored interleaved: each key head's queries, keys, values and gates
        of_k, of_v = spec.k_dim, spec.out_width // spec.num_k_heads
        each = spec.num_v_heads // spec.num_k_heads
        many = _by_head(_linear(module.in_proj_qkvz), spec.num_k_heads, (of_k, of_k, of_v, of_v))
        return (*many, *_by_head(_linear(module.in_proj_ba), spec.num_k_heads, (each, each)))
    return tuple(_linear(getattr(module, f"in_proj_{name}")) for name in ("qkv", "z", "b", "a"))


def latent_weights(module: Any, spec: LatentSpec) -> LatentWeights:
    """Return the weights of a layer's latent attention. module: its attention module in transformers."""
    indexer = module.indexer if spec.indexer is not None else None
    names = ["q_proj" if spec.q_rank is None else "q_a_proj", "kv_a_proj_with_mqa"]
    inputs = [getattr(module, name) for name in names] + ([indexer.wk, indexer.weights_proj] if indexer else [])
    queries = ([module.q_b_proj] if spec.q_rank is not None else []) + ([indexer.wq_b] if indexer else [])
    up = module.kv_b_proj.weight.detach().view(spec.num_heads, spec.nope_dim + spec.v_dim, spec.kv_rank)
    norm = None if indexer is None else torch.stack([indexer.k_norm.weight, indexer.k_norm.bias]).detach().float()
    return LatentWeights(
        inputs=tuple(map(_linear, inputs)),
        q_norm=None if spec.q_rank is None else module.q_a_layernorm.weight.detach().float(),
        kv_norm=module.kv_a_layernorm.weight.detach().float(),
        queries=tuple(map(_linear, queries)),
        up_k=up[:, : spec.nope_dim],
        up_v=up[:, spec.nope_dim :],
        index_norm=norm,
    )


def _compressed(module: Any, rotary: Any) -> CompressedStepWeights:
    """module: the layer's attention module in transformers; rotary: the model's `rotary_emb`."""
    whole, indexer = CompressedWeights.of(module, rotary), getattr(module.compressor, "indexer", None)
    parts = [module, *(x for x in (module.compressor, indexer) if x is not None)]
    projections = [x for part in parts[1:] for x in (part.kv_proj, part.gate_proj)]
    inputs = [module.kv_proj, *projections, *([indexer.scorer.weights_proj] if indexer is not None else [])]
    queries = [module.q_b_proj, *([indexer.q_b_proj] if indexer is not None else [])]
    return CompressedStepWeights(
        latents=_linear(module.q_a_proj),
        latent_norm=whole.q_norm,
        queries=tuple(map(_linear, queries)),
        inputs=tuple(map(_linear, inputs)),
        kv_norm=whole.kv_norm,
        groups=_linear(module.o_a_proj),
        sinks=whole.sinks,
        angles=whole.inv_freq,
        rows=None if whole.rows is None else whole.rows.compressor,
        keys=None if whole.indexer is None else whole.indexer.keys.compressor,
        eps=whole.norm_eps,
    )


def _out_of(layer: Any, attention: Any, family: Family) -> Any:
    if attention is None:
        return family.part(layer, "linear_attn").out_proj
    return family.part(attention, "o_proj") or attention.o_b_proj


def _by_head(whole: Linear, num_heads: int, widths: tuple[int, ...]) -> tuple[Linear, ...]:
    """Split outputs that are stored head by head, each head in parts of these widths.

    Return the first parts of all heads, then the second ones, and so on.
    """
    parts, start = [], 0
    for width in widths:
        firsts = [head * sum(widths) + start for head in range(num_heads)]
        parts += [whole.outputs(first, first + width) for first in firsts]
        start += width
    return tuple(parts)


def _routed(block: Any, spec: ExpertsSpec, family: Family, vocab_size: int) -> ExpertWeights:
    router, experts = block.get_submodule(family.router), block.experts
    scales, norms = getattr(router, "per_expert_scale", None), None
    if spec.has_own_norms:
        names = (f"{name}_layernorm_{number}" for name, number in _EXPERT_NORMS)
        of_router = router.scale.detach().float() * router.scalar_root_size
        norms = ExpertNorms(of_router, *(_norm(getattr(block, name), family) for name in names))
        router = router.proj
    of_choice = router, block, getattr(router, "moe_statics", None)
    bias = next((of for x in of_choice if (of := family.part(x, CHOICE_BIAS)) is not None), None)
    quantized = getattr(experts, "quantized", None)
    rows: Callable[[Any], Tensor] = torch.Tensor.detach
    if family.inputs_first:
        rows = _rows_first if quantized is None else _with_rows
    gates_ups = rows(experts.gate_up_proj if spec.gated else experts.up_proj)
    biases = _or_none(experts, "gate_up_proj_bias")
    alternate = spec.activation == "clamped"
    middle = spec.intermediate_size
    gates, ups = (slice(0, None, 2), slice(1, None, 2)) if alternate else (slice(0, middle), slice(middle, None))
    return ExpertWeights(
        router=Linear(router.weight.detach(), _or_none(router, "bias")),
        choice_bias=None if bias is None else bias.detach().float().flatten(),
        gates=gates_ups[:, gates],
        ups=gates_ups[:, ups] if spec.gated else None,
        gate_bias=None if biases is None else biases[:, gates],
        up_bias=None if biases is None else biases[:, ups],
        down=rows(experts.down_proj),
        down_bias=_or_none(experts, "down_proj_bias"),
        scales=None if scales is None else scales.detach().float(),
        by_token=_experts_of_tokens(router, spec, vocab_size) if spec.by_token else None,
        norms=norms,
        quantized=quantized,
    )


def _experts_of_tokens(router: Any, spec: ExpertsSpec, vocab_size: int) -> Tensor:
    table: Tensor = getattr(router, EXPERTS_OF_TOKENS).detach()
    if table.shape != (vocab_size, spec.num_chosen) or not 0 <= int(table.min()) <= int(table.max()) < spec.num_experts:
        raise ModelError(
            f"a layer's table of tokens' experts is {list(table.shape)} ids of {table.min()} to {table.max()}, and "
            f"{vocab_size} tokens have {spec.num_chosen} of {spec.num_experts} experts each; load the model as it was "
            "published"
        )
    return table.int().contiguous()


_EXPERT_NORMS = ("pre_feedforward", 2), ("post_feedforward", 2), ("post_feedforward", 1)  # as `ExpertNorms` has them


def _shared(block: Any) -> ExpertWeights:
    """Return a shared expert: every token has it, with a share from a gate of its own."""
    mlp = block.shared_expert
    linears = [_linear(module) for module in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
    gates, ups, down = (linear.weight[None] for linear in linears)
    matrices = [linear.quantized for linear in linears if linear.quantized is not None]
    quantized = QuantizedExperts.of(matrices[:2], matrices[2:]) if len(matrices) == len(linears) else None
    return ExpertWeights(router=_linear(block.shared_expert_gate), gates=gates, ups=ups, down=down, quantized=quantized)


def _rows_first(weight: torch.nn.Parameter) -> Tensor:
    """Return weights [num_experts, num_in, num_out] as a view with a contiguous row for each output.

    The parameter keeps its shape and values; its memory is transposed if necessary.
    """
    if not weight.data.mT.is_contiguous():
        weight.data = weight.data.mT.contiguous().mT
    return _with_rows(weight)


def _with_rows(weight: torch.nn.Parameter) -> Tensor:
    return weight.detach().mT


def _or_none(module: Any, name: str) -> Tensor | None:
    parameter = getattr(module, name, None)
    return None if parameter is None else parameter.detach()


def _parts(
    module: Any, family: Family, fused: str, names: tuple[str, ...], widths: list[int] | None = None
) -> tuple[Linear, ...]:
    """Return projections of the same input, which some families fuse into one. widths: of the parts; default: equal."""
    if (joined := family.part(module, fused)) is None:
        return tuple(_linear(family.part(module, name)) for name in names)
    whole = _linear(joined)
    return _split(whole, widths or len(names) * [len(whole.weight) // len(names)])


def _split(whole: Linear, widths: Sequence[int]) -> tuple[Linear, ...]:
    ends = accumulate(widths)
    return tuple(whole.outputs(end - width, end) for end, width in zip(ends, widths, strict=True))


def _linear(module: Any) -> Linear:
    bias = None if module.bias is None else module.bias.detach()
    return Linear(module.weight.detach(), bias, getattr(module, "quantized", None))


def _norm(module: Any, family: Family) -> Tensor:
    """Return the factor of a norm, float32."""
    weight: Tensor = module.weight.detach().float()
    return 1 + weight if family.offset_norms else weight.clone()
