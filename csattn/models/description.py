"""Reads the `transformers` config of a supported model into a spec."""

from collections.abc import Callable
from math import inf, log
from typing import Any, Literal

from csattn.errors import ModelError
from csattn.models.experts import averages_experts, experts_of, has_experts, mlp_width
from csattn.models.families import FAMILIES, Family, own_field, unsupported
from csattn.models.latent_spec import CompressedSpec, IndexerSpec, LatentSpec
from csattn.models.positions import max_positions, rope_name, rope_parameters, rope_specs, rotates_any, unrotated_rope
from csattn.models.recurrent_spec import ConvSpec, DeltaSpec, RecurrentSpec, ScanSpec
from csattn.models.spec import Activation, AttentionSpec, LayerSpec, MlpSpec, ModelSpec, StreamsSpec
from csattn.reach import Reach

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
}
_ROW_UNIT = 8  # numbers: rows of latents are padded to a multiple, for copies of 16 bytes
_MAX_NORM_MIN = 1e-6  # the largest accepted `moe_norm_min`: sums of shares are hardly ever less


def describe(config: Any) -> ModelSpec:
    """Read a `transformers` config into a `ModelSpec`.

    Raises ModelError for a model that csattn would not reproduce.
    """
    name = getattr(config, "model_type", None)
    if name not in FAMILIES:
        raise unsupported(name)
    family = FAMILIES[name]
    _require_reproduced(config, family)
    layers = tuple(describe_layer(config, layer_idx) for layer_idx in range(config.num_hidden_layers))
    (num_kv_heads, head_dim), local_heads = _heads(config, family)
    query_scale = family.softmax_scale or family.field(config, "query_pre_attn_scalar", head_dim) ** -0.5
    if family.latents:
        width = max(layer.latent.row_width for layer in layers if layer.latent is not None)
        head_dim = -(-width // _ROW_UNIT) * _ROW_UNIT // 2
        query_scale = _latent_scale(config)
    if family.compressed:
        head_dim //= 2
    rms_norm_eps = own_field(config, "rms_norm_eps", None) if family.centred else None
    return ModelSpec(
        layers=layers,
        hidden_size=config.hidden_size,
        num_q_heads=config.num_attention_heads,
        num_kv_heads=1 if family.latents or family.compressed else num_kv_heads,
        head_dim=head_dim,
        softmax_scale=float(family.field(config, "attention_multiplier", query_scale)),
        vocab_size=config.vocab_size,
        max_positions=max_positions(config),
        norm_eps=getattr(config, family.eps_field) if rms_norm_eps is None else rms_norm_eps,
        local_heads=local_heads,
        layer_input_width=own_field(config, "hidden_size_per_layer_input", 0) or 0,
        streams=StreamsSpec(num=config.hc_mult, iterations=config.hc_sinkhorn_iters, eps=config.hc_eps)
        if family.compressed
        else None,
        ropes=rope_specs(config, family),
        centred=family.centred and rms_norm_eps is None,
        embedding_multiplier=config.hidden_size**0.5
        if family.scaled_embedding is True
        else family.embedding_multiplier(config),
        logit_multiplier=family.field(
            config, family.logit_scale_field, 1.0 / family.field(config, "logits_scaling", 1.0)
        ),
        logit_cap=family.field(config, "final_logit_softcapping", None),
        tied_embedding=bool(config.tie_word_embeddings),
        head_bias=family.head_bias is not None and bool(getattr(config, family.head_bias)),
    )


def describe_layer(config: Any, layer_idx: int) -> LayerSpec:
    """Read one layer from the config of a supported family."""
    family = FAMILIES[config.model_type]
    qkv_bias, out_bias, mlp_bias = (
        bool(getattr(config, bias, False)) if isinstance(bias, str) else bias for bias in family.biases
    )
    return LayerSpec(
        attention=AttentionSpec(
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            qk_norm=_qk_norm(config, family, layer_idx),
            norms_after_rope=family.norms_after_rope,
            v_norm=family.v_norm,
            k_is_v=_k_is_v(config, layer_idx),
            rows_of=_rows_of(config, layer_idx),
            rope=_rope_of(config, family, layer_idx),
            reach=_reach(config, family, layer_idx),
            gated=family.gated_attention is not None,
            gate_bias=qkv_bias and family.gated_attention == "with_queries",
            sinks=family.sinks,
            logit_cap=family.field(config, "attn_logit_softcapping", None),
        ),
        mlp=None
        if (width := mlp_width(config, layer_idx)) is None
        else MlpSpec(
            intermediate_size=width, activation=_activation(config, family), gated=family.gated, bias=mlp_bias
        ),
        experts=experts_of(config, layer_idx, _activation(config, family)),
        recurrent=_recurrent(config, family, layer_idx),
        latent=_latent(config, family, layer_idx) if family.latents else None,
        compressed=_compressed(config, layer_idx) if family.compressed else None,
        pre_norm=family.norms[0] is not None,
        post_norm=family.norms[1] is not None,
        residual_multiplier=float(family.field(config, "residual_multiplier", 1.0)),
        mlp_multiplier=0.5 if averages_experts(config, layer_idx) else 1.0,
        parallel=family.parallel,
        mlp_only=layer_type(config, layer_idx) in _MLP_TYPES,
        scaled=family.scaled_layers,
    )


def layer_type(config: Any, layer_idx: int) -> str:
    """Return the layer's type, by its present name in `transformers`."""
    name: str = (getattr(config, "layer_types", None) or {layer_idx: "full_attention"})[layer_idx]
    return _FORMER_TYPES.get(name, name)


def _require_reproduced(config: Any, family: Family) -> None:
    _require_one_or_more(config, "num_hidden_layers")
    layers = range(config.num_hidden_layers)
    types = {layer_type(config, layer_idx) for layer_idx in layers}
    known = _LAYER_TYPES | (set(_COMPRESSED) if family.compressed else set()) | (_MLP_TYPES if family.single else set())
    # in families without this field, transformers' models ignore it, and its caches do not
    has_types = hasattr(type(config), "layer_types") or "layer_types" in type(config).attribute_map
    if not has_types and (types != {"full_attention"} or "" not in rope_parameters(config)):
        raise ModelError(
            f"the config has layers of certain types ({', '.join(sorted(types))} in layer_types), and all layers of "
            f"family {config.model_type!r} are alike; use its published config"
        )
    if unknown := types - known:
        raise ModelError(
            f"some layers of this model are {', '.join(sorted(unknown))}, which csattn does not compute; it has "
            f"{', '.join(sorted(known))}"
        )
    if family.compressed:
        _require_compressed(config)
    if all(_reach(config, family, i) or layer_type(config, i) in _STATEFUL | _MLP_TYPES for i in layers):
        raise ModelError(
            "every layer of this model attends through a sliding window, keeps a state or is an MLP alone, so nothing "
            "of a long context can be read; use a model with full attention in some layers (for Mistral, v0.2 or later)"
        )
    if own_field(config, "hidden_size_per_layer_input", 0) and config.vocab_size_per_layer_input < config.vocab_size:
        raise ModelError(
            "this model's layers have embeddings of only some tokens, and csattn needs them for all tokens"
        )
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):
        raise ModelError(
            "this model attends to later tokens too, which csattn does not; use a model that generates text"
        )
    if family.interleaved_indexer is not None and own_field(config, "indexer_types", ["full"])[0] != "full":
        raise ModelError("this model's first layer reuses the choice of an earlier layer, and there is none")
    if getattr(config, "clip_qkv", None) is not None:
        raise ModelError("this model clips queries, keys and values, which csattn does not; use one that does not")
    if not getattr(config, "use_post_norm", True):
        raise ModelError("this model has no norms after attention and MLP, which csattn expects in its family")
    if config.model_type == "cohere" and config.use_qk_norm:
        raise ModelError(
            "this model normalises each head's queries and keys with separate weights, which csattn does not"
        )
    if config.model_type == "ernie4_5_moe" and not (config.moe_norm_min or 0.0) <= _MAX_NORM_MIN:  # NaN is refused too
        raise ModelError(
            f"this model divides routing weights by at least {config.moe_norm_min} (moe_norm_min), csattn by their "
            f"sum; use a model whose moe_norm_min is at most {_MAX_NORM_MIN:g}"
        )


