"""Warns of KV formats that do not keep a context's keys apart."""

import logging
from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from csattn.artifact import Artifact
from offload.codecs.formats import FORMATS, Format, KvFormat
from offload.codecs.key_error import key_error

TOO_LARGE = 0.8  # key error: with up to 0.63, answers were seen to stay the same; from 2.0 on, to change
_BETTER = "q8_0", "bfloat16"
_MAX_NAMED = 8  # layers in a warning
_log = logging.getLogger(__name__)


def warn_of_lossy_keys(
    artifact: Artifact,
    kv: Sequence[Tensor],  # of its indexed layers, [num_kv_heads, context_len, 2, head_dim] each, as built
    form: KvFormat,
) -> None:
    """Warn once per context (of the last 256) which layers' keys the format does not keep apart, and what to choose.

    Raises CodecError if the format cannot keep the rows.
    """
    model, errors = artifact.spec.model, _errors(kv, form.k)
    layers = [str(i) for i, error in zip(model.indexed_layers, errors, strict=True) if error > TOO_LARGE]
    if layers:
        named = f" ({', '.join(layers)})" if len(layers) <= _MAX_NAMED else ""
        _warn(
            f"the keys of context {artifact.spec.artifact_id} cannot be distinguished in {form.k.name}, in "
            f"{len(layers)} of {model.num_layers} layers{named}: its rounding errors are up to {max(errors):.1f} "
            f"times the differences between tokens, and above {TOO_LARGE:g} answers change; {_remedy(kv, form)}"
        )


def _errors(kv: Sequence[Tensor], form: Format) -> list[float]:
    return [key_error(layer, form) for layer in kv]


def _remedy(kv: Sequence[Tensor], form: KvFormat) -> str:
    for better in (FORMATS[name] for name in _BETTER):
        if kv[0].shape[-1] % better.unit_len == 0 and max(_errors(kv, better)) <= TOO_LARGE:
            return f"choose the KV codec {KvFormat(better, form.v)}"
    return "use no KV codec"


@lru_cache(maxsize=256)  # bounded, for a service that loads contexts for months
def _warn(sentence: str) -> None:
    _log.warning("%s", sentence)
