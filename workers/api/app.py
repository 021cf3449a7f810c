"""The HTTP application: its routes and their handlers. It holds no model; a `Backend` decodes."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse, Response
from starlette.routing import Match

from csattn import __version__
from csattn.errors import ConfigError
from workers.api.answering import Answering, EventStream, cancel_if_disconnected
from workers.api.anthropic import read_count, read_message
from workers.api.body import BodyReader, Pace
from workers.api.contexts import (
    ServedModel,
    context_object,
    find_context,
    listed,
    listed_models,
    model_object,
    model_objects,
)
from workers.api.errors import HttpError, error_reply, own_path, quoted
from workers.api.fields import Fields
from workers.api.guard import Guard
from workers.api.measures import Measures
from workers.api.names import context_or_own, short_model_name
from workers.api.parsing import MAX_TOKEN_ID, ParsedRequest, read_chat, read_completion, read_new_context
from workers.api.responses import read_response
from workers.api.status import status_object
from workers.api.tools import read_tools
from workers.api.turns import read_continues, read_speaks_next, read_template, read_turns
from workers.serving.backend import Backend
from workers.serving.messages import ContextNotReadyError, TokenizeAsk
from workers.settings import LimitSettings, Settings

STATIC = Path(__file__).with_name("static")
PAGE_FILES = {"page.css": "text/css", "page.js": "text/javascript", "charts.js": "text/javascript"}
# no resources from elsewhere, no inline code, no frames of other pages around it
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Reader = Callable[[object, str, str, LimitSettings], ParsedRequest]  # takes body, request id, model and limits


def make_app(backend: Backend, settings: Settings) -> FastAPI:
    """Make the ASGI application, for uvicorn and for Ray Serve alike. It needs no startup or shutdown."""
    if settings.server.api_key_file is not None and not settings.server.api_keys:
        raise ConfigError("api_key_file is set, but its keys were not read; make the settings by load_settings")
    measures, pace = Measures(), Pace()
    app = FastAPI(title="csattn", version=__version__, openapi_url=None, redirect_slashes=False)
    app.add_middleware(Guard, settings=settings, measures=measures, pace=pace)
    if settings.server.allowed_origins:  # outside the guard: browsers hide error replies that lack these headers
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.server.allowed_origins,
            allow_methods=("GET", "HEAD", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("request-id", "retry-after", "x-request-id", "x-should-retry"),
        )
    app.add_exception_handler(HTTPException, _no_such_route)
    routes = Routes(backend, settings, measures, pace)
    for method, path, handler in (
        ("GET", "/health", routes.health),
        ("GET", "/ready", routes.ready),
        ("GET", "/version", routes.version),
        ("GET", "/metrics", routes.metrics),
        ("GET", "/v1/status", routes.status),
        ("GET", "/v1/models", routes.models),
        ("GET", "/v1/models/{model:path}", routes.model),
        ("POST", "/v1/chat/completions", routes.answers(read_chat)),
        ("POST", "/v1/completions", routes.answers(read_completion)),
        ("POST", "/v1/responses", routes.answers(read_response)),
        ("POST", "/v1/messages", routes.answers(read_message)),
        ("POST", "/v1/messages/count_tokens", routes.count_tokens),
        ("POST", "/tokenize", routes.tokenize),
        ("POST", "/detokenize", routes.detokenize),
        ("GET", "/v1/contexts", routes.contexts),
        ("POST", "/v1/contexts", routes.register),
        ("GET", "/v1/contexts/{name}", routes.context),
        ("DELETE", "/v1/contexts/{name}", routes.delete),
        ("GET", "/", routes.page),
        ("GET", "/static/{name}", routes.page_file),
    ):
        methods = ["GET", "HEAD"] if method == "GET" else [method]  # for HEAD, the server leaves out the body
        app.add_api_route(path, handler, methods=methods, response_model=None)
    return app


class Routes:
    """The handlers of all routes."""

    def __init__(self, backend: Backend, settings: Settings, measures: Measures, pace: Pace) -> None:
        self._backend, self._limits, self._measures = backend, settings.limits, measures
        self._bodies = BodyReader(settings.limits, pace)
        self._model = short_model_name(settings.model.name)
        self._is_logged = settings.server.access_log
        self._since = int(time.time())
        self._max_positions = 0  # not known yet

    async def health(self) -> Response:
        """Liveness: this process answers."""
        return _json({"status": "ok"})

    async def ready(self) -> Response:
        """Readiness: requests can be answered."""
        health = await self._backend.health()
        if not health.ready:
            return error_reply(HttpError(503, "not_ready", health.why or "the service is not ready yet"))
        return _json({"status": "ready"})

    async def version(self) -> Response:
        return _json({"version": __version__})

    async def metrics(self) -> Response:
        return Response(self._measures.text(await self._backend.metrics()), media_type=METRICS_TYPE)

    async def status(self) -> Response:
        metrics = [*self._measures.registry.collect(), *await self._backend.metrics()]
        health, contexts, workers = await asyncio.gather(
            self._backend.health(), self._backend.contexts(), self._backend.workers()
        )
        return _json(status_object(self._model, health, contexts, metrics, workers))

    async def models(self) -> Response:
        return _json(listed_models(model_objects(await self._backend.contexts(), await self._served())))

    async def model(self, model: str) -> Response:
        name = context_or_own(model, self._model)
        return _json(model_object(await self._backend.contexts(name), model, await self._served()))

    def answers(self, read: Reader) -> Callable[[Request], Awaitable[Response]]:
        """Return the handler that answers what `read` reads."""

        async def answer(request: Request) -> Response:
            body, state = await self._bodies.read_json(request), request.state
            parsed = read(body, state.request_id, self._model, self._limits)
            answering = Answering(
                self._backend, parsed, self._measures, state.arrived_at, self._limits, is_logged=self._is_logged
            )
            state.used = answering.used
            if parsed.stream:
                return EventStream(answering, b"data: [DONE]\n\n" if parsed.kind in ("chat", "text") else b"")
            return _json(await cancel_if_disconnected(answering.whole(), request.receive))

        return answer

    async def count_tokens(self, request: Request) -> Response:
        context, ask = read_count(await self._bodies.read_json(request), self._model, self._limits)
        num_tokens = len((await self._backend.tokenize(ask)).ids)
        if context:
            info = find_context(await self._backend.contexts(context), context)
            if info.num_tokens is None:
                raise ContextNotReadyError(f"the context {context!r} is {info.state}, so its tokens are not known yet")
            num_tokens += info.num_tokens
        return _json({"input_tokens": num_tokens})

    async def tokenize(self, request: Request) -> Response:
        ask, wants_texts = read_tokenize(await self._bodies.read_json(request), self._model, self._limits)
        tokens = await self._backend.tokenize(ask)
        texts = tokens.texts if wants_texts else None  # as the vocabulary spells them
        found = {"count": len(tokens.ids), "max_model_len": tokens.max_positions, "tokens": tokens.ids}
        return _json({**found, "token_strs": texts})

    async def detokenize(self, request: Request) -> Response:
        ids = read_detokenize(await self._bodies.read_json(request), self._model)
        return _json({"prompt": await self._backend.detokenize(ids)})

    async def contexts(self) -> Response:
        infos = await self._backend.contexts()
        return _json(listed([context_object(info, self._model) for info in infos]))

    async def register(self, request: Request) -> Response:
        name, text = read_new_context(await self._bodies.read_json(request))
        info = await self._backend.register(name, text)
        return _json(context_object(info, self._model), 202 if info.state == "building" else 200)

    async def context(self, name: str) -> Response:
        return _json(context_object(find_context(await self._backend.contexts(name), name), self._model))

    async def delete(self, name: str) -> Response:
        await self._backend.delete(name)
        return _json({"id": name, "object": "context.deleted", "deleted": True})

    async def page(self) -> Response:
        return FileResponse(STATIC / "index.html", headers=PAGE_HEADERS, media_type="text/html")

    async def page_file(self, name: str) -> Response:
        if name not in PAGE_FILES:
            raise HTTPException(404)
        return FileResponse(STATIC / name, headers=PAGE_HEADERS, media_type=PAGE_FILES[name])

    async def _served(self) -> ServedModel:
        if not self._max_positions:  # the backend reports it with any tokens
            self._max_positions = (await self._backend.tokenize(TokenizeAsk(text=""))).max_positions
        return ServedModel(self._model, self._since, self._max_positions)


def _json(value: Any, status: int = 200) -> Response:
    return Response(json.dumps(value, separators=(",", ":")), status, media_type="application/json")


async def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = _methods_at(request)
        wrong = HttpError(
            405, "method_not_allowed", f"this address does not support {request.method[:16]}; wanted {allowed}"
        )
        return error_reply(wrong, own_path(request.scope), {"Allow": allowed})
    path, advice = quoted(request.url.path), "workers/api/README.md lists the addresses"
    if not request.url.path.startswith("/v1/"):
        advice = "OpenAI's API is below /v1, with which a client's base_url must end"
    elif request.url.path.startswith("/v1/v1/"):
        advice = "a client's base_url ends with /v1 once, and that of Anthropic's clients without it"
    what = f"there is nothing at {path}; {advice}"
    return error_reply(HttpError(error.status_code, "not_found", what), own_path(request.scope))


def _methods_at(request: Request) -> str:
    """Return the methods that an address supports: several routes may share it."""
    here = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return ", ".join(sorted({method for route in here for method in route.methods}))


def read_tokenize(body: object, model: str, limits: LimitSettings) -> tuple[TokenizeAsk, bool]:
    """Read a body for /tokenize; return also whether the tokens' texts are wanted."""
    fields = Fields(body)
    _check_model(fields, model)
    wants_texts = fields.flag("return_token_strs")
    text = fields.text("prompt", limits.max_question_chars)
    adds_special = fields.flag("add_special_tokens", default=True)
    if text is not None:
        fields.only("messages", why="prompt is set, too; send one of them")
        ask = TokenizeAsk(text=text, add_special_tokens=adds_special)
    else:
        speaks_next, turns = read_speaks_next(fields), read_turns(fields, limits)
        ask = TokenizeAsk(
            turns=turns,
            tools=read_tools(fields)["tools"],
            add_generation_prompt=speaks_next is not False,
            continues=read_continues(fields, turns, speaks_next),
            **read_template(fields),
        )
    fields.finish()
    return ask, wants_texts


def read_detokenize(body: object, model: str) -> tuple[int, ...]:
    """Read the token ids in a body for /detokenize."""
    fields = Fields(body)
    _check_model(fields, model)
    ids = fields.any_of("tokens")
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i <= MAX_TOKEN_ID for i in ids):
        fields.refuse("tokens", "is not a list of token ids")
    fields.finish()
    return tuple(ids)


def _check_model(fields: Fields, model: str) -> None:
    """Raise UnknownModelError unless a given `model` is the model or one of its contexts; all share a tokenizer."""
    requested_model = fields.text("model", 256)
    if requested_model is not None:
        context_or_own(requested_model, model)