def _require_one_or_more(config: Any, *names: str) -> None:
    for name in names:
        if (value := getattr(config, name)) < 1:
            raise ModelError(
                f"this model's config has {name} {value}, and csattn needs at least 1; use its published config"
            )


# by layer type, the config field with its reach
_REACHES = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
# types of layers with compressed rows, which use the second kind of RoPE
_COMPRESSED = ("compressed_sparse_attention", "heavily_compressed_attention")
_FORMER_TYPES = {"deepseek_sparse_attention": "indexed_attention"}  # names before `transformers` 5.20
_MLP_TYPES = {"mlp", "moe"}  # types of layers without attention, in families whose layers are `single`
_STATEFUL = {"linear_attention", "conv"}  # types of layers that keep a state of fixed size instead of rows
_LAYER_TYPES = {"full_attention", "indexed_attention", *_STATEFUL, *_REACHES}


def _recurrent(config: Any, family: Family, layer_idx: int) -> RecurrentSpec | None:
    """Return what a layer that keeps a state has in place of attention; None for other layers."""
    if (kind := layer_type(config, layer_idx)) not in _STATEFUL:
        return None
    if family.state is None or (kind == "conv") != (family.state == "conv"):
        raise ModelError(
            f"this model has layers of the type {kind!r}, which csattn computes in other families, but not in "
            f"{config.model_type!r}; use its published config"
        )
    if family.state != "conv":
        activation = own_field(config, "mamba_hidden_act", None) or config.hidden_act
        if activation != "silu":
            raise ModelError(
                f"this model has the activation {activation!r} after the convolution of a layer with a state (linear "
                "attention or a state space), and csattn computes only silu; use a model with silu"
            )
    kinds: dict[str, Callable[[Any], RecurrentSpec]] = {"delta": _delta, "scan": _scan, "conv": _conv}
    spec = kinds[family.state](config)
    if spec.conv_len < 2:
        raise ModelError(
            f"convolutions of this model see {spec.conv_len} token, and csattn's at least two; use its published config"
        )
    return spec


