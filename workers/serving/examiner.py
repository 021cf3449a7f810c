"""Which artifacts this service can answer from: intact ones that its own model and tokenizer made."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from csattn.artifact import Artifact, ArtifactSpec, open_artifact
from csattn.errors import ArtifactCorruptError, ArtifactError, ArtifactMismatchError, ArtifactRoomError
from csattn.models import LoadedModel
from workers.serving.messages import ContextNotReadyError

Tokens = NDArray[np.int32]
_CANNOT = "the context's artifact cannot be used"
_FEW = 64  # removed artifacts that may be remembered, beside as many as are known


@dataclass(frozen=True, slots=True)
class Examination:
    """The result of examining an artifact's path."""

    fault: str = ""  # why this service cannot answer from it
    is_lost: bool = False  # opening it has shown that it is missing or damaged, so it can be built again
    is_foreign: bool = False  # another model or tokenizer made it, as its id says: that does not change
    token_ids: Tokens | None = None  # [context_len]; None with a fault
    spec: ArtifactSpec | None = None  # None with a fault
    stamp: int = 0  # `_stamp` of its files when they were examined


class Examiner:
    """Examines artifacts, on any thread. A result is remembered as long as none of the artifact's files changes."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._made_by = loaded.fingerprint, loaded.geometry, loaded.tokenizer_hash
        self._known: dict[Path, Examination] = {}
        self._max_remembered = _FEW  # entries from which removed artifacts are looked for

    def examine(self, path: Path) -> Examination:
        """Examine the artifact at that path. If its files have not changed, this costs only a `stat` of each."""
        try:
            return self._examine(path)
        except ArtifactRoomError as error:
            return Examination(f"{_CANNOT}: {error}")

    def _examine(self, path: Path) -> Examination:
        stamp = _stamp(path)
        known = self._known.get(path)
        if known is None or known.stamp != stamp:
            known = self._examine_files(path, stamp)
        return known

    def recall(self, path: Path) -> Examination:
        """`examine`, without touching the disk if the artifact was usable, or another model's, when last examined."""
        known = self._known.get(path)
        return known if known is not None and (known.is_foreign or not known.fault) else self.examine(path)

    def forget(self, path: Path) -> None:
        """Forget an artifact that has been removed."""
        self._known.pop(path, None)

    def open(self, path: Path) -> Artifact:
        """Open a usable artifact; call `require_sound` before it is searched.

        Raises ContextNotReadyError if it cannot be used, ArtifactRoomError if others have to be closed first.
        """
        fault = self._examine(path).fault
        try:
            if not fault:
                return open_artifact(path)
        except ArtifactRoomError:
            raise
        except ArtifactError as error:  # removed meanwhile
            fault = f"{_CANNOT}: {error}"
        raise ContextNotReadyError(fault)

    def require_sound(self, artifact: Artifact) -> None:
        """`Artifact.require_sound`. An artifact that fails is not examined again until its files change."""
        try:
            artifact.require_sound()
        except ArtifactError as error:
            fault = f"{_CANNOT}: {error}"
            self._known[artifact.path] = replace(self.examine(artifact.path), fault=fault, token_ids=None)
            raise ContextNotReadyError(fault) from error

    def _examine_files(self, path: Path, stamp: int) -> Examination:
        self._known.pop(path, None)
        try:
            with open_artifact(path) as artifact:
                known = self._of(artifact, stamp)
        except ArtifactRoomError:
            raise
        except ArtifactError as error:
            known = Examination(f"{_CANNOT}: {error}", is_lost=True, stamp=stamp)
            if not isinstance(error, ArtifactCorruptError | ArtifactMismatchError):
                return known  # not remembered: its path may come back with the same files
        if len(self._known) >= self._max_remembered:
            self._forget_removed()
        self._known[path] = known
        return known

    def _forget_removed(self) -> None:
        """Forget artifacts that other services have removed. `_max_remembered` doubles, so the cost is amortised."""
        for path in list(self._known):
            if not path.exists():
                self.forget(path)
        self._max_remembered = 2 * len(self._known) + _FEW

    def _of(self, artifact: Artifact, stamp: int) -> Examination:
        spec = artifact.spec
        try:
            artifact.require_model(*self._made_by)
        except ArtifactMismatchError as error:
            return Examination(f"{_CANNOT}: {error}", is_foreign=True, stamp=stamp)
        return Examination(token_ids=np.array(artifact.token_ids), spec=spec, stamp=stamp)


def _stamp(path: Path) -> int:
    """A hash of the files' names, sizes, inodes and change times; 0 if the directory cannot be read."""
    try:
        with os.scandir(path) as entries:
            files = [(entry.name, entry.stat()) for entry in entries]
    except OSError:  # gone, or no directory
        return 0
    return hash(frozenset((name, of.st_size, of.st_ino, of.st_ctime_ns) for name, of in files))
