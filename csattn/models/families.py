"""Which models this project reproduces exactly, read from `transformers` configs; all others are refused by name."""

from dataclasses import dataclass
from typing import Any, Literal

from csattn.errors import ModelError
from csattn.models.spec import Activation, AttentionSpec, LayerSpec, MlpSpec, ModelSpec

# These rotate a position by an angle that depends on the position alone, so captured keys stay valid
# however long the sequence grows.
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
}
# families that may be asked for, and why they are refused
_REFUSED = {
    "cohere": "its blocks add attention and MLP side by side, and its norms subtract the mean",
    "cohere2": "its blocks add attention and MLP side by side, and its norms subtract the mean",
    "gemma3_text": "some of its layers attend through a sliding window, with RoPE of their own",
    "gpt_oss": "it has attention sinks, sliding windows and experts",
    "mixtral": "it has experts",
    "olmo": "its norms subtract the mean",
    "phi": "its norms subtract the mean",
    "qwen3_moe": "it has experts",
    "stablelm": "its norms subtract the mean",
}


@dataclass(frozen=True, slots=True)
class Family:
    """What the code of a family's model says, and its configs do not."""

    # a layer's norms: before and behind attention, before and behind the MLP
    norms: tuple[str | None, str | None, str | None, str | None] = (
        "input_layernorm",
        None,
        "post_attention_layernorm",
        None,
    )
    # whether q, k and v, attention's output, and the MLP have biases, or which field of the config says so
    biases: tuple[bool | str, bool | str, bool | str] = (False, False, False)
    qk_norm: Literal["none", "head", "projection"] = "none"
    interleaved: bool = False  # RoPE
    gated: bool = True  # the MLP
    scaled_embedding: bool = False  # by the root of the hidden size
    offset_norms: bool = False  # a norm's weights are stored less 1
    heeds: tuple[str, ...] = ()  # fields of its config that the other families have not, or do not look at

    def field(self, config: Any, name: str, otherwise: Any) -> Any:
        return getattr(config, name) if name in self.heeds else otherwise


_BY_CONFIG = ("attention_bias", "attention_bias", "mlp_bias")
_BEHIND = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_GLM4_NORMS = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
_GEMMA2_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_GEMMA: dict[str, Any] = {
    "biases": ("attention_bias", "attention_bias", False),
    "scaled_embedding": True,
    "offset_norms": True,
}

