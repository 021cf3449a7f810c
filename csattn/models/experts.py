"""Mixture of experts by a `transformers` config: which layers have experts, and how tokens are routed to them."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from csattn.errors import ModelError
from csattn.models.families import FAMILIES, own_field
from csattn.models.spec import Activation, ExpertsSpec


def mlp_width(config: Any, layer_idx: int) -> int | None:
    """Return the width of the MLP that every token passes (dense, or of shared experts); None: no such MLP."""
    is_moe = has_experts(config, layer_idx)
    if config.model_type == "llama4_text":
        return int(config.intermediate_size if is_moe else config.intermediate_size_mlp)
    if config.model_type == "cohere2_moe":
        dense = config.prefix_dense_intermediate_size
        width = config.intermediate_size if dense is None else dense
        return int(config.intermediate_size * config.num_shared_experts if is_moe else width) or None
    if config.model_type == "gemma4_text":
        is_wide = config.use_double_wide_mlp and layer_idx >= config.num_hidden_layers - config.num_kv_shared_layers
        return int(config.intermediate_size * (1 + is_wide))
    if config.model_type == "nemotron_h":
        of_shared = config.moe_shared_expert_intermediate_size or config.intermediate_size  # as in transformers
        widths = {"mlp": config.intermediate_size, "moe": of_shared}
        return widths.get(config.layers_block_type[layer_idx])
    if config.model_type == "hunyuan_v1_moe":
        return int(config.intermediate_size)
    if config.model_type in ("granitemoe_swa", "granitemoehybrid", "granitemoeshared"):
        return int(config.shared_intermediate_size) or None
    if config.model_type == "lfm2":
        return _adjusted_width(config)
    if is_moe and (shared := _ROUTINGS[config.model_type].shared) is not None:
        width = int(config.moe_intermediate_size * getattr(config, shared))
        if config.model_type == "hy_v3":  # in transformers, a width of 0 becomes that of dense layers
            width = width or int(config.intermediate_size)
        return width or None
    return None if is_moe else int(config.intermediate_size)


def _adjusted_width(config: Any) -> int:
    """Return the width of LFM2's MLPs: two thirds of the config's, times a factor, rounded up."""
    width = int(config.intermediate_size)
    if not config.block_auto_adjust_ff_dim:
        return width
    width = int(2 * width / 3)
    if config.block_ffn_dim_multiplier is None:
        return width
    multiple = int(config.block_multiple_of)
    return -(-int(config.block_ffn_dim_multiplier * width) // multiple) * multiple


def experts_of(config: Any, layer_idx: int, activation: Activation) -> tuple[ExpertsSpec, ...]:
    """Return the experts of a layer: the routed ones, then a shared expert with a gate of its own, if any."""
    if not has_experts(config, layer_idx):
        return ()
    _require_computed(config)
    of = _ROUTINGS[config.model_type]
    if config.model_type == "cohere2_moe" and config.expert_selection_fn == "softmax":
        of = replace(of, scores="softmax_of_chosen", normed=False)
    num_chosen = getattr(config, "num_experts_per_tok", None) or config.top_k_experts
    by_token = config.model_type == "deepseek_v4" and config.mlp_layer_types[layer_idx] == "hash_moe"
    routed = ExpertsSpec(
        num_experts=_num_experts(config),
        num_chosen=num_chosen if isinstance(num_chosen, int) else num_chosen[layer_idx],
        intermediate_size=own_field(config, "moe_intermediate_size", None) or config.intermediate_size,
        scores=of.scores,
        gated=FAMILIES[config.model_type].gated,
        has_choice_bias=_value(config, of.has_choice_bias) and not by_token,
        groups=(config.n_group, config.topk_group) if of.grouped else (1, 1),
        normed=_value(config, of.normed),
        scale=1.0 if of.scale is None else float(getattr(config, of.scale)),
        by_token=by_token,
        **{"activation": activation} | of.others,
    )
    _require_groups(routed)
    if not of.has_gated_shared:
        return (routed,)
    width = config.shared_expert_intermediate_size
    one = {"num_experts": 1, "num_chosen": 1, "intermediate_size": width, "activation": activation}
    return routed, ExpertsSpec(**one, gated=routed.gated, scores="sigmoid")


def _value(config: Any, of: bool | str) -> bool:
    return bool(getattr(config, of)) if isinstance(of, str) else of


def _require_computed(config: Any) -> None:
    if own_field(config, "moe_latent_size", None) is not None:
        raise ModelError(
            "experts of this model read a projection of the layer's input (moe_latent_size), which csattn does not "
            "compute; use a model without it"
        )
    # older transformers lack these fields
    clamps = getattr(config, "swiglu_alpha", 1.702), getattr(config, "swiglu_limit", 7.0)
    if config.model_type == "gpt_oss" and clamps != (1.702, 7.0):
        raise ModelError("this model's experts are clamped in a way that csattn does not compute")
    if config.model_type == "deepseek_v4" and config.n_shared_experts != 1:
        raise ModelError(
            f"this model has {config.n_shared_experts} shared experts (n_shared_experts), and csattn computes "
            "only one; use a model that has one"
        )
    if config.model_type == "deepseek_v4" and (config.scoring_func != "sqrtsoftplus" or not config.norm_topk_prob):
        raise ModelError(
            f"this model routes tokens to experts in another way (scoring_func {config.scoring_func!r}, "
            f"norm_topk_prob {config.norm_topk_prob}) than csattn, which uses 'sqrtsoftplus' and normalises "
            "the weights; use a model with these"
        )


def _require_groups(of: ExpertsSpec) -> None:
    num_groups, num_kept = of.groups
    size = of.num_experts // max(1, num_groups)
    is_whole = num_groups == 1 or (num_groups > 1 and size > 1 and size * num_groups == of.num_experts)
    if not is_whole or not 1 <= num_kept <= num_groups or size * num_kept < of.num_chosen:
        raise ModelError(
            f"this model chooses {of.num_chosen} of {of.num_experts} experts, of {num_kept} of {num_groups} groups "
            "(n_group, topk_group), which is impossible; groups must be of equal size, have at least two experts, "
            "and hold at least as many as are chosen"
        )


def averages_experts(config: Any, layer_idx: int) -> bool:
    """Whether a layer adds half of what its MLP and its experts give together."""
    if config.model_type != "cohere2_moe" or not has_experts(config, layer_idx) or not config.num_shared_experts:
        return False
    return bool(config.shared_expert_combination_strategy == "average")


def has_experts(config: Any, layer_idx: int) -> bool:
    """Whether the layer has experts."""
    return config.model_type in _ROUTINGS and _ROUTINGS[config.model_type].in_layer(config, layer_idx)


def _num_experts(config: Any) -> int:
    return getattr(config, "num_local_experts", None) or config.num_experts  # type: ignore[no-any-return]


def _in_all(config: Any, layer_idx: int) -> bool:
    return True


def _in_every_nth(config: Any, layer_idx: int) -> bool:
    is_sparse = layer_idx not in config.mlp_only_layers and (layer_idx + 1) % config.decoder_sparse_step == 0
    return is_sparse and _num_experts(config) > 0


def _in_sparse(config: Any, layer_idx: int) -> bool:
    return bool(config.mlp_layer_types[layer_idx] == "sparse")


def _after_dense(config: Any, layer_idx: int) -> bool:
    return bool(layer_idx >= config.first_k_dense_replace)


def _after_num_dense(config: Any, layer_idx: int) -> bool:
    return bool(layer_idx >= config.num_dense_layers)


def _in_interval(config: Any, layer_idx: int) -> bool:
    is_within = config.moe_layer_start_index <= layer_idx <= config.moe_layer_end_index
    return bool(is_within and (layer_idx + 1) % config.moe_layer_interval == 0)


@dataclass(frozen=True, slots=True)
class _Routing:
    """How a family's layers route tokens to experts. Names are those of config fields with the values."""

    scores: Literal["softmax", "sigmoid", "softmax_of_chosen", "root_softplus"]  # this and others: as in `ExpertsSpec`
    in_layer: Callable[[Any, int], bool]  # whether a layer has experts
    has_choice_bias: bool | str = False
    grouped: bool = False  # experts are in groups
    normed: bool | str = False
    scale: str | None = None
    shared: str | None = None  # the number of shared experts, which together are one MLP
    has_gated_shared: bool = False  # a shared expert has a gate of its own
    others: dict[str, Any] = field(default_factory=dict)  # other fields of `ExpertsSpec`


