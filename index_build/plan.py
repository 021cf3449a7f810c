"""Plan a context's artifact: its token ids, its spec, and the notes of its manifest."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from csattn import __version__
from csattn.artifact import ArtifactSpec, hash_token_ids
from csattn.artifact.manifest import NOT_ROUNDED
from csattn.build_options import BuildOptions
from csattn.config import IndexConfig
from csattn.errors import ConfigError, ContextError
from csattn.models import LoadedModel
from csattn.models.prompt import choose_wrapping, context_ids, require_indexable, require_not_far_too_long
from csattn.torch_modes import without_modes
from index_build.codebooks import kmeans_version
from index_build.inputs import make_config


@dataclass(frozen=True, slots=True)
class Plan:
    """An artifact to be built, and what its manifest will record."""

    spec: ArtifactSpec
    token_ids: NDArray[np.int32]  # [context_len]
    notes: Mapping[str, Any]  # JSON
    versions: Mapping[str, Any]


@without_modes()
def make_plan(loaded: LoadedModel, token_ids: NDArray[np.int32], config: IndexConfig, notes: Mapping[str, Any]) -> Plan:
    """Plan the artifact of these tokens.

    Raises ContextError if they cannot be indexed, ModelError if the model has changed since it was loaded, ConfigError
    if they are no token ids, if the notes are no JSON, or if a library that the index needs is not installed.
    """
    token_ids = _int32(token_ids)
    _require_json(notes)
    loaded.require_unchanged()
    require_indexable(token_ids, config, loaded)
    versions = {**_library_versions(loaded.device), **kmeans_version(config)}
    spec = ArtifactSpec(
        model_name=loaded.name,
        model_fingerprint=loaded.fingerprint,
        model=loaded.geometry,
        tokenizer_hash=loaded.tokenizer_hash,
        token_ids_sha256=hash_token_ids(token_ids),
        context_len=len(token_ids),
        index_config=config,
        kv_dtype=str(loaded.dtype).removeprefix("torch."),  # type: ignore[arg-type]  # the spec refuses others
    )
    recorded_notes = {**notes, "weights": loaded.rounding or NOT_ROUNDED}
    return Plan(spec, token_ids, recorded_notes, versions)


def _int32(token_ids: Any) -> NDArray[np.int32]:
    """Return token ids as int32. Raises ConfigError unless they are integers in one row, ContextError for other ids."""
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise ConfigError(
            f"a context's token ids must be whole numbers in one row, [context_len], got {ids.dtype} of shape "
            f"{list(ids.shape)}; give those of one text, as a tokenizer returns them"
        )
    for end in (ids.min(initial=0), ids.max(initial=0)):
        if not 0 <= end < 1 << 31:
            raise ContextError(f"the context has the token id {end}; give ids of the model's vocabulary")
    return ids.astype(np.int32, copy=False)


def _require_json(notes: Mapping[str, Any]) -> None:
    """Raise ConfigError for notes that the manifest, which is written last, could not keep."""
    try:
        json.dumps({**notes}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"notes of an artifact are kept as a JSON object, got {notes!r} ({error}); give one"
        ) from error


def plan_text(text: str, source: str, options: BuildOptions, loaded: LoadedModel, index_device: str) -> Plan:
    """Plan the artifact of a text. source: the text's name, for the manifest; index_device: where the index is made."""
    require_not_far_too_long(text, loaded)
    wrapping = choose_wrapping(loaded.tokenizer, options.chat)
    token_ids = context_ids(loaded.tokenizer, text, wrapping)
    return plan_tokens(token_ids, source, options, loaded, index_device, wrapping)


def plan_tokens(
    token_ids: NDArray[np.int32],  # [context_len], taken as they are
    source: str,
    options: BuildOptions,
    loaded: LoadedModel,
    index_device: str,
    wrapping: str = "none",
) -> Plan:
    """Plan the artifact of token ids. The other arguments are those of `plan_text`."""
    config = make_config(options.preset, options.index_changes, index_device)
    notes = {"wrapping": wrapping, "preset": options.preset, "source": source}
    return make_plan(loaded, token_ids, config, notes)


def _library_versions(device: torch.device) -> dict[str, Any]:
    return {
        "csattn": __version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "numpy": np.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }
