"""Contexts as JSON objects: as such, and as the models that OpenAI's and Anthropic's clients see."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from workers.api.errors import clipped, quoted
from workers.api.names import context_or_own, model_id
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


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that the service answers with."""

    name: str
    since: int  # in seconds since the epoch
    max_positions: int


def model_objects(contexts: Sequence[ContextInfo], model: ServedModel) -> list[dict[str, Any]]:
    """Return the model itself, for clients that send their own document, then one model for each ready context."""
    return [_model_object(model.name, model.since, model.max_positions)] + [
        _model_object(model_id(model.name, info.name), int(info.created_at), model.max_positions)
        | {"context_tokens": info.num_tokens}
        for info in contexts
        if info.state == "ready"
    ]


def _model_object(name: str, since: int, max_positions: int) -> dict[str, Any]:
    of_openai = {"id": name, "object": "model", "created": since, "owned_by": "csattn"}
    of_anthropic = {
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(since, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": max_positions,
    }
    return {**of_openai, **of_anthropic, "max_model_len": max_positions}  # the last is vLLM's


def model_object(contexts: Sequence[ContextInfo], requested_model: str, model: ServedModel) -> dict[str, Any]:
    """Return the object of one model id. Raises UnknownModelError for one that is not in the list."""
    context = context_or_own(requested_model, model.name)
    wanted = model_id(model.name, context) if context else model.name
    for found in model_objects(contexts, model):
        if found["id"] == wanted:
            return found
    for info in contexts:
        if info.name == context:
            what = f"the context {context} is {info.state}; GET /v1/contexts/{context} shows details"
            raise UnknownModelError(what, "model")
    raise UnknownModelError(f"there is no context {quoted(context, 64)}; GET /v1/contexts lists them", "model")


def listed(objects: list[dict[str, Any]]) -> dict[str, Any]:
    return {"object": "list", "data": objects}


def listed_models(objects: list[dict[str, Any]]) -> dict[str, Any]:
    of_anthropic = {"has_more": False, "first_id": objects[0]["id"], "last_id": objects[-1]["id"]}
    return {**listed(objects), **of_anthropic}


def find_context(contexts: Sequence[ContextInfo], name: str) -> ContextInfo:
    for info in contexts:
        if info.name == name:
            return info
    raise UnknownContextError(f"there is no context {quoted(name, 64)}; GET /v1/contexts lists them", "name")
