"""Every refusal as HTTP: its status, and OpenAI's shape around its sentence."""

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from workers.serving.messages import ServingError

MAX_MESSAGE_CHARS = 1000  # written as JSON, at most six times as many bytes: see clipped

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
RETRY_AFTER_S = {429: 1.0, 503: 1.0}  # where the error itself does not say


class HttpError(ServingError):
    """A refusal of the HTTP side itself, with the status it goes by."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.status, self.code, self.message)


def error_body(error: ServingError) -> dict[str, Any]:
    """The object that OpenAI's clients look for, in a reply and in a stream alike."""
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    param = clipped(error.param, 64) if error.param else None
    return {"error": {"message": clipped(error.message), "type": kind, "param": param, "code": error.code}}


def error_reply(error: ServingError, headers: Mapping[str, str] | None = None) -> Response:
    """At most 4 KB, whatever the error says."""
    status = error.status
    extra = dict(headers or {})
    retry_after_s = error.retry_after_s if error.retry_after_s is not None else RETRY_AFTER_S.get(status)
    if retry_after_s is not None:
        extra["retry-after"] = str(max(1, math.ceil(retry_after_s)))
    if status == 409:
        extra["x-should-retry"] = "false"  # OpenAI's clients else try twice more within seconds
    return Response(json.dumps(error_body(error)), status, extra, "application/json")


def failed() -> ServingError:
    """What a client is told of a fault of ours."""
    return ServingError("the service failed at this request; its log says why")


def clipped(text: str, most: int = MAX_MESSAGE_CHARS) -> str:
    """What fits into a message, with a mark where some is missing: as JSON at most 3 * `most` bytes, and without halves
    of surrogate pairs, which not every client can read."""
    text = text.encode(errors="replace").decode()
    short = text if len(text) <= most else text[: most - 3] + "..."
    if len(json.dumps(short)) > 3 * most:
        short = short.encode("ascii", "replace").decode()
        short = "".join(char if char.isprintable() else "?" for char in short)
    return short


def quoted(value: object, most: int = 40) -> str:
    """What came, short enough to be repeated to whom it came from."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= most else text[:most] + "..."