FAMILIES = {
    "arcee": Family(biases=_BY_CONFIG, gated=False),
    "ernie4_5": Family(biases=("use_bias", "use_bias", "use_bias"), interleaved=True),
    "exaone4": Family(_BEHIND, qk_norm="head"),
    "gemma": Family(**_GEMMA),
    "gemma2": Family(_GEMMA2_NORMS, **_GEMMA, heeds=("query_pre_attn_scalar", "final_logit_softcapping")),
    "glm": Family(biases=("attention_bias", False, False), interleaved=True),
    "glm4": Family(_GLM4_NORMS, biases=("attention_bias", False, False), interleaved=True),
    "granite": Family(
        biases=_BY_CONFIG,
        heeds=("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
    ),
    "helium": Family(biases=("attention_bias", False, "mlp_bias"), interleaved=True),
    "llama": Family(biases=_BY_CONFIG),
    "ministral": Family(),
    "mistral": Family(heeds=("sliding_window",)),
    "olmo2": Family(_BEHIND, biases=("attention_bias", "attention_bias", False), qk_norm="projection"),
    "phi3": Family(heeds=("sliding_window",)),
    "qwen2": Family(biases=(True, False, False)),
    "qwen3": Family(biases=("attention_bias", "attention_bias", False), qk_norm="head"),
    "seed_oss": Family(biases=("attention_bias", "attention_out_bias", "mlp_bias")),
    "smollm3": Family(biases=_BY_CONFIG, heeds=("no_rope_layers",)),
}


def describe(config: Any) -> ModelSpec:
    """What a `transformers` config of a supported family describes.

    Raises ModelError where this project would not reproduce the model.
    """
    name = getattr(config, "model_type", None)
    if name not in FAMILIES:
        why = f": {_REFUSED[name]}" if name in _REFUSED else ""
        raise ModelError(f"model family {name!r} is not supported{why}; csattn reproduces {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    _require_full_attention(config, family)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    query_scale = family.field(config, "query_pre_attn_scalar", head_dim) ** -0.5
    embedding_scale = config.hidden_size**0.5 if family.scaled_embedding else 1.0
    return ModelSpec(
        layers=tuple(describe_layer(config, layer_idx) for layer_idx in range(config.num_hidden_layers)),
        hidden_size=config.hidden_size,
        num_q_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        softmax_scale=float(family.field(config, "attention_multiplier", query_scale)),
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        norm_eps=config.rms_norm_eps,
        rope=_rope(config),
        interleaved=family.interleaved,
        embedding_multiplier=float(family.field(config, "embedding_multiplier", embedding_scale)),
        logit_multiplier=1.0 / family.field(config, "logits_scaling", 1.0),
        logit_cap=family.field(config, "final_logit_softcapping", None),
        tied_embedding=bool(config.tie_word_embeddings),
    )


def describe_layer(config: Any, layer_idx: int) -> LayerSpec:
    """One layer of a supported family's config."""
    family = FAMILIES[config.model_type]
    qkv_bias, out_bias, mlp_bias = (
        bool(getattr(config, bias, False)) if isinstance(bias, str) else bias for bias in family.biases
    )
    rotated = bool(family.field(config, "no_rope_layers", {layer_idx: True})[layer_idx])
    if config.model_type == "exaone4":  # its layers that do not slide have none, if others do
        rotated = config.sliding_window is None
    return LayerSpec(
        attention=AttentionSpec(qkv_bias=qkv_bias, out_bias=out_bias, qk_norm=family.qk_norm, rotated=rotated),
        mlp=MlpSpec(
            intermediate_size=config.intermediate_size,
            activation=_activation(config),
            gated=family.gated,
            bias=mlp_bias,
        ),
        pre_norm=family.norms[0] is not None,
        post_norm=family.norms[1] is not None,
        residual_multiplier=float(family.field(config, "residual_multiplier", 1.0)),
    )


def stretch_positions(config: Any, factor: float) -> None:
    """Give a supported model that many times its positions by YaRN (arXiv:2309.00071). 1 leaves it as it is.

    Raises ModelError when the factor is below 1, or the model's positions are scaled already.
    """
    if factor == 1.0:
        return
    if not factor > 1.0:
        raise ModelError(f"a model's positions can only be stretched, by a factor of 1 or more, got {factor}")
    rope = dict(config.rope_parameters or {})
    if rope.get("rope_type", "default") != "default":
        raise ModelError(f"this model's positions are scaled by {rope['rope_type']!r} already; load it unstretched")
    before = config.max_position_embeddings
    scaled = {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": before}
    config.rope_parameters = rope | scaled
    config.max_position_embeddings = int(before * factor)


def _require_full_attention(config: Any, family: Family) -> None:
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layer_types != {"full_attention"} or family.field(config, "sliding_window", None):
        raise ModelError(
            "this model attends through a sliding window in some layers, which csattn does not reproduce; "
            "use a model with full attention in every layer (for Mistral, v0.2 or later)"
        )
    if getattr(config, "attn_logit_softcapping", None):
        raise ModelError("this model caps attention's logits, which csattn does not reproduce; use one that does not")
    if getattr(config, "use_bidirectional_attention", False):
        raise ModelError("this model attends to later tokens too, csattn to earlier ones; use one that generates text")


def _rope(config: Any) -> dict[str, Any]:
    rope = dict(getattr(config, "rope_parameters", None) or {})
    rope_type = rope.get("rope_type", "default")
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise ModelError(
            f"this model's positions are scaled by {rope_type!r}, which changes stored keys as the sequence grows; "
            f"csattn supports {', '.join(SUPPORTED_ROPE_TYPES)}"
        )
    return rope


def _activation(config: Any) -> Activation:
    name = getattr(config, "hidden_act", None) or config.hidden_activation
    if name not in _ACTIVATIONS:
        raise ModelError(
            f"this model's MLP has the activation {name!r}, which csattn does not compute; it has "
            f"{', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]
