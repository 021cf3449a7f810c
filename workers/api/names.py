"""What a context is called over HTTP: `model@context`."""

import re
from pathlib import PurePath

from workers.api.errors import quoted
from workers.serving.messages import CONTEXT_NAME, UnknownModelError

DEMO_MODEL = "smollm2-135m"  # the installed model, where the settings name none
_DEMO_FILE = "smollm2-135m-instruct"  # as its file, and so the command line, has it
_NAMELESS = "model"  # one whose name has no letter of a URL


def short_model_name(name: str | None) -> str:
    """The model's name without directory, owner and suffix, in small letters; nothing in it needs quoting in a URL."""
    return DEMO_MODEL if name in (None, _DEMO_FILE) else _plain(name) or _NAMELESS


def model_id(model: str, context: str) -> str:
    return f"{model}@{context}"


def context_of(asked: str, model: str) -> str:
    """The context that a model id names; whether there is one of that name is not looked up here."""
    name, at, context = asked.partition("@")
    if not at or not names_model(name, model) or CONTEXT_NAME.fullmatch(context) is None:
        raise UnknownModelError(
            f"there is no model {quoted(asked, 100)}; wanted {model}, or {model}@ and a context's name; GET /v1/models "
            "lists them",
            "model",
        )
    return context


def context_or_own(asked: str, model: str) -> str:
    """The same; empty for the model's name alone: then the prompt begins with what was kept."""
    return "" if "@" not in asked and names_model(asked, model) else context_of(asked, model)


def names_model(asked: str, model: str) -> bool:
    """In any usual spelling: in capitals, with an owner or a directory, whichever; the demo's as its file has it."""
    plain = _plain(asked)
    return plain == model or (model == DEMO_MODEL and plain == _DEMO_FILE)


def _plain(name: str) -> str:
    path = PurePath(name)
    if path.match("models--*/snapshots/*"):  # of the hub's cache: models--OWNER--NAME/snapshots/COMMIT
        path = PurePath(path.parents[1].name.split("--", 2)[-1])
    return re.sub(r"[^a-z0-9._-]+", "-", path.name.lower().removesuffix(".gguf")).strip("-.")
