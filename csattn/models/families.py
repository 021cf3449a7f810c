"""The model families that csattn reproduces exactly, as data; others are refused by name."""

from dataclasses import dataclass, field
from typing import Any, Literal

from csattn.errors import ModelError

_NORM_BIASES = "its norms have biases"
# families that users may try, and why they are refused
_REFUSED = {
    "apertus": "its MLPs have an activation with trained weights",
    "axk1": "it norms the output of experts only, not of its dense layers",
    "bamba": "its attention has rotations of its own beside state spaces",
    "falcon_h1": "its layers have attention and a state space in parallel",
    "gemma3": "it also reads images; load its text model, a gemma3_text",
    "gemma4": "it also reads images; load its text model, a gemma4_text",
    "jais2": _NORM_BIASES,
    "jamba": "its state spaces are of the first Mamba",
    "laguna": "the gates of its attention are not sigmoids",
    "llama4": "it also reads images; load its text model, a llama4_text",
    "longcat_flash": "its layers have two attentions, and experts without weights",
    "mimo_v2_flash": "its values are narrower than its keys",
    "minimax": "its linear attention has no gated deltas",
    "nanochat": "its norms have no weights",
    "nemotron": _NORM_BIASES,
    "olmo": "its norms have no weights",
    "olmo_hybrid": "its layers have norms in different places",
    "phi": _NORM_BIASES,
    "phimoe": _NORM_BIASES,
    "qwen3_5": "it also reads images; load its text model, a qwen3_5_text",
    "qwen3_5_moe": "it also reads images; load its text model, a qwen3_5_moe_text",
    "stablelm": _NORM_BIASES,
    "starcoder2": _NORM_BIASES,
    "step3p5": "its layers have different numbers of query heads",
    "step3p7": "its layers have different numbers of query heads",
}
# A layer's buffers that are weights: the factor on its output, the bias of expert scores for the choice, and the
# experts of each token id.
LAYER_SCALE, CHOICE_BIAS, EXPERTS_OF_TOKENS = "layer_scalar", "e_score_correction_bias", "tid2eid"