def _scan(config: Any) -> ScanSpec:
    if config.model_type == "nemotron_h":
        return ScanSpec(
            num_heads=config.mamba_num_heads,
            num_groups=config.n_groups,
            head_dim=config.mamba_head_dim,
            state_dim=config.ssm_state_size,
            conv_len=config.conv_kernel,
            bias=bool(config.use_bias),
            conv_bias=bool(config.use_conv_bias),
            least_step=float(config.time_step_min),
        )
    if config.mamba_n_groups != 1:
        raise ModelError(
            f"heads of this model's state spaces are in {config.mamba_n_groups} groups (mamba_n_groups), for which "
            "versions of transformers compute different outputs; use a model with one group"
        )
    if (limits := config.time_step_limit) is None or limits[1] != inf:
        raise ModelError(
            f"this model's state spaces have steps of at most {limits and limits[1]} (time_step_limit), and csattn's "
            "have no limit; use a model with inf"
        )
    return ScanSpec(
        num_heads=config.mamba_n_heads,
        num_groups=1,
        head_dim=config.mamba_d_head,
        state_dim=config.mamba_d_state,
        conv_len=config.mamba_d_conv,
        bias=bool(config.mamba_proj_bias),
        conv_bias=bool(config.mamba_conv_bias),
        least_step=float(limits[0]),
    )


