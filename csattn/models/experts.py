"""Mixture of experts by a `transformers` config: which layers have experts, and how tokens are routed to them."""

from collections.abc import Callable
from typing import Any

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
    if config.model_type in _SHARED and is_moe:
        width = int(config.moe_intermediate_size * getattr(config, _SHARED[config.model_type]))
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
    width = own_field(config, "moe_intermediate_size", None) or config.intermediate_size
    routed: dict[str, Any] = {
        "num_experts": getattr(config, "num_local_experts", None) or config.num_experts,
        "num_chosen": getattr(config, "num_experts_per_tok", None) or config.top_k_experts,
        "intermediate_size": width,
        "activation": activation,
        "gated": FAMILIES[config.model_type].gated,
    }
    if own_field(config, "moe_latent_size", None) is not None:
        raise ModelError(
            "experts of this model read a projection of the layer's input (moe_latent_size), which csattn does not "
            "compute; use a model without it"
        )
    match config.model_type:
        case name if name in _LIKE_DEEPSEEK or name == "mistral4":
            groups = (config.n_group, config.topk_group)
            _require_groups(groups, routed["num_experts"], routed["num_chosen"])
            shares = {"normed": config.norm_topk_prob, "scale": float(config.routed_scaling_factor)}
            if name == "mistral4":
                return (ExpertsSpec(**routed, scores="softmax", groups=groups, **shares),)
            return (ExpertsSpec(**routed, scores="sigmoid", has_choice_bias=True, groups=groups, **shares),)
        case "deepseek_v4":
            if config.n_shared_experts != 1:
                raise ModelError(
                    f"this model has {config.n_shared_experts} shared experts (n_shared_experts), and csattn computes "
                    "only one; use a model that has one"
                )
            if config.scoring_func != "sqrtsoftplus" or not config.norm_topk_prob:
                raise ModelError(
                    f"this model routes tokens to experts in another way (scoring_func {config.scoring_func!r}, "
                    f"norm_topk_prob {config.norm_topk_prob}) than csattn, which uses 'sqrtsoftplus' and normalises "
                    "the weights; use a model with these"
                )
            by_token = config.mlp_layer_types[layer_idx] == "hash_moe"
            chosen = {"has_choice_bias": not by_token, "by_token": by_token}
            shares = {"normed": True, "scale": float(config.routed_scaling_factor)}
            return (ExpertsSpec(**routed, scores="root_softplus", **chosen, **shares),)
        case "hy_v3":
            shares = {"normed": True, "scale": float(config.router_scaling_factor)}
            return (ExpertsSpec(**routed, scores="sigmoid", has_choice_bias=True, **shares),)
        case "ernie4_5_moe":
            return (ExpertsSpec(**routed, scores="softmax", has_choice_bias=True, normed=True),)
        case "minimax_m2":
            return (ExpertsSpec(**routed, scores="sigmoid", has_choice_bias=True, normed=True),)
        case "cohere2_moe":
            if config.expert_selection_fn == "softmax":
                return (ExpertsSpec(**routed, scores="softmax_of_chosen"),)
            return (ExpertsSpec(**routed, scores="sigmoid", normed=bool(config.norm_topk_prob)),)
        case "afmoe":
            shares = {"normed": True, "scale": float(config.route_scale)}
            return (ExpertsSpec(**routed, scores="sigmoid", has_choice_bias=True, **shares),)
        case "gemma4_text":
            return (ExpertsSpec(**routed, scores="softmax", normed=True, has_scales=True, has_own_norms=True),)
        case "gpt_oss":
            # older transformers lack these fields
            if (getattr(config, "swiglu_alpha", 1.702), getattr(config, "swiglu_limit", 7.0)) != (1.702, 7.0):
                raise ModelError("this model's experts are clamped in a way that csattn does not compute")
            return (ExpertsSpec(**routed | {"activation": "clamped"}, scores="softmax_of_chosen", bias=True),)
        case "granitemoe" | "granitemoe_swa" | "granitemoehybrid" | "granitemoeshared":
            return (ExpertsSpec(**routed, scores="softmax_of_chosen"),)
        case "lfm2_moe":
            chosen = {"has_choice_bias": bool(config.use_expert_bias), "normed": bool(config.norm_topk_prob)}
            return (ExpertsSpec(**routed, scores="sigmoid", **chosen, scale=float(config.routed_scaling_factor)),)
        case "llama4_text":
            return (ExpertsSpec(**routed, scores="sigmoid", on_input=True),)
        case "hunyuan_v1_moe":
            if not isinstance(chosen := config.moe_topk, int):
                routed["num_chosen"] = chosen[layer_idx]
            return (ExpertsSpec(**routed, scores="softmax", normed=True),)
        case "mixtral":
            return (ExpertsSpec(**routed, scores="softmax", normed=True),)
    every: tuple[ExpertsSpec, ...] = ()
    if config.model_type in _GATED_SHARED:
        one = {"num_experts": 1, "num_chosen": 1, "intermediate_size": config.shared_expert_intermediate_size}
        every = (ExpertsSpec(**routed | one, scores="sigmoid"),)
    normed = config.model_type == "qwen3_5_moe_text" or config.norm_topk_prob
    return (ExpertsSpec(**routed, scores="softmax", normed=normed), *every)


