"""Tokenises texts that are registered as contexts exactly as a build does."""

import numpy as np
from numpy.typing import NDArray

from csattn.artifact import Artifact, hash_token_ids
from csattn.config import preset
from csattn.errors import ContextError, ModelError
from csattn.models import LoadedModel
from csattn.models.prompt import (
    Wrapping,
    choose_wrapping,
    context_ids,
    require_indexable,
    require_not_far_too_long,
)
from csattn.plain_text import as_read, why_not_plain
from workers.serving.messages import BadRequestError
from workers.settings import BuildSettings


class ContextTexts:
    """Compares and validates texts. Usable from any thread; takes a second for some hundred thousand tokens."""

    def __init__(self, loaded: LoadedModel, settings: BuildSettings) -> None:
        self._loaded, self._settings = loaded, settings

    def is_of(self, artifact: Artifact, text: str) -> bool:
        """Whether the artifact was built from that text."""
        wrapping = artifact.manifest.build_notes.get("wrapping", "none")
        return hash_token_ids(self._ids(text, wrapping)) == artifact.spec.token_ids_sha256

    def require(self, text: str) -> None:
        """Raise BadRequestError if the text can never be a context."""
        if (advice := why_not_plain(text.encode())) is not None:
            raise BadRequestError(f"this is not plain text; {advice}, and send the result", "text")
        try:
            require_not_far_too_long(text, self._loaded)
            ids = self._ids(text, choose_wrapping(self._loaded.tokenizer, self._settings.chat))
            require_indexable(ids, preset(self._settings.preset), self._loaded)
        except (ContextError, ModelError) as error:
            raise BadRequestError(str(error), "text") from error

    def _ids(self, text: str, wrapping: Wrapping) -> NDArray[np.int32]:
        return context_ids(self._loaded.tokenizer, as_read(text), wrapping)