def _conv(config: Any) -> ConvSpec:
    return ConvSpec(num_channels=config.hidden_size, conv_len=config.conv_L_cache, bias=bool(config.conv_bias))


def _delta(config: Any) -> DeltaSpec:
    return DeltaSpec(
        num_k_heads=config.linear_num_key_heads,
        num_v_heads=config.linear_num_value_heads,
        k_dim=config.linear_key_head_dim,
        v_dim=config.linear_value_head_dim,
        conv_len=config.linear_conv_kernel_dim,
    )


def _latent(config: Any, family: Family, layer_idx: int) -> LatentSpec:
    indexer, interleaved = None, family.interleaved_indexer
    if interleaved is not None and own_field(config, "indexer_types", {layer_idx: "full"})[layer_idx] == "full":
        sizes = {"num_heads": config.index_n_heads, "head_dim": config.index_head_dim}
        indexer = IndexerSpec(**sizes, interleaved=interleaved)
    return LatentSpec(
        num_heads=config.num_attention_heads,
        q_rank=config.q_lora_rank,
        kv_rank=config.kv_lora_rank,
        nope_dim=config.qk_nope_head_dim,
        rope_dim=config.qk_rope_head_dim,
        v_dim=config.v_head_dim,
        indexer=indexer,
        top_k=None if interleaved is None else config.index_topk,
    )


def _compressed(config: Any, layer_idx: int) -> CompressedSpec:
    kind = layer_type(config, layer_idx)
    indexed, indexer = kind == _COMPRESSED[0], None
    if indexed:
        indexer = IndexerSpec(num_heads=config.index_n_heads, head_dim=config.index_head_dim, interleaved=True)
    return CompressedSpec(
        num_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        q_rank=config.q_lora_rank,
        rope_dim=config.qk_rope_head_dim,
        window=config.sliding_window,
        num_groups=config.o_groups,
        out_rank=config.o_lora_rank,
        ratio=config.compress_rates.get(kind, 0),
        overlaps=indexed,
        indexer=indexer,
        top_k=config.index_topk if indexed else 0,
    )


def _require_compressed(config: Any) -> None:
    if not set(config.layer_types) & set(_COMPRESSED):
        raise ModelError(
            f"no layer of this model has compressed rows ({' or '.join(_COMPRESSED)} in layer_types), so nothing of a "
            "long context can be read; use a model with some"
        )
    _require_one_or_more(config, "sliding_window", "index_topk", "hc_mult", "hc_sinkhorn_iters")
    if config.head_dim % _ROW_UNIT:
        raise ModelError(
            f"rows of this model have {config.head_dim} numbers (head_dim), and csattn reads multiples of {_ROW_UNIT}; "
            "use a model with such"
        )
    factor = rope_parameters(config)["compress"].get("attention_factor", 1.0)
    if factor != 1.0:
        raise ModelError(
            f"RoPE multiplies this model's rows by {factor} (attention_factor), and csattn by 1; use a model with that"
        )


def _latent_scale(config: Any) -> float:
    """The softmax scale of latent attention: the width of a head's queries ** -0.5, times YaRN's mscale squared."""
    scale: float = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    rope = config.rope_parameters
    if rope.get("rope_type", "default") != "default" and (of_all := rope.get("mscale_all_dim", 0)):
        scale *= (0.1 * of_all * log(max(rope["factor"], 1.0)) + 1.0) ** 2
    return scale


def _reach(config: Any, family: Family, layer_idx: int) -> Reach | None:
    """How far back the layer sees; None: to the first row."""
    if family.compressed:  # its window is in `CompressedSpec`
        return None
    kind = layer_type(config, layer_idx)
    most = max_positions(config)
    window = family.field(config, "sliding_window", None)  # of all layers
    if kind == "full_attention" and window is not None and window < most:
        kind = "sliding_attention"
    if kind not in _REACHES or (num_rows := getattr(config, _REACHES[kind])) is None:
        return None
    _require_one_or_more(config, _REACHES[kind])
    return Reach(num_rows=num_rows, chunked=kind == "chunked_attention")


