"""What a context is called over HTTP: `model@context`."""

import re
from pathlib import PurePath

from workers.api.errors import quoted
from workers.serving.messages import CONTEXT_NAME, UnknownModelError

DEMO_MODEL = "smollm2-135m"  # the installed model, where the settings name none


def short_model_name(name: str | None) -> str:
    """The model's name without directory, owner and suffix, in small letters; nothing in it needs quoting in a URL."""
    last = PurePath(name or DEMO_MODEL).name
    plain = re.sub(r"[^a-z0-9._-]+", "-", last.lower().removesuffix(".gguf")).strip("-.")
    return plain or "model"


def model_id(model: str, context: str) -> str:
    return f"{model}@{context}"


def context_of(asked: str, model: str) -> str:
    """The context that a model id names; whether there is one of that name is not looked up here."""
    name, at, context = asked.partition("@")
    if not at or name != model or CONTEXT_NAME.fullmatch(context) is None:
        raise UnknownModelError(
            f"there is no model {quoted(asked, 100)}; wanted {model}, or {model}@ and a context's name; GET /v1/models "
            "lists them",
            "model",
        )
    return context


def context_or_own(asked: str, model: str) -> str:
    """The same; empty for the model's name alone: then the prompt begins with what was kept."""
    return "" if asked == model else context_of(asked, model)
