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
from csattn.models.loader import wrap_model

# by family: its classes' name, and what its config says beside the sizes
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
}
# those whose layers are made of the same parts, put together differently
ALL_FAMILIES = FAMILIES | {
    "arcee": ("Arcee", {"mlp_bias": True}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 16, "use_bias": True}),
    "exaone4": ("Exaone4", {"sliding_window": None, "layer_types": 3 * ["full_attention"]}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 16,
            "layer_types": 3 * ["full_attention"],
            "attn_logit_softcapping": None,
            "final_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 20,
        },
    ),
    "glm": ("Glm", {"head_dim": 16}),
    "glm4": ("Glm4", {"head_dim": 16}),
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
    "ministral": ("Ministral", {"head_dim": 16, "layer_types": 3 * ["full_attention"]}),
    "olmo2": ("Olmo2", {}),
    "phi3": ("Phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "seed_oss": ("SeedOss", {"head_dim": 24, "attention_bias": True, "attention_out_bias": True, "mlp_bias": True}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2, "attention_bias": True}),
}
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
    return getattr(transformers, f"{name}Config")(**{**sizes, **extras, **changes})


def make_model(family: str = "llama", seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    model = getattr(transformers, f"{ALL_FAMILIES[family][0]}ForCausalLM")(tiny_config(family, **changes)).eval()
    if family != "llama":  # the plain one
        with torch.no_grad():
            for name, parameter in model.named_parameters():  # which are zeros and ones otherwise
                if name.endswith("bias") or "norm" in name:
                    parameter += 0.2 * torch.randn_like(parameter)
    return model


@cache
def loaded(family: str = "llama") -> LoadedModel:
    """A model of that family, shared by all tests: none may change it."""
    return wrap_model(make_model(family), byte_tokenizer(), f"tiny-{family}")


def byte_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
    fast.chat_template = chat_template
    return fast


def save(directory: Path, family: str = "llama", seed: int = 0) -> Path:
    """A model directory as `transformers` saves it."""
    make_model(family, seed).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def token_ids(num_tokens: int, seed: int = 0) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 256, num_tokens, dtype=np.int32)
