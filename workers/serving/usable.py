"""Which artifacts this service can answer from: those that its model and its tokenizer made."""

from pathlib import Path

from csattn.artifact import Artifact, open_artifact
from csattn.errors import ArtifactError, ArtifactMismatchError
from csattn.models import LoadedModel
from workers.serving.messages import ContextNotReadyError

_CANNOT = "the context's artifact cannot be used"


class Usable:
    """Asked on any thread."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._fingerprint, self._geometry = loaded.fingerprint, loaded.geometry
        self._tokenizer_hash = loaded.tokenizer_hash
        self._known: dict[str, str] = {}  # faults by artifact's id: what has that id is always the same

    def fault(self, path: Path) -> str:
        """Why it cannot answer from the artifact at that path, by its manifest; empty where it can.

        Each is looked at once, but for those that are missing or damaged, then or when they were to be opened: they may
        be there again.
        """
        if path.name not in self._known:
            try:
                self._open(path).close()
                self._known[path.name] = ""
            except ArtifactMismatchError as error:
                self._known[path.name] = f"{_CANNOT}: {error}"
            except ArtifactError as error:
                return f"{_CANNOT}: {error}"
        return self._known[path.name]

    def open(self, path: Path) -> Artifact:
        """Open an artifact; before it is searched, `require_sound`."""
        try:
            return self._open(path)
        except ArtifactError as error:
            self._known.pop(path.name, None)  # it has gone since
            raise ContextNotReadyError(f"{_CANNOT}: {error}") from error

    def require_sound(self, artifact: Artifact) -> None:
        """Check all that a search relies on, so that loading it is quick."""
        try:
            artifact.indexes()
        except ArtifactError as error:
            raise ContextNotReadyError(f"{_CANNOT}: {error}") from error

    def _open(self, path: Path) -> Artifact:
        artifact = open_artifact(path)
        artifact.require_model(self._fingerprint, self._geometry)
        artifact.require_tokenizer(self._tokenizer_hash)
        return artifact
