"""Model ids over HTTP: `model`, or `model@context`."""

import re
from pathlib import PurePath

from workers.api.errors import quoted
from workers.serving.messages import CONTEXT_NAME, UnknownModelError

DEMO_MODEL = "smollm2-135m"  # the installed model, if the settings name none
_DEMO_FILE = "smollm2-135m-instruct"  # the name of its file, and so on the command line
_NAMELESS = "model"  # for a model whose name has no character that a URL may have


def short_model_name(name: str | None) -> str:
    """The model's name without directory, owner and suffix, in small letters; nothing in it needs quoting in a URL."""
    return DEMO_MODEL if name in (None, _DEMO_FILE) else _plain(name) or _NAMELESS


def model_id(model: str, context: str) -> str:
    return f"{model}@{context}"


def context_or_own(given: str, model: str) -> str:
    """Return the context in a model id, without looking up whether it exists; "" for the model's name alone: the
    prompt's beginning then finds its context."""
    name, at, context = given.partition("@")
    if not names_model(name, model) or (at and CONTEXT_NAME.fullmatch(context) is None):
        raise UnknownModelError(
            f"there is no model {quoted(given, 100)}; wanted {model}, or {model}@ and a context's name; GET /v1/models "
            "lists them",
            "model",
        )
    return context


def names_model(given: str, model: str) -> bool:
    """Whether `given` names the model, in any usual spelling: capitals, an owner or directory, the demo's file name."""
    plain = _plain(given)
    return plain == model or (model == DEMO_MODEL and plain == _DEMO_FILE)


def _plain(name: str) -> str:
    path = PurePath(name)
    if path.match("models--*/snapshots/*"):  # of the hub's cache: models--OWNER--NAME/snapshots/COMMIT
        path = PurePath(path.parents[1].name.split("--", 2)[-1])
    return re.sub(r"[^a-z0-9._-]+", "-", path.name.lower().removesuffix(".gguf")).strip("-.")