def _heads(config: Any, family: Family) -> tuple[tuple[int, int], tuple[int, int] | None]:
    """(num_kv_heads, head_dim) of layers that attend to everything, and of local layers; None: the same."""
    if not getattr(config, "is_heterogeneous", False):
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return (getattr(config, "num_key_value_heads", 1), head_dim), None
    found: dict[bool, set[tuple[int, int]]] = {False: set(), True: set()}
    for layer_idx in range(config.num_hidden_layers):
        of_layer, is_local = config.per_layer_config[layer_idx], _reach(config, family, layer_idx) is not None
        found[is_local].add((of_layer.num_key_value_heads, of_layer.head_dim))
    if max(map(len, found.values())) > 1:
        raise ModelError(
            "layers of this model with the same attention span have different heads, which csattn does not compute; "
            "it computes one kind of heads in layers with full attention, and one in the others"
        )
    (heads,), (local,) = found[False], found[True] or found[False]
    return heads, None if local == heads else local


def _rows_of(config: Any, layer_idx: int) -> int | None:
    """The layer whose rows this one shares: the last of its type that has rows; None: it has its own."""
    first = config.num_hidden_layers - own_field(config, "num_kv_shared_layers", 0)
    kind = layer_type(config, layer_idx)
    if layer_idx < first:
        return None
    kv_sources = [i for i in range(first) if layer_type(config, i) == kind]
    if not kv_sources:
        raise ModelError(f"layers of this model share the rows of an earlier {kind} layer, and there is none")
    return kv_sources[-1]


def _k_is_v(config: Any, layer_idx: int) -> bool:
    is_so = own_field(config, "attention_k_eq_v", False) and layer_type(config, layer_idx) == "full_attention"
    return is_so and _rows_of(config, layer_idx) is None


def _rope_of(config: Any, family: Family, layer_idx: int) -> int | None:
    """The index of the layer's RoPE in `ModelSpec.ropes`; None: no RoPE."""
    if family.rotated == "no_rope_layers" and not config.no_rope_layers[layer_idx]:
        return len(rope_parameters(config)) if unrotated_rope(config) else None
    if not rotates_any(config, family):
        return None
    has_window = family.rotated == "local" and config.sliding_window is not None
    if own_field(config, "prefix_dense_sliding_window_pattern", None) == 1 and not has_experts(config, layer_idx):
        has_window = False  # dense layers rotate without one, too
    if has_window and _reach(config, family, layer_idx) is None:
        return None
    if family.compressed:
        return int(layer_type(config, layer_idx) in _COMPRESSED)
    name = rope_name(config, layer_idx, layer_type(config, layer_idx))
    return None if name is None else list(rope_parameters(config)).index(name)


def _qk_norm(config: Any, family: Family, layer_idx: int) -> Literal["none", "head", "projection"]:
    if family.qk_norm not in ("none", "head", "projection"):
        rotates = family.rotated != "no_rope_layers" or config.no_rope_layers[layer_idx]
        return "head" if getattr(config, family.qk_norm) and rotates else "none"
    return family.qk_norm  # type: ignore[return-value]


def _activation(config: Any, family: Family) -> Activation:
    name = "silu" if family.activation_field is None else getattr(config, family.activation_field)
    if name not in _ACTIVATIONS:
        raise ModelError(
            f"this model's MLP has the activation {name!r}, which csattn does not compute; it has "
            f"{', '.join(_ACTIVATIONS)}"
        )
    if not family.limited:
        return _ACTIVATIONS[name]
    if (name, config.swiglu_limit) != ("silu", 10.0):
        raise ModelError(
            f"this model's MLPs have {name!r} of gates limited to {config.swiglu_limit:g} (swiglu_limit), and csattn "
            "computes silu of gates limited to 10 only; use a model with that"
        )
    return "limited"
