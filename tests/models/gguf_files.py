"""Writes GGUF files as llama.cpp's converter does."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from gguf import GGUFWriter, TokenType
from numpy.typing import NDArray

from tests.tiny import byte_tokenizer

GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
LFM2_NAMES = {
    "model.embed_tokens": "token_embd", "model.embedding_norm": "token_embd_norm", "model.layers": "blk",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_output", "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm", "feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down", "operator_norm": "attn_norm", ".conv.": ".shortconv.",
}  # fmt: skip
EMBEDDING = {"token_embd.weight": np.ones((256, 64), np.float32)}


def write_gguf(
    path: Path,
    tensors: Mapping[str, NDArray[np.float32]] = MappingProxyType({}),
    family: str = "llama",
    more_tokens: tuple[str, ...] = (),
    merges: tuple[str, ...] = ("a b", "c d"),  # transformers 5.17 makes no tokenizer of a single merge
    **fields: Any,
) -> Path:
    sizes = {"context_length": 512, "embedding_length": 64, "block_count": 1, "feed_forward_length": 96}
    sizes |= {"attention.head_count": 4, "attention.head_count_kv": 4, "vocab_size": 256}
    sizes |= {"attention.layer_norm_rms_epsilon": 1e-5}
    writer = GGUFWriter(path, family)
    tokens = [
        *byte_tokenizer().convert_ids_to_tokens(range(256)),
        "ab",
        "cd",
        "<|endoftext|>",
        "<|im_end|>",
        "<|fim|>",
        *more_tokens,
    ]
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token.startswith("<|") else TokenType.NORMAL for token in tokens])
    writer.add_token_merges(merges)
    kinds = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, bool: writer.add_bool}
    its = {f"{family}.{name}": size for name, size in sizes.items()} | {"tokenizer.ggml.model": "gpt2"}
    for name, value in (its | {name.replace("__", "."): value for name, value in fields.items()}).items():
        kinds.get(type(value), writer.add_array)(name, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_of(model: Any) -> tuple[dict[str, NDArray[np.float32]], dict[str, Any]]:
    """Return a Llama model's tensors and fields, as `write_gguf` takes them."""
    config, tensors = model.config, dict[str, NDArray[np.float32]]()
    its = {
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.block_count": config.num_hidden_layers,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.freq_base": config.rope_parameters["rope_theta"],
        "llama.vocab_size": config.vocab_size,
    }
    dim = config.head_dim
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:  # GGUF has the two rows of a RoPE pair next to each other
            pairs = array.reshape(-1, 2, dim // 2, array.shape[1])
            array = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)
        for ours, theirs in GGUF_NAMES.items():
            name = name.replace(ours, theirs)
        tensors[name] = array
    return tensors, its
