"""The published shapes of some models."""

from typing import Any

from csattn.errors import ModelError
from csattn.models.spec import ModelSpec, llama_like


def shape_named(name: str) -> ModelSpec:
    """Raises ModelError when there is none of that name."""
    if name not in SHAPES:
        raise ModelError(f"there is no model shape {name!r}; choose one of {', '.join(SHAPES)}")
    return SHAPES[name]


def _default_rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


def _llama3_rope(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


SHAPES: dict[str, ModelSpec] = {
    "llama-3.1-8b": llama_like(
        num_layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        num_q_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=128_256,
        max_positions=131_072,
        norm_eps=1e-5,
        rope=_llama3_rope(8.0),
    ),
    "llama-3.2-1b": llama_like(
        num_layers=16,
        hidden_size=2048,
        intermediate_size=8192,
        num_q_heads=32,
        num_kv_heads=8,
        head_dim=64,
        vocab_size=128_256,
        max_positions=131_072,
        norm_eps=1e-5,
        rope=_llama3_rope(32.0),
        tied_embedding=True,
    ),
    "llama-3.2-3b": llama_like(
        num_layers=28,
        hidden_size=3072,
        intermediate_size=8192,
        num_q_heads=24,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=128_256,
        max_positions=131_072,
        norm_eps=1e-5,
        rope=_llama3_rope(32.0),
        tied_embedding=True,
    ),
    "qwen2.5-7b": llama_like(
        num_layers=28,
        hidden_size=3584,
        intermediate_size=18944,
        num_q_heads=28,
        num_kv_heads=4,
        head_dim=128,
        vocab_size=152_064,
        max_positions=32_768,
        norm_eps=1e-6,
        rope=_default_rope(1_000_000.0),
        qkv_bias=True,
    ),
    "qwen3-8b": llama_like(
        num_layers=36,
        hidden_size=4096,
        intermediate_size=12288,
        num_q_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=151_936,
        max_positions=40_960,
        norm_eps=1e-6,
        rope=_default_rope(1_000_000.0),
        qk_norm=True,
    ),
    "mistral-7b-v0.3": llama_like(
        num_layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        num_q_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=32_768,
        max_positions=32_768,
        norm_eps=1e-5,
        rope=_default_rope(1_000_000.0),
    ),
    "smollm2-135m": llama_like(
        num_layers=30,
        hidden_size=576,
        intermediate_size=1536,
        num_q_heads=9,
        num_kv_heads=3,
        head_dim=64,
        vocab_size=49_152,
        max_positions=8192,
        norm_eps=1e-5,
        rope=_default_rope(100_000.0),
        tied_embedding=True,
    ),
}
