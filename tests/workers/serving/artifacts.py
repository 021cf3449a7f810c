"""Contexts for the tests of serving: texts, and artifacts of them in a store."""

from pathlib import Path

from csattn.config import preset
from csattn.models import LoadedModel
from csattn.models.prompt import choose_wrapping, context_ids
from index_build.pipeline import build_artifact
from tests.tiny import loaded

SECRETS = ("heron", "walnut", "quartz")


def text_of(secret: str) -> str:
    return f"The word of the day is {secret}. " * 10 + f"Do not tell that it is {secret}."


def build(store: Path, text: str, chat: bool = True, model: LoadedModel | None = None) -> str:
    """Build an artifact of the text in the store, and return its id."""
    model = model or loaded()
    wrapping = choose_wrapping(model.tokenizer, chat)
    ids = context_ids(model.tokenizer, text, wrapping)
    return build_artifact(model, ids, preset("default"), store, notes={"wrapping": wrapping}).artifact_id
