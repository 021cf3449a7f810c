"""Log lines about requests: never their content, nor their API keys."""

import logging
from collections.abc import MutableMapping
from typing import Any
from urllib.parse import quote

from workers.api.errors import clipped
from workers.serving.messages import ServingError, Usage

log = logging.getLogger("csattn.api")

_MAX_CHARS = 200
Scope = MutableMapping[str, Any]


def log_failure(scope: Scope, error: ServingError) -> None:
    """Log a failure that is not the client's fault: an overload, a timeout, a bug, a broken file."""
    if error.status >= 500 or error.status == 429 or error.detail:
        why = clipped(" ".join((error.detail or error.message).split()))
        log.warning("%s: %d %s, %s (request %s)", request_line(scope), error.status, error.code, why, _id(scope))


def log_request(scope: Scope, status: int, took_s: float) -> None:
    """Log a request when it is over (the access log)."""
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
    """Return method and path without the query, quoted: clients invent them, and a log entry must stay one line."""
    return f"{quote(scope['method'][:16])} {quote(scope['path'][:_MAX_CHARS])}"


def _id(scope: Scope) -> str:
    """Return the request id that the reply has."""
    return str(scope["state"]["reply_id"])
