"""Which models' attention this project reproduces exactly; all others are refused by name."""

from typing import Any

from csattn.errors import ModelError

SUPPORTED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# These rotate a position by an angle that depends on the position alone, so captured keys stay valid
# however long the sequence grows.
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def require_supported(config: Any) -> None:
    """Refuse, with ModelError, a `transformers` config whose attention would come out wrong."""
    family = getattr(config, "model_type", None)
    if family not in SUPPORTED_FAMILIES:
        raise ModelError(
            f"model family {family!r} is not supported; csattn reproduces the attention of "
            f"{', '.join(SUPPORTED_FAMILIES)} models"
        )
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    slides = getattr(config, "sliding_window", None) if family == "mistral" else None
    if layer_types != {"full_attention"} or slides:
        raise ModelError(
            "this model attends through a sliding window in some layers, which csattn does not reproduce; "
            "use a model with full attention in every layer (for Mistral, v0.2 or later)"
        )
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise ModelError(
            f"this model's positions are scaled by {rope_type!r}, which changes stored keys as the sequence grows; "
            f"csattn supports {', '.join(SUPPORTED_ROPE_TYPES)}"
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
