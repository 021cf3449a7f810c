"""The artifacts of one context, an index per preset, built when first asked for and found again in the store."""

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
    """Use as a context manager: the artifacts that were opened are closed at its end."""

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
        """One whose index does not matter: an open one if there is one."""
        return next(iter(self._open.values()), None) or self.artifact("default")