@dataclass(frozen=True, slots=True)
class Family:
    """What is known of a family from its modelling code, and is not in its configs."""

    # names of a layer's norms: before and after attention, before and after the MLP
    norms: tuple[str | None, str | None, str | None, str | None] = (
        "input_layernorm",
        None,
        "post_attention_layernorm",
        None,
    )
    # whether QKV, the output projection and the MLP have biases, or the config field that says so
    biases: tuple[bool | str, bool | str, bool | str] = (False, False, False)
    head_bias: str | None = None  # the config field that says whether the output head has a bias
    qk_norm: Literal["none", "head", "projection"] | str = "none"  # or the config field that switches "head" on
    norms_after_rope: bool = False
    alpha: bool = False  # RoPE of the type "dynamic" may have a fixed factor of its base instead, by an `alpha`
    interleaved: bool | str = False  # RoPE has pairs (2i, 2i + 1), or the config field that says so
    activation_field: str | None = "hidden_act"  # the config field with the MLP's activation; None: silu
    gated: bool = True  # whether the MLP has gates
    limited: bool = False  # whether the activation clips gates and ups
    # embeddings are multiplied by sqrt(hidden_size), by their module or, if a config field says so, by the model
    scaled_embedding: bool | str = False
    scaled_layers: bool = False  # a layer's output is multiplied by its LAYER_SCALE
    softmax_scale: float | None = None  # None: head_dim ** -0.5
    v_norm: bool = False
    offset_norms: bool = False  # norms multiply by 1 + their weights
    centred: bool = False  # norms are LayerNorm: they subtract the mean; RMSNorm if the config has `rms_norm_eps`
    eps_field: str = "rms_norm_eps"  # the config field with the norms' epsilon
    parallel: bool = False  # attention and MLP read the same input, and their outputs are added
    single: bool = False  # a layer is attention, what is in its place, or an MLP, by layer_types
    # layers with RoPE; local: those with a window or, if the config has no window, all; the last two are config fields
    rotated: Literal["all", "none", "local", "no_rope_layers", "position_embedding_type"] = "all"
    tempered: bool = False  # queries have a `Temper`
    sinks: bool = False
    # whether attention has gates: from the projection of queries, or from `gate_proj`, which has no bias
    gated_attention: Literal["with_queries", "alone"] | None = None
    latents: bool = False
    interleaved_indexer: bool | None = None  # as `IndexerSpec.interleaved`; None: no indexer
    state: Literal["delta", "scan", "conv"] | None = None  # what layers have that keep a state, and no rows
    compressed: bool = False  # compressed attention, and several residual streams
    mlp: str = "mlp"  # name of a layer's MLP module, which may hold experts
    # name of the layer's module with experts and their router; empty: the layer itself; None: its MLP
    experts_at: str | None = None
    router: str = "gate"  # path of the module with the router's weights, in that with the experts
    inputs_first: bool = False  # an expert's weights are stored [num_in, num_out]
    config_fields: tuple[str, ...] = ()  # config fields that it reads, and other families lack or ignore
    logit_scale_field: str = "logit_scale"  # which of these fields multiplies logits
    names: dict[str, str] = field(default_factory=dict)  # of modules, by their names in most families

    def part(self, module: Any, name: str) -> Any:
        """Return a module's part by its name in most families; None: it has no such part."""
        return getattr(module, self.names.get(name, name), None)

    def embedding_multiplier(self, config: Any) -> float:
        """Return the factor of embeddings that the model applies, not its embedding module."""
        scaled = isinstance(self.scaled_embedding, str) and getattr(config, self.scaled_embedding)
        return float(config.hidden_size**0.5 if scaled else self.field(config, "embedding_multiplier", 1.0))

    def field(self, config: Any, name: str, default: Any) -> Any:
        """Return the config's field if this family reads it, else `default`."""
        return getattr(config, name) if name in self.config_fields else default