def averages_experts(config: Any, layer_idx: int) -> bool:
    """Whether a layer adds half of what its MLP and its experts give together."""
    if config.model_type != "cohere2_moe" or not has_experts(config, layer_idx) or not config.num_shared_experts:
        return False
    return bool(config.shared_expert_combination_strategy == "average")


def _require_groups(groups: tuple[int, int], num_experts: int, num_chosen: int) -> None:
    num_groups, num_kept = groups
    size = num_experts // max(1, num_groups)
    is_whole = num_groups == 1 or (num_groups > 1 and size > 1 and size * num_groups == num_experts)
    if not is_whole or not 1 <= num_kept <= num_groups or size * num_kept < num_chosen:
        raise ModelError(
            f"this model chooses {num_chosen} of {num_experts} experts, of {num_kept} of {num_groups} groups "
            "(n_group, topk_group), which is impossible; groups must be of equal size, have at least two experts, "
            "and hold at least as many as are chosen"
        )


def has_experts(config: Any, layer_idx: int) -> bool:
    """Whether the layer has experts."""
    return config.model_type in _HAVE_EXPERTS and _HAVE_EXPERTS[config.model_type](config, layer_idx)


def _every_nth_layer(config: Any, layer_idx: int) -> bool:
    is_sparse = layer_idx not in config.mlp_only_layers and (layer_idx + 1) % config.decoder_sparse_step == 0
    return is_sparse and (getattr(config, "num_local_experts", None) or config.num_experts) > 0


def _in_sparse_layers(config: Any, layer_idx: int) -> bool:
    return bool(config.mlp_layer_types[layer_idx] == "sparse")


def _after_dense_layers(config: Any, layer_idx: int) -> bool:
    return bool(layer_idx >= config.first_k_dense_replace)


def _in_interval(config: Any, layer_idx: int) -> bool:
    is_within = config.moe_layer_start_index <= layer_idx <= config.moe_layer_end_index
    return bool(is_within and (layer_idx + 1) % config.moe_layer_interval == 0)


# families with DeepSeek-V3's routing: sigmoid scores with a bias for the choice, limited to the best groups
_LIKE_DEEPSEEK = (
    *("deepseek_v3", "deepseek_v32", "dots1", "exaone_moe"),
    *("glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "nemotron_h", "sarvam_moe", "solar_open"),
)
# the config field with the number of shared experts, which together are one MLP
_SHARED = dict.fromkeys(_LIKE_DEEPSEEK, "n_shared_experts") | {
    "afmoe": "num_shared_experts",
    "deepseek_v4": "n_shared_experts",
    "ernie4_5_moe": "moe_num_shared_experts",
    "exaone_moe": "num_shared_experts",
    "hy_v3": "num_shared_experts",
    "mistral4": "n_shared_experts",
}
# families with a shared expert that has a gate of its own; Qwen3-Coder's configs have its width, 0, and no such expert
_GATED_SHARED = ("qwen2_moe", "qwen3_5_moe_text", "qwen3_next")
# whether a layer has experts
_HAVE_EXPERTS: dict[str, Callable[[Any, int], bool]] = {
    "afmoe": lambda config, layer_idx: bool(layer_idx >= config.num_dense_layers),
    "cohere2_moe": _in_sparse_layers,
    "deepseek_v3": _after_dense_layers,
    "deepseek_v32": _in_sparse_layers,
    "deepseek_v4": lambda config, layer_idx: True,
    "dots1": _after_dense_layers,
    "ernie4_5_moe": _in_interval,
    "exaone_moe": _in_sparse_layers,
    "flex_olmo": lambda config, layer_idx: True,
    "gemma4_text": lambda config, layer_idx: bool(config.enable_moe_block),
    "glm4_moe": _after_dense_layers,
    "glm4_moe_lite": _in_sparse_layers,
    "glm_moe_dsa": _in_sparse_layers,
    "gpt_oss": lambda config, layer_idx: True,
    "granitemoe": lambda config, layer_idx: True,
    "granitemoehybrid": lambda config, layer_idx: bool(config.num_local_experts),
    "granitemoe_swa": lambda config, layer_idx: True,
    "granitemoeshared": lambda config, layer_idx: True,
    "hunyuan_v1_moe": lambda config, layer_idx: True,
    "hy_v3": _in_sparse_layers,
    "lfm2_moe": lambda config, layer_idx: bool(layer_idx >= config.num_dense_layers),
    "llama4_text": lambda config, layer_idx: layer_idx in config.moe_layers,
    "mellum": _in_sparse_layers,
    "minimax_m2": lambda config, layer_idx: True,
    "mistral4": _after_dense_layers,
    "mixtral": lambda config, layer_idx: True,
    "nemotron_h": lambda config, layer_idx: config.layers_block_type[layer_idx] == "moe",
    "olmoe": lambda config, layer_idx: True,
    "qwen2_moe": _every_nth_layer,
    "qwen3_5_moe_text": lambda config, layer_idx: True,
    "qwen3_moe": _every_nth_layer,
    "qwen3_next": _every_nth_layer,
    "sarvam_moe": _after_dense_layers,
    "solar_open": lambda config, layer_idx: True,
}
