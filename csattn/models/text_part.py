"""The text model within a vision-language model: its part of the config and of the checkpoint."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from csattn.errors import ModelError
from csattn.models.families import FAMILIES

# name prefixes of text models in checkpoints, as the text model alone has them; and of the parts beside it
TEXT_MODEL_AT = {
    r"^model\.(language|text)_model\.": "model.",
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head": "lm_head",
    r"^backbone\.": "model.",  # Nemotron-H
}
_OF_QUANTIZED = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv")
NOT_TEXT = re.compile(
    r"(model\.)?(vision|visual|audio|multi_modal|mm_projector|embed_vision|embed_audio|connector|image_newline|mtp)"
)


def class_of(config: Any) -> Any:
    """Return the class in `transformers` of the model that generates text and has this config."""
    import transformers

    if config.model_type == "mistral4":  # `AutoModelForCausalLM` knows only the whole model, which sees images
        return transformers.Mistral4ForCausalLM
    return transformers.AutoModelForCausalLM._model_mapping[type(config)]


def text_config(config: Any) -> Any:
    """Return the text model's config of a vision-language model; of other models, the config itself."""
    text = getattr(config, "text_config", None)
    if text is None or text.model_type not in FAMILIES:
        return config
    if (quantization := getattr(config, "quantization_config", None)) is not None:
        text.quantization_config = quantization
    text.tie_word_embeddings = getattr(config, "tie_word_embeddings", text.tie_word_embeddings)
    text.dtype = text.dtype or config.dtype  # published files have it only at the top
    if (ends := getattr(config, "eos_token_id", None)) is not None:
        text.eos_token_id = ends
    return text


def named_as_text(name: str) -> str:
    """Translate a tensor's name in the whole model into its name in the text model."""
    for pattern, there in TEXT_MODEL_AT.items():
        name = re.sub(pattern, there, name)
    return name


def named_if_text(name: str) -> str | None:
    """Like `named_as_text`, but None for a tensor that is not the text model's."""
    return None if NOT_TEXT.match(name := named_as_text(name)) else name


@contextmanager
def without_reports() -> Iterator[None]:
    """While open, `transformers` does not write what `require_whole` refuses.

    Raises ModelError where `transformers` refers to what it would have written.
    """
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    except RuntimeError as error:
        if "report" not in str(error):
            raise
        raise ModelError(
            "tensors of the checkpoint do not fit together, such as those of experts of which one is missing or has "
            "another shape; download all of it again"
        ) from error
    finally:
        logging.set_verbosity(verbosity)


def require_plain(found: dict[str, Any]) -> None:
    """Raise ModelError for quantized weights in a checkpoint whose config does not say how to decode them."""
    if codes := [name for name in sorted(found["unexpected_keys"]) if name.endswith(_OF_QUANTIZED)]:
        raise ModelError(
            f"the checkpoint has {codes[0]}, of quantized weights, and its config.json has no quantization_config that "
            "says how to decode them; add that (GPTQ and AWQ may have it in quantize_config.json or quant_config.json)"
        )


def require_whole(found: dict[str, Any], is_part: bool) -> None:
    """Raise ModelError if a tensor was missing, unexpected or of another shape.

    found: the loading info of `transformers`. is_part: tensors beside the text model may be left over.
    """
    mismatched = {name: (tuple(there), tuple(wanted)) for name, there, wanted in found["mismatched_keys"]}
    for name, (there, wanted) in sorted(mismatched.items()):
        raise ModelError(
            f"its {name} has shape {there} where its config wants {wanted}; the two belong to different models"
        )
    for kind, what in (
        ("missing_keys", "lacks {}, which its config requires; part of the checkpoint has not been downloaded"),
        ("unexpected_keys", "has {}, which a model with its config does not have; it was saved from another model"),
    ):
        names = sorted(set(found[kind]) - set(mismatched))
        if names := [name for name in names if not (is_part and NOT_TEXT.match(name))]:
            more = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
            raise ModelError("the checkpoint " + what.format(f"{names[0]}{more}"))
