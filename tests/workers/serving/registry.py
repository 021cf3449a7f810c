"""Named contexts without a service. In a file of its own, so that a process can use it without transformers."""

from pathlib import Path
from typing import Any

from csattn.artifact import Artifact
from workers.serving.context_build import Builder
from workers.serving.context_texts import ContextTexts
from workers.serving.contexts import Contexts
from workers.serving.examiner import Examination
from workers.settings import BuildSettings, ModelSettings, Settings, StoreSettings


def settings_of(place: Path, model: Path | None = None) -> Settings:
    return Settings(
        store=StoreSettings(path=place / "store"),
        model=ModelSettings(name=str(model or place / "model")),
        build=BuildSettings(device="cpu"),
    )


class AnyText(ContextTexts):
    """Accepts any text: only its build finds out whether it can be a context."""

    def __init__(self) -> None: ...

    def is_of(self, artifact: Artifact, text: str) -> bool:
        return False

    def require(self, text: str) -> None: ...


def registry(place: Path, **options: Any) -> Contexts:
    builder = Builder(settings_of(place, **options))
    return Contexts(place / "store", builder, AnyText(), lambda path: Examination(is_lost=not path.exists()))
