"""What the log is told of requests: never what they ask, nor what they ask it with."""

import logging
from collections.abc import MutableMapping
from typing import Any
from urllib.parse import quote

from workers.api.errors import clipped
from workers.serving.messages import Done, ServingError

log = logging.getLogger("csattn.api")

_MAX_CHARS = 200
Scope = MutableMapping[str, Any]


def tell_failure(scope: Scope, error: ServingError) -> None:
    """Of what no client could have asked better: an overload, a time-out, a fault of ours."""
    if error.status >= 500 or error.status == 429:
        why = clipped(" ".join(error.message.split()))
        log.warning("%s: %d %s, %s (request %s)", request_line(scope), error.status, error.code, why, _id(scope))


def tell_request(scope: Scope, status: int, took_s: float) -> None:
    """Any of them, when it is over."""
    dones: list[Done] = scope["state"].get("dones", [])
    tokens = ""
    if dones:
        prompt = sum(done.context_tokens + done.question_tokens for done in dones)
        cached, new = (sum(getattr(done, name) for done in dones) for name in ("cached_tokens", "new_tokens"))
        tokens = f", {prompt} prompt {cached} cached {new} new tokens"
    log.info("%s: %d in %.0f ms%s (request %s)", request_line(scope), status, 1000 * took_s, tokens, _id(scope))


def request_line(scope: Scope) -> str:
    """Method and path without its query, quoted: clients invent them, and a line of the log is one line."""
    return f"{quote(scope['method'][:16])} {quote(scope['path'][:_MAX_CHARS])}"


def _id(scope: Scope) -> str:
    """The one that the reply has."""
    return str(scope["state"]["reply_id"])
