"""Random models of the supported families, small enough to run in milliseconds, with a tokenizer of single bytes."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from csattn.models import LoadedModel
from csattn.models.families import LAYER_SCALE
from csattn.models.loader import wrap_model
from csattn.models.text_part import class_of

_LOCAL = ["sliding_attention", "full_attention", "sliding_attention"]  # layer types
_DELTA = {
    "head_dim": 16,
    "num_hidden_layers": 5,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 4,
    "initializer_range": 0.15,  # larger weights amplify rounding in states, which sum over the whole context
}
_SCAN = {
    "num_hidden_layers": 5,
    "layer_types": _DELTA["layer_types"],
    "shared_intermediate_size": 40,
    "mamba_n_heads": 8,
    "mamba_d_state": 20,
    "mamba_d_head": 16,
    "mamba_chunk_size": 64,
    "initializer_range": 0.15,
}
_CONV = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"]}
_GRANITE = {
    "attention_bias": True,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
}
_GRANITE_SWA = _GRANITE | {
    "num_hidden_layers": 5,
    "sliding_window": 37,
    "layer_types": ["full_attention", *_LOCAL, "full_attention"],
    "layer_rope_theta": [1e4, 1e3, 0, 0, 1e3],
    "tie_word_embeddings": False,
}
_EXPERTS = {
    "moe_intermediate_size": 36,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
_LATENTS: dict[str, Any] = _EXPERTS | {
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,  # this and qk_rope_head_dim: powers of two, which the GPU's kernels require
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "first_k_dense_replace": 1,
}
# with so many heads, none of a few hundred scores is 0: among keys that tie at 0, any may be chosen
_INDEXER: dict[str, Any] = _LATENTS | {"index_n_heads": 18, "index_head_dim": 21, "index_topk": 29}
_GEMMA4 = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "num_global_key_value_heads": 2,
    "global_head_dim": 48,
    "attention_k_eq_v": True,
    "sliding_window": 37,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 5.0,
}
# family -> the prefix of its classes' names, and its config except for the sizes
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
}
# also families that combine the same parts of layers differently; a family with variants has several entries
EVERY_FAMILY = (
    FAMILIES
    | {
        "afmoe": (
            "Afmoe",
            {
                "head_dim": 16,
                "attention_bias": True,
                "sliding_window": 37,
                "layer_types": _LOCAL,
                "num_dense_layers": 1,
                "moe_intermediate_size": 36,
                "num_experts": 7,
                "num_experts_per_tok": 3,
                "num_shared_experts": 2,
                "route_scale": 1.5,
                "mup_enabled": True,
            },
        ),
        "arcee": ("Arcee", {"mlp_bias": True}),
        "cohere": ("Cohere", {"attention_bias": True, "logit_scale": 1.0}),
        "cohere2": ("Cohere2", {"sliding_window": 37, "layer_types": _LOCAL}),
        "cohere2_moe": (
            "Cohere2Moe",
            {
                "head_dim": 16,
                "attention_bias": True,
                "logit_scale": 0.7,
                "sliding_window": 37,
                "num_hidden_layers": 4,
                "layer_types": ["full_attention", *_LOCAL],
                "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
                "prefix_dense_intermediate_size": 48,
                "intermediate_size": 36,
                "num_experts": 7,
                "num_experts_per_tok": 3,
                "num_shared_experts": 2,
                "expert_selection_fn": "sigmoid",
            },
        ),
        "cwm": (
            "Cwm",
            {
                "bos_token_id": 0,
                "head_dim": 16,
                "sliding_window": 37,
                "layer_types": _LOCAL,
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 1e4,
                    "factor": 16.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
            },
        ),
        "deepseek_v3": (
            "DeepseekV3",
            _LATENTS
            | {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 256,
                    "mscale": 1.0,
                    "mscale_all_dim": 0.7,
                },
            },
        ),
        "deepseek_v32": ("DeepseekV32", _INDEXER),
        "deepseek_v4": (
            "DeepseekV4",
            {
                "num_hidden_layers": 4,
                "head_dim": 64,
                "partial_rotary_factor": 0.25,
                "q_lora_rank": 40,
                "layer_types": [
                    "sliding_attention",
                    "compressed_sparse_attention",
                    "heavily_compressed_attention",
                    "compressed_sparse_attention",
                ],
                "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 12},
                "sliding_window": 37,
                "o_groups": 2,
                "o_lora_rank": 24,
                "index_n_heads": 18,
                "index_head_dim": 32,
                "index_topk": 29,
                "hc_mult": 3,
                "hc_sinkhorn_iters": 5,
                "mlp_layer_types": ["hash_moe", "moe", "hash_moe", "moe"],
                "n_routed_experts": 12,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 36,
            },
        ),
        "dots1": ("Dots1", _EXPERTS | {"head_dim": 16, "first_k_dense_replace": 1, "attention_bias": True}),
        "ernie4_5": ("Ernie4_5", {"head_dim": 16, "use_bias": True}),
        "ernie4_5_moe": (
            "Ernie4_5_Moe",
            {
                "head_dim": 16,
                "use_bias": True,
                "moe_intermediate_size": 36,
                "moe_num_experts": 7,
                "moe_k": 3,
                "moe_num_shared_experts": 2,
                "moe_layer_start_index": 1,
            },
        ),
        "exaone": ("Exaone", {}),
        "exaone4": ("Exaone4", {"sliding_window": 37, "layer_types": _LOCAL}),
        "exaone_moe": (
            "ExaoneMoe",
            {
                "head_dim": 16,
                "sliding_window": 37,
                "layer_types": _LOCAL,
                "moe_intermediate_size": 36,
                "num_experts": 12,
                "num_shared_experts": 2,
                "num_experts_per_tok": 3,
                "n_group": 4,
                "topk_group": 2,
                "routed_scaling_factor": 1.5,
            },
        ),
        "flex_olmo": ("FlexOlmo", {"num_experts": 7, "num_experts_per_tok": 3, "attention_bias": True}),
        "gemma": ("Gemma", {"head_dim": 16}),
        "gemma2": (
            "Gemma2",
            {
                "head_dim": 16,
                "sliding_window": 37,
                "layer_types": _LOCAL,
                "attn_logit_softcapping": 2.0,
                "final_logit_softcapping": 5.0,
                "query_pre_attn_scalar": 20,
                "attn_implementation": "eager",  # older transformers omit the cap in other implementations
            },
        ),
        "gemma3_text": (
            "Gemma3",
            {
                "head_dim": 16,
                "sliding_window": 37,
                "layer_types": ["sliding_attention", "full_attention", "full_attention"],
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
                },
                "query_pre_attn_scalar": 20,
                "final_logit_softcapping": 5.0,
            },
        ),
        "gemma4_text": ("Gemma4", _GEMMA4),
        "gemma4_text, experts": (
            "Gemma4",
            _GEMMA4 | {"enable_moe_block": True, "num_experts": 7, "top_k_experts": 3, "moe_intermediate_size": 36},
        ),
        "gemma4_text, inputs": (
            "Gemma4",
            _GEMMA4
            | {
                "num_hidden_layers": 7,
                "attention_k_eq_v": False,
                "layer_types": [*2 * ["sliding_attention", "full_attention"], *_LOCAL[:2], "full_attention"],
                "num_kv_shared_layers": 3,
                "use_double_wide_mlp": True,
                "hidden_size_per_layer_input": 20,
                "vocab_size_per_layer_input": 256,
            },
        ),
        "glm": ("Glm", {"head_dim": 16}),
        "glm4": ("Glm4", {"head_dim": 16, "num_attention_heads": 24, "num_key_value_heads": 2}),
        "glm4_moe": (
            "Glm4Moe",
            {
                "head_dim": 16,
                "attention_bias": True,
                "use_qk_norm": True,
            }
            | _EXPERTS,
        ),
        "glm4_moe_lite": ("Glm4MoeLite", _LATENTS),
        "glm_moe_dsa": (
            "GlmMoeDsa",
            _INDEXER
            | {"attention_bias": True, "num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]},
        ),
        "gpt_oss": (
            "GptOss",
            {
                "head_dim": 16,
                "intermediate_size": 36,
                "num_local_experts": 5,
                "num_experts_per_tok": 2,
                "sliding_window": 37,
                "layer_types": _LOCAL,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 16.0,
                    "original_max_position_embeddings": 64,
                    "truncate": False,
                },
            },
        ),
        "granitemoe": (
            "GraniteMoe",
            {
                "num_local_experts": 5,
                "num_experts_per_tok": 2,
                "attention_multiplier": 0.2,
                "embedding_multiplier": 3.0,
                "residual_multiplier": 0.4,
                "logits_scaling": 2.0,
            },
        ),
        "granitemoehybrid": (
            "GraniteMoeHybrid",
            _SCAN
            | {
                "intermediate_size": 36,
                "num_local_experts": 5,
                "num_experts_per_tok": 2,
                "attention_multiplier": 0.2,
                "embedding_multiplier": 3.0,
                "residual_multiplier": 0.4,
                "logits_scaling": 2.0,
            },
        ),
        "granitemoehybrid, dense": (
            "GraniteMoeHybrid",
            _SCAN | {"num_local_experts": 0, "position_embedding_type": "rope"},
        ),
        "granite_swa": ("GraniteSWA", _GRANITE_SWA | {"mlp_bias": True}),
        "granitemoe_swa": (
            "GraniteMoeSWA",
            _GRANITE_SWA | {"shared_intermediate_size": 40, "num_local_experts": 5, "num_experts_per_tok": 2},
        ),
        "granitemoeshared": (
            "GraniteMoeShared",
            {
                "shared_intermediate_size": 40,
                "num_local_experts": 5,
                "num_experts_per_tok": 2,
            }
            | _GRANITE,
        ),
        "granite": (
            "Granite",
            {
                "attention_bias": True,
                "mlp_bias": True,
                "attention_multiplier": 0.2,
                "embedding_multiplier": 3.0,
                "residual_multiplier": 0.4,
                "logits_scaling": 2.0,
            },
        ),
        "helium": ("Helium", {"head_dim": 16}),
        "hunyuan_v1_dense": (
            "HunYuanDenseV1",
            {
                "head_dim": 24,
                "attention_bias": True,
                "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 1e3},
            },
        ),
        "hunyuan_v1_moe": (
            "HunYuanMoEV1",
            {
                "head_dim": 16,
                "intermediate_size": 36,
                "num_experts": 7,
                "moe_topk": [3, 2, 4],
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 256,
                },
            },
        ),
        "hy_v3": (
            "HYV3",
            {
                "head_dim": 16,
                "attention_bias": True,
                "moe_intermediate_size": 36,
                "num_experts": 7,
                "num_experts_per_tok": 3,
                "num_shared_experts": 2,
            },
        ),
        "hyperclovax": (
            "HyperCLOVAX",
            {
                "attention_multiplier": 0.2,
                "embedding_multiplier": 3.0,
                "residual_multiplier": 0.4,
                "logits_scaling": 0.5,
            },
        ),
        "internlm3": ("InternLM3", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
        "iquestcoder": ("IQuestCoder", {"head_dim": 16}),
        "lfm2": ("Lfm2", _CONV | {"block_multiple_of": 8, "conv_bias": True}),
        "lfm2_moe": (
            "Lfm2Moe",
            _CONV
            | {
                "num_dense_layers": 1,
                "moe_intermediate_size": 36,
                "num_experts": 7,
                "num_experts_per_tok": 3,
                "routed_scaling_factor": 1.5,
            },
        ),
        "llama4_text": (
            "Llama4",
            {
                "head_dim": 16,
                "num_hidden_layers": 4,
                "attention_chunk_size": 37,
                "layer_types": ["chunked_attention", "full_attention", "chunked_attention", "full_attention"],
                "no_rope_layers": [1, 0, 1, 0],
                "floor_scale": 64,
                "attn_scale": 0.3,
                "intermediate_size": 36,
                "intermediate_size_mlp": 48,
                "num_local_experts": 5,
                "num_experts_per_tok": 2,
                "moe_layers": [1, 2],
            },
        ),
        "mellum": (
            "Mellum",
            {
                "head_dim": 16,
                "sliding_window": 37,
                "layer_types": _LOCAL,
                "mlp_layer_types": ["dense", "sparse", "sparse"],
                "num_experts": 7,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 36,
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
                },
            },
        ),
        "minimax_m2": (
            "MiniMaxM2",
            {"head_dim": 16, "intermediate_size": 36, "num_local_experts": 7, "num_experts_per_tok": 3},
        ),
        "ministral": ("Ministral", {"head_dim": 16, "sliding_window": 37, "layer_types": _LOCAL}),
        "ministral3": (
            "Ministral3",
            {
                "head_dim": 16,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                    "llama_4_scaling_beta": 0.3,
                },
            },
        ),
        "mistral4": (
            "Mistral4",
            _LATENTS
            | {
                "attention_bias": True,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                    "mscale": 1.0,
                    "mscale_all_dim": 0.7,
                    "llama_4_scaling_beta": 0.3,
                },
            },
        ),
        "mixtral": ("Mixtral", {"num_local_experts": 5, "sliding_window": None}),
        "nemotron_h": (
            "NemotronH",
            {
                "head_dim": 16,
                "layers_block_type": [
                    *("linear_attention", "full_attention", "moe", "linear_attention", "mlp", "full_attention", "moe")
                ],
                "mamba_num_heads": 8,
                "mamba_head_dim": 12,
                "ssm_state_size": 20,
                "n_groups": 2,
                "chunk_size": 64,
                "mlp_bias": True,
                "moe_intermediate_size": 36,
                "moe_shared_expert_intermediate_size": 40,
                "n_routed_experts": 12,
                "num_experts_per_tok": 3,
                "n_group": 4,
                "topk_group": 2,
                "routed_scaling_factor": 1.5,
                "initializer_range": 0.15,
            },
        ),
        "olmo2": ("Olmo2", {}),
        "olmoe": ("Olmoe", {"num_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": False}),
        "olmo3": ("Olmo3", {"sliding_window": 37, "layer_types": _LOCAL}),
        "phi3": (
            "Phi3",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        ),
        "qwen2_moe": (
            "Qwen2Moe",
            {
                "num_experts": 7,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 36,
                "shared_expert_intermediate_size": 40,
                "mlp_only_layers": [1],
            },
        ),
        "qwen3_moe": (
            "Qwen3Moe",
            {
                "head_dim": 16,
                "num_experts": 7,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 36,
                "norm_topk_prob": True,
            },
        ),
        "qwen3_5_moe_text": (
            "Qwen3_5Moe",
            _DELTA
            | {
                "num_experts": 7,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 36,
                "shared_expert_intermediate_size": 40,
            },
        ),
        "qwen3_5_text": ("Qwen3_5", _DELTA),
        "qwen3_next": (
            "Qwen3Next",
            _DELTA
            | {
                "num_experts": 7,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 36,
                "shared_expert_intermediate_size": 40,
                "mlp_only_layers": [1],
            },
        ),
        "sarvam_moe": ("SarvamMoE", _EXPERTS | {"head_dim": 16, "attention_bias": True, "first_k_dense_replace": 1}),
        "seed_oss": ("SeedOss", {"head_dim": 24, "attention_bias": True, "attention_out_bias": True, "mlp_bias": True}),
        "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2, "attention_bias": True}),
        "solar_open": ("SolarOpen", _EXPERTS | {"head_dim": 16, "attention_bias": True}),
        "youtu": ("Youtu", {name: size for name, size in _LATENTS.items() if name not in _EXPERTS}),
    }
)
# families that the installed transformers have
ALL_FAMILIES = {name: of for name, of in EVERY_FAMILY.items() if hasattr(transformers, f"{of[0]}Config")}
MAX_POSITIONS = 1024
CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def tiny_config(family: str, **changes: Any) -> Any:
    name, extras = ALL_FAMILIES[family]
    sizes = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": 0.3,  # large enough for attention to prefer some keys
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    kind = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    return kind(**{**sizes, **extras, **changes})


def make_model(family: str = "llama", seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    config = tiny_config(family, **changes)
    model = class_of(config)._from_config(config).eval()
    if family != "llama":  # Llama has no biases, and stays as initialized
        with torch.no_grad():
            for name, parameter in model.named_parameters():  # these are initialized to zeros and ones
                if name.endswith(("bias", "base")) or "norm" in name or "scale" in name or not parameter.any():
                    parameter += 0.2 * torch.randn_like(parameter)
            for name, buffer in model.named_buffers():
                if name.endswith(LAYER_SCALE):
                    buffer.uniform_(0.5, 1.5)
                elif name.endswith("bias"):
                    buffer += 0.2 * torch.randn_like(buffer)
                elif name.endswith("tid2eid"):  # maps token ids to experts
                    buffer.copy_(torch.rand(len(buffer), model.config.n_routed_experts).argsort()[:, : buffer.shape[1]])
    return model


@cache
def loaded(family: str = "llama") -> LoadedModel:
    """Return a model of this family, shared by all tests: none may change it."""
    return wrap_model(make_model(family), byte_tokenizer(), f"tiny-{family}")


def byte_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
    fast.chat_template = chat_template
    return fast


def save(directory: Path, family: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """Save a model directory in the format of `transformers`."""
    make_model(family, seed, **changes).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def token_ids(num_tokens: int, seed: int = 0) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 256, num_tokens, dtype=np.int32)