_BY_CONFIG = ("attention_bias", "attention_bias", "mlp_bias")
_ATTENTION_BIAS = ("attention_bias", "attention_bias", False)
_USE_BIAS = ("use_bias", "use_bias", "use_bias")
_POST_NORMS = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_GLM4_NORMS = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
_GEMMA2_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_GEMMA: dict[str, Any] = {"biases": _ATTENTION_BIAS, "scaled_embedding": True, "offset_norms": True}
_GEMMA2: dict[str, Any] = {"norms": _GEMMA2_NORMS, "activation_field": "hidden_activation"}
_GEMMA_FIELDS = ("query_pre_attn_scalar", "final_logit_softcapping")
_GRANITE_FIELDS = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
_GRANITE_MOE_SHARED: dict[str, Any] = {
    "biases": _ATTENTION_BIAS,
    "config_fields": _GRANITE_FIELDS,
    "mlp": "shared_mlp",
    "experts_at": "block_sparse_moe",
    "router": "router",
    "names": {"linear_attn": "mamba", "gate_up_proj": "input_linear", "down_proj": "output_linear"},
}
_COHERE: dict[str, Any] = {
    "norms": ("input_layernorm", None, None, None),
    "biases": _ATTENTION_BIAS,
    "interleaved": True,
    "centred": True,
    "eps_field": "layer_norm_eps",
    "parallel": True,
    "config_fields": ("logit_scale",),
}
_LATENTS: dict[str, Any] = {"biases": _ATTENTION_BIAS, "latents": True}
_HUNYUAN: dict[str, Any] = {
    "biases": _ATTENTION_BIAS,
    "qk_norm": "head",
    "norms_after_rope": True,
    "alpha": True,
    "names": {"q_norm": "query_layernorm", "k_norm": "key_layernorm", "shared_experts": "shared_mlp"},
}
_LFM2_NAMES = {
    CHOICE_BIAS: "expert_bias",
    "linear_attn": "conv",
    "norm": "embedding_norm",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
    "o_proj": "out_proj",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
}
_LFM2: dict[str, Any] = {
    "norms": ("operator_norm", None, "ffn_norm", None),
    "qk_norm": "head",
    "activation_field": None,
    "eps_field": "norm_eps",
    "state": "conv",
    "mlp": "feed_forward",
}
_QWEN3_NEXT = Family(
    biases=_ATTENTION_BIAS, qk_norm="head", offset_norms=True, gated_attention="with_queries", state="delta"
)
FAMILIES = {
    "afmoe": Family(
        ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"),
        biases=_ATTENTION_BIAS,
        qk_norm="head",
        scaled_embedding="mup_enabled",
        rotated="local",
        gated_attention="alone",
        router="router.gate",
        names={CHOICE_BIAS: "expert_bias"},
    ),
    "arcee": Family(biases=_BY_CONFIG, gated=False),
    "cohere": Family(**_COHERE),
    "cohere2": Family(**_COHERE, rotated="local"),
    "cohere2_moe": Family(**_COHERE, rotated="local"),
    "cwm": Family(),
    "deepseek_v3": Family(**_LATENTS, interleaved="rope_interleave"),
    "deepseek_v32": Family(**_LATENTS, interleaved=True, interleaved_indexer=False),
    "deepseek_v4": Family(
        biases=(False, False, "mlp_bias"),
        interleaved=True,
        sinks=True,
        limited=True,
        compressed=True,
        config_fields=("hc_sinkhorn_iters", "hc_eps", "index_topk"),
    ),
    "dots1": Family(biases=_ATTENTION_BIAS, qk_norm="head"),
    "ernie4_5": Family(biases=_USE_BIAS, interleaved=True),
    "ernie4_5_moe": Family(biases=_USE_BIAS, interleaved=True, head_bias="use_bias"),
    "exaone": Family(biases=_BY_CONFIG),
    "exaone4": Family(_POST_NORMS, qk_norm="head", rotated="local"),
    "exaone_moe": Family(qk_norm="head", rotated="local"),
    "flex_olmo": Family(_POST_NORMS, biases=_ATTENTION_BIAS, qk_norm="projection"),
    "gemma": Family(**_GEMMA),
    "gemma2": Family(**_GEMMA2, **_GEMMA, config_fields=(*_GEMMA_FIELDS, "attn_logit_softcapping")),
    "gemma3_text": Family(**_GEMMA2, **_GEMMA, qk_norm="head", config_fields=_GEMMA_FIELDS),
    "gemma4_text": Family(
        **_GEMMA2,
        biases=_ATTENTION_BIAS,
        scaled_embedding=True,
        scaled_layers=True,
        softmax_scale=1.0,
        qk_norm="head",
        v_norm=True,
        router="router",
        experts_at="",
        config_fields=("final_logit_softcapping",),
    ),
    "glm": Family(biases=("attention_bias", False, False), interleaved=True),
    "glm4": Family(_GLM4_NORMS, biases=("attention_bias", False, False), interleaved=True),
    "glm4_moe": Family(biases=("attention_bias", False, False), qk_norm="use_qk_norm"),
    "glm4_moe_lite": Family(**_LATENTS, interleaved="rope_interleave"),
    "glm_moe_dsa": Family(**_LATENTS, interleaved=True, interleaved_indexer=True),
    "gpt_oss": Family(biases=_ATTENTION_BIAS, sinks=True, router="router", inputs_first=True),
    "granite": Family(biases=_BY_CONFIG, config_fields=_GRANITE_FIELDS),
    "granite_swa": Family(biases=_BY_CONFIG, config_fields=_GRANITE_FIELDS, sinks=True),
    "granitemoe": Family(
        biases=_ATTENTION_BIAS, config_fields=_GRANITE_FIELDS, mlp="block_sparse_moe", router="router"
    ),
    "granitemoehybrid": Family(**_GRANITE_MOE_SHARED, rotated="position_embedding_type", state="scan"),
    "granitemoe_swa": Family(**_GRANITE_MOE_SHARED, sinks=True),
    "granitemoeshared": Family(**_GRANITE_MOE_SHARED),
    "helium": Family(biases=("attention_bias", False, "mlp_bias"), interleaved=True),
    "hunyuan_v1_dense": Family(**_HUNYUAN),
    "hunyuan_v1_moe": Family(**_HUNYUAN, router="gate.wg"),
    "hy_v3": Family(biases=_ATTENTION_BIAS, qk_norm="head"),
    "hyperclovax": Family(
        ("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2"),
        biases=_BY_CONFIG,
        config_fields=_GRANITE_FIELDS,
        logit_scale_field="logits_scaling",
    ),
    "internlm3": Family(biases=_BY_CONFIG),
    "iquestcoder": Family(biases=_BY_CONFIG),
    "lfm2": Family(**_LFM2, names=_LFM2_NAMES),
    "lfm2_moe": Family(**_LFM2, names=_LFM2_NAMES | {"rotary_emb": "pos_emb"}),
    "llama": Family(biases=_BY_CONFIG),
    "llama4_text": Family(
        biases=_ATTENTION_BIAS,
        qk_norm="use_qk_norm",
        interleaved=True,
        rotated="no_rope_layers",
        mlp="feed_forward",
        router="router",
        inputs_first=True,
    ),
    "mellum": Family(biases=_ATTENTION_BIAS, qk_norm="head"),
    "minimax_m2": Family(qk_norm="projection"),
    "ministral": Family(),
    "ministral3": Family(tempered=True, config_fields=("sliding_window",)),
    "mistral": Family(config_fields=("sliding_window",)),
    "mistral4": Family(**_LATENTS, interleaved="rope_interleave", tempered=True),
    "mixtral": Family(config_fields=("sliding_window",)),
    "nemotron_h": Family(
        ("norm", None, None, None),
        biases=(False, False, "mlp_bias"),
        activation_field="mlp_hidden_act",
        gated=False,
        eps_field="layer_norm_epsilon",
        single=True,
        rotated="none",
        state="scan",
        mlp="mixer",
        names={"embed_tokens": "embeddings", "norm": "norm_f", "self_attn": "mixer", "linear_attn": "mixer"},
    ),
    "olmo2": Family(_POST_NORMS, biases=_ATTENTION_BIAS, qk_norm="projection"),
    "olmo3": Family(_POST_NORMS, biases=_ATTENTION_BIAS, qk_norm="projection"),
    "olmoe": Family(biases=_ATTENTION_BIAS, qk_norm="projection"),
    "phi3": Family(config_fields=("sliding_window",)),
    "qwen2": Family(biases=(True, False, False)),
    "qwen2_moe": Family(biases=("qkv_bias", False, False)),
    "qwen3": Family(biases=_ATTENTION_BIAS, qk_norm="head"),
    "qwen3_moe": Family(biases=_ATTENTION_BIAS, qk_norm="head", config_fields=("sliding_window",)),
    "qwen3_5_moe_text": _QWEN3_NEXT,
    "qwen3_5_text": _QWEN3_NEXT,
    "qwen3_next": _QWEN3_NEXT,
    "sarvam_moe": Family(biases=("attention_bias", False, False), qk_norm="use_qk_norm"),
    "seed_oss": Family(biases=("attention_bias", "attention_out_bias", "mlp_bias")),
    "smollm3": Family(biases=_BY_CONFIG, rotated="no_rope_layers"),
    "solar_open": Family(biases=("attention_bias", False, False)),
    "youtu": Family(**_LATENTS, interleaved="rope_interleave"),
}


def own_field(config: Any, name: str, default: Any) -> Any:
    """Return a field that only some families have, or `default` in others, whose configs may carry it unread."""
    return getattr(config, name) if hasattr(type(config), name) else default


def unsupported(family: str | None) -> ModelError:
    """Return the error for a family that is not supported. family: `model_type` in configs."""
    why = f": {_REFUSED[family]}" if family in _REFUSED else ""
    return ModelError(f"model family {family!r} is not supported{why}; csattn supports {', '.join(FAMILIES)}")
