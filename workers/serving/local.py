"""A backend in one process: requests come from an event loop, and one engine on its own thread answers them."""

import asyncio
import logging
import os
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from dataclasses import replace
from typing import Any, Self, TypeVar

import numpy as np
from prometheus_client import Metric

from csattn.artifact.lock import StoreUse
from csattn.config import SearchConfig
from csattn.errors import ConfigError
from csattn.models import LoadedModel
from csattn.selector_names import SelectorName
from workers.serving.answer_parser import answer_parser_for
from workers.serving.chat_template import ChatTemplate
from workers.serving.context_build import Builder
from workers.serving.context_texts import ContextTexts
from workers.serving.contexts import Contexts, name_artifact
from workers.serving.examiner import Examiner
from workers.serving.grammar import Grammar, Grammars
from workers.serving.messages import (
    Ask,
    BadRequestError,
    ContextInfo,
    Done,
    Event,
    Health,
    Held,
    OverloadedError,
    ServingError,
    TimedOutError,
    TokenizeAsk,
    Tokens,
    WorkerStatus,
    closing,
)
from workers.serving.metrics import ContextCounts, Metrics
from workers.serving.outlet import Outlet
from workers.serving.prefixes import Prefix, Prefixes
from workers.serving.prompts import require_known_tokens, room_for, text_of_ids, tokenize
from workers.serving.request import Request, Writer
from workers.serving.residency import Residency
from workers.serving.scheduler import Scheduler
from workers.serving.step_engine import StepEngine
from workers.serving.step_thread import StepThread
from workers.settings import Settings

T = TypeVar("T")
_log = logging.getLogger(__name__)
_NUM_TOKENISERS = 2  # threads
_DRAIN_S = 5.0
_COUNTS_S = 0.5  # how long metrics wait for the engine's counts, so that a long step does not hold them up


