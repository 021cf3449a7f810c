"""What the log is told of requests: never what they ask, nor what they ask it with."""

import logging
from collections.abc import MutableMapping
from typing import Any
from urllib.parse import quote

from workers.api.errors import clipped
from workers.serving.messages import ServingError, Usage

log = logging.getLogger("csattn.api")

_MAX_CHARS = 200
Scope = MutableMapping[str, Any]


def tell_failure(scope: Scope, error: ServingError) -> None:
    """Of what no client could have asked better: an overload, a time-out, a fault of ours or of a file."""
    if error.status >= 500 or error.status == 429 or error.detail:
        why = clipped(" ".join((error.detail or error.message).split()))
        log.warning("%s: %d %s, %s (request %s)", request_line(scope), error.status, error.code, why, _id(scope))


def tell_request(scope: Scope, status: int, took_s: float) -> None:
    """Any of them, when it is over."""
    state = scope["state"]
    broken_off = f", broken off: {state['broken_off']}," if "broken_off" in state else ""
    used: list[Usage] = list(state.get("used", {}).values())
    tokens = ""
    if used:
        prompt = sum(of.context_tokens + of.question_tokens for of in used)
        cached, new = (sum(getattr(of, name) for of in used) for name in ("cached_tokens", "new_tokens"))
        tokens = f", {prompt} prompt {cached} cached {new} new tokens"
    how = f"{status}{broken_off} in {1000 * took_s:.0f} ms{tokens}"
    log.info("%s: %s (request %s)", request_line(scope), how, _id(scope))


def request_line(scope: Scope) -> str:
    """Method and path without its query, quoted: clients invent them, and a line of the log is one line."""
    return f"{quote(scope['method'][:16])} {quote(scope['path'][:_MAX_CHARS])}"


def _id(scope: Scope) -> str:
    """The one that the reply has."""
    return str(scope["state"]["reply_id"])
