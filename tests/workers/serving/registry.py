"""Contexts by name without a service. In a file of its own: a process of this alone need not load transformers."""

from pathlib import Path
from typing import Any

from workers.serving.context_build import Builder
from workers.serving.contexts import Contexts
from workers.serving.usable import Known
from workers.settings import BuildSettings, ModelSettings, Settings, StoreSettings


def settings_of(place: Path, model: Path | None = None) -> Settings:
    return Settings(
        store=StoreSettings(path=place / "store"),
        model=ModelSettings(name=str(model or place / "model")),
        build=BuildSettings(device="cpu"),
    )


def registry(place: Path, **options: Any) -> Contexts:
    builder = Builder(settings_of(place, **options))
    return Contexts(
        place / "store", builder, lambda artifact, text: False, lambda path: Known(is_lost=not path.exists())
    )