class LocalBackend:
    """`Backend` around one engine, which it owns. It answers between `start` and `close`.

    async with LocalBackend(engine, loaded, settings) as backend:
        async for event in backend.generate(ask): ...
    """

    def __init__(self, engine: StepEngine, loaded: LoadedModel, settings: Settings) -> None:
        self._engine, self.loaded, self._settings = engine, loaded, settings
        self._measured = Metrics()
        self._scheduler = Scheduler(
            engine,
            loaded.stop_ids,
            max_running=settings.limits.max_concurrent_requests,
            max_queued=settings.limits.max_queued_requests,
            metrics=self._measured,
        )
        self._examiner = examiner = Examiner(loaded)
        self._residency = Residency(self._scheduler, engine, examiner, settings.engine)
        self._builder = Builder(settings)
        self._contexts = Contexts(
            settings.store.path, self._builder, ContextTexts(loaded, settings.build), examiner.examine
        )
        self._tokenisers = ThreadPoolExecutor(_NUM_TOKENISERS, thread_name_prefix="csattn-tokenise")
        self._prefixes = Prefixes(
            loaded, settings, engine, self._contexts, examiner, self._residency, self._builder, self._tokenisers
        )
        self._measured.kept_counts = lambda: self._prefixes.cache.blocks.counts
        self._measured.context_counts = self.context_counts
        self._template, self._grammars = ChatTemplate(loaded.tokenizer), Grammars(loaded)
        self._steps: StepThread | None = None
        self._use = StoreUse(settings.store.path)
        self._since = time.time()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Begin to answer, and continue builds that an earlier service left unfinished.

        If the file of contexts cannot be read, it raises before the engine's thread starts, and may be called again.
        """
        await asyncio.to_thread(self._use.begin)
        if not await asyncio.to_thread(os.access, store := self._settings.store.path, os.W_OK):
            _log.warning(
                "%s cannot be written: nothing can be registered or deleted, and nothing is kept on disk", store
            )
        await self._contexts.start()
        self._steps = StepThread(self._scheduler, self._engine)
        self._builder.start()

    async def close(self, drain_s: float = _DRAIN_S) -> None:
        """Refuse new requests. Running ones have drain_s, from now on, to finish; then they end with an error.

        Those that wait for a context to be built end at once.
        """
        ends_at = time.monotonic() + drain_s
        self._scheduler.flow.closed = closing()  # before builds are cancelled: a new request would begin one
        await self._contexts.builds.close()  # they continue when a service starts again, or such a prompt comes
        await self._prefixes.prompt_contexts.builds.close()
        await self._builder.close()
        if self._steps is None:  # it was never started
            await asyncio.to_thread(self._engine.close)
        else:
            await asyncio.to_thread(self._steps.close, max(0.0, ends_at - time.monotonic()))
        self._scheduler.close()
        self._residency.close()
        self._grammars.close()
        await asyncio.to_thread(self._prefixes.cache.close)  # no request keeps any more rows
        self._tokenisers.shutdown(wait=False, cancel_futures=True)
        self._use.end()

    async def generate(self, ask: Ask) -> AsyncGenerator[Event, None]:
        scheduler = self._scheduler
        arrived_at = scheduler.clock()
        self._reserve()
        request = None
        try:
            timeout_s = self._settings.limits.request_timeout_s
            try:
                async with asyncio.timeout(timeout_s):
                    require_known_tokens(self.loaded.tokenizer, ask)
                    ask = self._template.with_effort(ask)
                    self._template.require(ask)
                    template = self._template.for_request(ask)
                    grammar = await self._grammars.make(ask, template)
                    config = self._search_config(ask)
                    prefix = await self._prefixes.find(ask, config, self._selector(ask))
            except TimeoutError:
                self._measured.requests.labels("timeout").inc()
                raise TimedOutError(
                    f"the request waited {timeout_s:g} s for its context; send it again later"
                ) from None
            try:
                self._require_steps()
                made = self._request(ask, template, config, prefix, grammar, arrived_at)
                scheduler.inbox.submit(made)
                request = made
                while True:
                    event = await request.outlet.next()
                    if isinstance(event, ServingError):
                        raise copy(event)
                    yield event
                    if isinstance(event, Done):
                        return
            finally:
                if request is not None:
                    scheduler.inbox.cancel(request)  # before `leave`, after which its context may be unloaded
                await prefix.leave()
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise
            raise closing() from None  # not this request was cancelled, but what it waited for
        except Exception:
            self._require_steps()  # threads that it needed have ended, too
            raise
        finally:
            if request is None:
                scheduler.flow.release(was_answered=False)

    async def contexts(self, name: str | None = None) -> list[ContextInfo]:
        return await self._contexts.infos(name)

    async def register(self, name: str, text: str) -> ContextInfo:
        return await self._contexts.register(name, text)

    async def name(self, name: str, artifact_id: str) -> None:
        """Give a name to an artifact of the store. Raises ContextNotReadyError if the artifact cannot be used."""
        store = self._settings.store.path
        (await asyncio.to_thread(self._examiner.open, store / artifact_id)).close()
        await asyncio.to_thread(name_artifact, store, name, artifact_id, self._settings.build.dtype)

    async def delete(self, name: str) -> None:
        path = await self._contexts.delete(name)
        self._measured.forget_context(name)
        if path is not None and path not in await self._contexts.paths():
            await self._residency.forget(path)

    async def tokenize(self, ask: TokenizeAsk) -> Tokens:
        return await self._in_thread(tokenize, self.loaded.tokenizer, self._template, ask, self._engine.max_positions)

    async def detokenize(self, ids: tuple[int, ...]) -> str:
        return await self._in_thread(text_of_ids, self.loaded.tokenizer, ids)

    async def workers(self) -> dict[str, WorkerStatus | None]:
        return {"this process": self.status()}

    def status(self) -> WorkerStatus:
        """State of this worker: its load, and the contexts that it holds."""
        return WorkerStatus(
            since=self._since,
            num_running=self._scheduler.flow.num_in_flight,
            max_requests=self._scheduler.max_running,
            budget_bytes=self._settings.engine.context_bytes,
            has_room=self._residency.has_room,
            held=self._residency.held(self._settings.store.path),
            failed_builds=self._prefixes.prompt_contexts.backoff.report(),
        )

    async def hold(self, contexts: Sequence[Held]) -> None:
        """Load contexts ahead of need, as far as there is room."""
        for held in contexts:
            with suppress(ServingError):
                await self._residency.hold(self._settings.store.path / held.path, held)

    async def drop(self, contexts: Sequence[Held]) -> None:
        """Unload contexts, once unused, because they are deleted or not likely to be needed here."""
        for held in contexts:
            await self._residency.forget(self._settings.store.path / held.path)

    async def health(self) -> Health:
        if self._steps is None or not self._steps.is_alive:
            return Health(False, "the service is not running")
        refusal = self._scheduler.flow.refusal
        return Health(refusal is None, "" if refusal is None else refusal.message)

    async def metrics(self) -> list[Metric]:
        if self._steps is not None and self._steps.is_alive:
            with suppress(TimeoutError):
                async with asyncio.timeout(_COUNTS_S):
                    counts = self._scheduler.inbox.call(self._engine.counts)
                    self._measured.engine_counts = await asyncio.wrap_future(counts)
        return self._measured.collect()

    def context_counts(self) -> ContextCounts:
        prompt_contexts = self._prefixes.prompt_contexts
        return ContextCounts(
            builds={"registered": self._contexts.builds.counts, "prompt": prompt_contexts.builds.counts},
            loaded_context_bytes=self._residency.held_bytes,
            loaded_context_budget_bytes=self._settings.engine.context_bytes,
            kept_context_bytes=prompt_contexts.num_bytes,
            kept_context_budget_bytes=prompt_contexts.budget.num_bytes,
        )

    def _reserve(self) -> None:
        try:
            self._scheduler.flow.reserve()
        except OverloadedError:
            self._measured.requests.labels("refused").inc()
            raise

    def _require_steps(self) -> None:
        """Raise the closing error if the steps' thread has ended while the request waited for its context."""
        if (closed := self._scheduler.flow.closed) is not None and not (self._steps and self._steps.is_alive):
            raise copy(closed)

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run work in one of the tokenisers' threads."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenisers, work, *arguments)

    def _request(
        self,
        ask: Ask,
        template: ChatTemplate,
        config: SearchConfig,
        prefix: Prefix,
        grammar: Grammar | None,
        arrived_at: float,
    ) -> Request:
        scheduler, sampling = self._scheduler, ask.sampling
        ids, context_len = prefix.token_ids, prefix.context_len
        room = room_for(ask, context_len, len(ids), self._engine.max_positions, self._engine.tail_capacity)
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed & (2**64 - 1)
        in_prompt = None
        if sampling.repetition_penalty != 1.0:
            in_prompt = np.zeros(self.loaded.model.config.vocab_size, np.bool_)
            in_prompt[ids] = True
            if prefix.artifact is not None:
                in_prompt[prefix.artifact.token_ids] = True
        self._measured.prompt_tokens.inc(context_len + len(ids))
        self._measured.cached_tokens.inc(prefix.num_cached)
        return Request(
            ask=ask,
            context_id=prefix.resident.context_id,
            context_len=context_len,
            num_cached=prefix.num_cached,
            kept=prefix.kept,
            drafts=prefix.drafts,
            question_ids=ids,
            max_new_tokens=room,
            config=config,
            selector=self._selector(ask),
            seed=seed,
            arrived_at=arrived_at,
            deadline=arrived_at + self._settings.limits.request_timeout_s,
            outlet=Outlet(asyncio.get_running_loop(), scheduler.inbox.nudge),
            writer=Writer(
                self.loaded.tokenizer,
                sampling.stop,
                answer_parser_for(ask, template),
                template.hidden,
                sampling.min_tokens,
                ids if ask.prompt is not None or ask.continues else (),
            ),
            grammar=grammar,
            in_prompt=in_prompt,
            echo=self._echo(ask),
        )

    def _selector(self, ask: Ask) -> SelectorName:
        return ask.selector or self._settings.engine.selector

    def _echo(self, ask: Ask) -> str | None:
        if not ask.echo:
            return None
        return ask.prompt if isinstance(ask.prompt, str) else text_of_ids(self.loaded.tokenizer, ask.prompt or ())

    def _search_config(self, ask: Ask) -> SearchConfig:
        changes: dict[str, Any] = {"keep": ask.keep, "lookahead": ask.lookahead, "rest": ask.rest}
        given = {name: value for name, value in changes.items() if value is not None}
        try:
            return replace(self._settings.search, **given)
        except ConfigError as error:
            raise BadRequestError(str(error), next(iter(given), None)) from error
