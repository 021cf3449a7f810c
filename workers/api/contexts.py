"""Contexts, and the models that they are to OpenAI's clients, as objects."""

from collections.abc import Sequence
from typing import Any

from workers.api.errors import clipped, quoted
from workers.api.names import context_of, model_id
from workers.serving.messages import ContextInfo, UnknownContextError, UnknownModelError


def context_object(info: ContextInfo, model: str) -> dict[str, Any]:
    return {
        "id": info.name,
        "object": "context",
        "model": model_id(model, info.name),
        "state": info.state,
        "progress": info.progress,
        "what": clipped(info.what),
        "num_tokens": info.num_tokens,
        "artifact_id": info.artifact_id,
        "created_at": int(info.created_at),
    }


def model_objects(contexts: Sequence[ContextInfo], model: str) -> list[dict[str, Any]]:
    """The model alone, by which a chat program brings its own document; then one for each context that is ready."""
    alone = {"id": model, "object": "model", "created": 0, "owned_by": "csattn"}
    return [alone] + [
        {
            **alone,
            "id": model_id(model, info.name),
            "created": int(info.created_at),
            "context_tokens": info.num_tokens,
        }
        for info in contexts
        if info.state == "ready"
    ]


def model_object(contexts: Sequence[ContextInfo], asked: str, model: str) -> dict[str, Any]:
    """One of them."""
    for found in model_objects(contexts, model):
        if found["id"] == asked:
            return found
    name = context_of(asked, model)
    state = next((info.state for info in contexts if info.name == name), "not there")
    raise UnknownModelError(f"the context {name} is {state}; GET /v1/contexts/{name} says more", "model")


def listed(objects: list[dict[str, Any]]) -> dict[str, Any]:
    return {"object": "list", "data": objects}


def find_context(contexts: Sequence[ContextInfo], name: str) -> ContextInfo:
    for info in contexts:
        if info.name == name:
            return info
    raise UnknownContextError(f"there is no context {quoted(name, 64)}; GET /v1/contexts lists them", "name")
