"""Random models of every supported family, small enough to run in milliseconds, with a tokenizer of single bytes."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from csattn.models import LoadedModel
from csattn.models.loader import wrap_model

FAMILIES: dict[str, Any] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
}
MAX_POSITIONS = 1024
CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def tiny_config(family: str, **changes: Any) -> Any:
    config, _, extras = FAMILIES[family]
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
    return config(**{**sizes, **extras, **changes})


def make_model(family: str = "llama", seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    return FAMILIES[family][1](tiny_config(family, **changes)).eval()


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
