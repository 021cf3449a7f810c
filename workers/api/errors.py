"""Errors over HTTP: their status, and OpenAI's or Anthropic's format around the message."""

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from workers.serving.messages import ServingError

MAX_MESSAGE_CHARS = 1000  # as JSON at most three times as many bytes: see `clipped`

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
# those of Anthropic's that are not the same
MESSAGE_TYPES = {409: "invalid_request_error", 413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}
RETRY_AFTER_S = {429: 1.0, 503: 1.0}  # if the error itself has none


class HttpError(ServingError):
    """An error of the HTTP side itself, with its status."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.status, self.code, self.message)


def own_path(scope: Mapping[str, Any]) -> str:
    """Return the path without the root path of a server in front of this one."""
    return str(scope["path"].removeprefix(scope.get("root_path", "")))


def error_body(error: ServingError, path: str = "") -> dict[str, Any]:
    """Return the object that OpenAI's clients look for, or at these paths Anthropic's, in replies and streams alike."""
    of_messages = path.startswith("/v1/messages")
    types = TYPES | MESSAGE_TYPES if of_messages else TYPES
    other = "invalid_request_error" if error.status < 500 else "api_error" if of_messages else "server_error"
    param = clipped(error.param, 64) if error.param else None
    kind = types.get(error.status, other)
    told: dict[str, Any] = {"message": clipped(error.message), "type": kind, "param": param, "code": error.code}
    if of_messages:
        return {"type": "error", "error": told | {"details": {"error_code": error.code}}}
    return {"error": told}


def error_reply(error: ServingError, path: str = "", headers: Mapping[str, str] | None = None) -> Response:
    """Return the reply for an error, of at most 4 KB whatever its message."""
    status = error.status
    extra = dict(headers or {})
    retry_after_s = error.retry_after_s if error.retry_after_s is not None else RETRY_AFTER_S.get(status)
    if retry_after_s is not None:
        extra["retry-after"] = str(max(1, math.ceil(retry_after_s)))
    if status == 409:
        extra["x-should-retry"] = "false"  # else OpenAI's clients retry twice within seconds
    return Response(json.dumps(error_body(error, path)), status, extra, "application/json")


def failed() -> ServingError:
    """Return the error that a client gets for a bug of the service."""
    return ServingError("the service failed at this request; its log says why")


def clipped(text: str, most: int = MAX_MESSAGE_CHARS) -> str:
    """Shorten a text to what fits into a message, with "..." if some is missing.

    As JSON it takes at most 3 * `most` bytes. It has no lone surrogates, which not every client can read.
    """
    text = text.encode(errors="replace").decode()
    short = text if len(text) <= most else text[: most - 3] + "..."
    if len(json.dumps(short)) > 3 * most:
        short = short.encode("ascii", "replace").decode()
        short = "".join(char if char.isprintable() else "?" for char in short)
    return short


def quoted(value: object, most: int = 40) -> str:
    """Return a value that a client sent, shortened for an error message to it."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= most else text[:most] + "..."
