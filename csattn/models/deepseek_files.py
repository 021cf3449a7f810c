"""DeepSeek-V4's published files: their names of quantized weights, and the linear layers that are not quantized."""

import re

# patterns of DeepSeek's names of quantized weights, and the replacements that give transformers' names
_NAMES = (
    (r"^(?:model\.)?layers\.", "model.layers."),
    (r"\.attn\.indexer\.wq_b\.", ".self_attn.compressor.indexer.q_b_proj."),
    (r"\.attn\.w(q_a|q_b|kv|o_a|o_b)\.", r".self_attn.\1_proj."),
    (r"\.ffn\.((?:shared_)?experts)\.", r".mlp.\1."),
    (r"\.shared_experts\.w1\.", ".shared_experts.gate_proj."),
    (r"\.shared_experts\.w2\.", ".shared_experts.down_proj."),
    (r"\.shared_experts\.w3\.", ".shared_experts.up_proj."),
)
# linear layers in 16 bits, by parts of their names in transformers
PLAIN = (
    *("compressor.kv_proj", "compressor.gate_proj", "compressor.indexer.kv_proj", "compressor.indexer.gate_proj"),
    "compressor.indexer.scorer.weights_proj",
)


def in_model(name: str) -> str:
    """Translate a quantized weight's name to transformers'. `experts.0.w1` stays: there, all experts are one tensor."""
    for pattern, there in _NAMES:
        name = re.sub(pattern, there, name)
    return name
