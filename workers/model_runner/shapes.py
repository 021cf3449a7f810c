"""The shape of a model: what its tensors' sizes follow from, and the published shapes of some models."""

from dataclasses import dataclass, field
from typing import Any

from csattn.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A Llama-like model: pre-norm, grouped-query attention, gated SiLU in the MLP."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope: dict[str, Any] = field(default_factory=dict)  # as transformers' rope_parameters
    qkv_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and k, before RoPE
    tied_embedding: bool = False  # the output head is the embedding

    @property
    def q_width(self) -> int:
        return self.num_q_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        return self.q_width + 2 * self.kv_width

    @property
    def softmax_scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def streamed_params(self) -> int:
        """Parameters that every decode step reads: all but the embedding, of which it reads a row."""
        layer = self.hidden_size * (self.qkv_width + self.q_width + 3 * self.intermediate_size)
        return self.num_layers * layer + self.vocab_size * self.hidden_size


def shape_named(name: str) -> ModelShape:
    """Raises ModelError when there is none of that name."""
    if name not in SHAPES:
        raise ModelError(f"there is no model shape {name!r}; choose one of {', '.join(SHAPES)}")
    return SHAPES[name]


def shape_of(config: Any) -> ModelShape:
    """The shape that a `transformers` config of a supported family describes."""
    family = config.model_type
    return ModelShape(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_q_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        norm_eps=config.rms_norm_eps,
        rope=dict(config.rope_parameters or {}),
        qkv_bias=family == "qwen2" or bool(getattr(config, "attention_bias", False)),
        qk_norm=family == "qwen3",
        tied_embedding=bool(config.tie_word_embeddings),
    )


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


SHAPES: dict[str, ModelShape] = {
    "llama-3.1-8b": ModelShape(
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
    "llama-3.2-1b": ModelShape(
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
    "llama-3.2-3b": ModelShape(
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
    "qwen2.5-7b": ModelShape(
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
    "qwen3-8b": ModelShape(
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
    "mistral-7b-v0.3": ModelShape(
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
    "smollm2-135m": ModelShape(
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