# DeepSeek-V3's routing: sigmoid scores with a bias for the choice, limited to the best groups
_DEEPSEEK = _Routing(
    "sigmoid", _after_dense, True, True, "norm_topk_prob", "routed_scaling_factor", shared="n_shared_experts"
)
_QWEN2 = _Routing("softmax", _in_every_nth, normed="norm_topk_prob", has_gated_shared=True)
_GRANITE = _Routing("softmax_of_chosen", _in_all)
_ROUTINGS = {
    "afmoe": _Routing("sigmoid", _after_num_dense, True, normed=True, scale="route_scale", shared="num_shared_experts"),
    "cohere2_moe": _Routing("sigmoid", _in_sparse, normed="norm_topk_prob"),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": replace(_DEEPSEEK, in_layer=_in_sparse),
    "deepseek_v4": _Routing(
        "root_softplus", _in_all, True, normed=True, scale="routed_scaling_factor", shared="n_shared_experts"
    ),
    "dots1": _DEEPSEEK,
    "ernie4_5_moe": _Routing("softmax", _in_interval, True, normed=True, shared="moe_num_shared_experts"),
    "exaone_moe": replace(_DEEPSEEK, in_layer=_in_sparse, shared="num_shared_experts"),
    "flex_olmo": _Routing("softmax", _in_all, normed="norm_topk_prob"),
    "gemma4_text": _Routing(
        "softmax",
        lambda config, layer_idx: bool(config.enable_moe_block),
        normed=True,
        others={"has_scales": True, "has_own_norms": True},
    ),
    "glm4_moe": _DEEPSEEK,
    "glm4_moe_lite": replace(_DEEPSEEK, in_layer=_in_sparse),
    "glm_moe_dsa": replace(_DEEPSEEK, in_layer=_in_sparse),
    "gpt_oss": _Routing("softmax_of_chosen", _in_all, others={"activation": "clamped", "bias": True}),
    "granitemoe": _GRANITE,
    "granitemoehybrid": replace(_GRANITE, in_layer=lambda config, layer_idx: bool(config.num_local_experts)),
    "granitemoe_swa": _GRANITE,
    "granitemoeshared": _GRANITE,
    "hunyuan_v1_moe": _Routing("softmax", _in_all, normed=True),
    "hy_v3": _Routing(
        "sigmoid", _in_sparse, True, normed=True, scale="router_scaling_factor", shared="num_shared_experts"
    ),
    "lfm2_moe": _Routing(
        "sigmoid", _after_num_dense, "use_expert_bias", normed="norm_topk_prob", scale="routed_scaling_factor"
    ),
    "llama4_text": _Routing(
        "sigmoid", lambda config, layer_idx: layer_idx in config.moe_layers, others={"on_input": True}
    ),
    "mellum": _Routing("softmax", _in_sparse, normed="norm_topk_prob"),
    "minimax_m2": _Routing("sigmoid", _in_all, True, normed=True),
    "mistral4": replace(_DEEPSEEK, scores="softmax", has_choice_bias=False),
    "mixtral": _Routing("softmax", _in_all, normed=True),
    "nemotron_h": replace(
        _DEEPSEEK, in_layer=lambda config, layer_idx: bool(config.layers_block_type[layer_idx] == "moe")
    ),
    "olmoe": _Routing("softmax", _in_all, normed="norm_topk_prob"),
    "qwen2_moe": _QWEN2,
    "qwen3_5_moe_text": replace(_QWEN2, in_layer=_in_all, normed=True),
    "qwen3_moe": replace(_QWEN2, has_gated_shared=False),  # Qwen3-Coder's configs have its width, 0, and no such expert
    "qwen3_next": _QWEN2,
    "sarvam_moe": _DEEPSEEK,
    "solar_open": replace(_DEEPSEEK, in_layer=_in_all),
}
