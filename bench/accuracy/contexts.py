"""The artifacts of one context, one for each preset, built when first needed and then found in the store."""

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from csattn.artifact import Artifact, open_artifact
from csattn.config import preset
from csattn.models import LoadedModel
from index_build.pipeline import build_artifact


class Context:
    """Opens the artifacts of one context. Use it as a context manager: its end closes them."""

    def __init__(self, loaded: LoadedModel, token_ids: NDArray[np.int32], store: Path) -> None:
        self._loaded = loaded
        self._token_ids = token_ids
        self._store = store
        self._open: dict[str, Artifact] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def artifact(self, preset_name: str) -> Artifact:
        if preset_name not in self._open:
            config = preset(preset_name)
            report = build_artifact(self._loaded, self._token_ids, config, self._store)
            self._open[preset_name] = self._stack.enter_context(open_artifact(report.path))
        return self._open[preset_name]

    def any_artifact(self) -> Artifact:
        """Return an artifact for callers that do not use its index: an open one if possible."""
        return next(iter(self._open.values()), None) or self.artifact("default")
