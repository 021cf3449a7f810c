"""Which artifacts this service can answer from: those that its model and its tokenizer made, while they are whole."""

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
_FEW = 64  # that may be gone from the store and still be known


@dataclass(frozen=True, slots=True)
class Known:
    """What was found where an artifact should be."""

    fault: str = ""  # why it cannot be answered from
    is_lost: bool = False  # it is missing or damaged, as far as opening it tells: it can be built there again
    token_ids: Tokens | None = None  # [context_len], of one without a fault
    spec: ArtifactSpec | None = None  # likewise
    stamp: int = 0  # of its files, as they were then


class Usable:
    """Asked on any thread. What was found holds as long as none of the artifact's files has changed."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._fingerprint, self._geometry = loaded.fingerprint, loaded.geometry
        self._tokenizer_hash = loaded.tokenizer_hash
        self._known: dict[Path, Known] = {}
        self._most_known = _FEW  # until it is looked which of them are gone

    def look(self, path: Path) -> Known:
        """At that path now. Of files that are as they were, sizes and times are read and nothing else."""
        try:
            return self._look(path)
        except ArtifactRoomError as error:
            return Known(f"{_CANNOT}: {error}")

    def _look(self, path: Path) -> Known:
        stamp = _stamp(path)
        known = self._known.get(path)
        if known is None or known.stamp != stamp:
            known = self._examine(path, stamp)
        return known

    def recall(self, path: Path) -> Known:
        """The same without asking the disk, where it could be answered from when it was last looked at."""
        known = self._known.get(path)
        return self.look(path) if known is None or known.fault else known

    def forget(self, path: Path) -> None:
        """It is removed."""
        self._known.pop(path, None)

    def open(self, path: Path) -> Artifact:
        """Open an artifact; before it is searched, `require_sound`. Raises ArtifactRoomError where others have to be
        closed first."""
        fault = self._look(path).fault
        try:
            if not fault:
                return open_artifact(path)
        except ArtifactRoomError:
            raise
        except ArtifactError as error:  # it has gone since
            fault = f"{_CANNOT}: {error}"
        raise ContextNotReadyError(fault)

    def require_sound(self, artifact: Artifact) -> None:
        """`Artifact.require_sound`. One that fails is not looked at again."""
        try:
            artifact.require_sound()
        except ArtifactError as error:
            fault = f"{_CANNOT}: {error}"
            self._known[artifact.path] = replace(self.look(artifact.path), fault=fault, token_ids=None)
            raise ContextNotReadyError(fault) from error

    def _examine(self, path: Path, stamp: int) -> Known:
        self._known.pop(path, None)
        try:
            with open_artifact(path) as artifact:
                known = self._of(artifact, stamp)
        except ArtifactRoomError:
            raise
        except ArtifactError as error:
            known = Known(f"{_CANNOT}: {error}", is_lost=True, stamp=stamp)
            if not isinstance(error, ArtifactCorruptError | ArtifactMismatchError):
                return known  # it may be there again, with the same files
        if len(self._known) >= self._most_known:
            self._forget_gone()
        self._known[path] = known
        return known

    def _forget_gone(self) -> None:
        """Other services remove contexts, too. Seldom enough that a listing of all does not look at all for each."""
        for path in list(self._known):
            if not path.exists():
                self.forget(path)
        self._most_known = 2 * len(self._known) + _FEW

    def _of(self, artifact: Artifact, stamp: int) -> Known:
        spec = artifact.spec
        try:
            artifact.require_model(self._fingerprint, self._geometry)
            artifact.require_tokenizer(self._tokenizer_hash)
        except ArtifactMismatchError as error:
            return Known(f"{_CANNOT}: {error}", stamp=stamp)
        return Known("", False, np.array(artifact.token_ids), spec, stamp)


def _stamp(path: Path) -> int:
    """Another one when any of the files is another, or was written to."""
    try:
        with os.scandir(path) as entries:
            files = [(entry.name, entry.stat()) for entry in entries]
    except OSError:  # gone, or no directory
        return 0
    return hash(frozenset((name, of.st_size, of.st_ino, of.st_ctime_ns) for name, of in files))
