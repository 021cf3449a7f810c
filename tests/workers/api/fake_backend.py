"""A backend without a model: scripts give its answers, their pace and their failures."""

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from workers.serving.messages import (
    Ask,
    ContextExistsError,
    ContextInfo,
    ContextNotReadyError,
    Done,
    Event,
    FailedBuild,
    Finish,
    Health,
    Held,
    OverloadedError,
    Piece,
    TokenizeAsk,
    Tokens,
    TokenScore,
    UnknownContextError,
    UnknownModelError,
    Usage,
    WorkerStatus,
)

CONTEXT_TOKENS = 1000
PROMPT = {"context_tokens": CONTEXT_TOKENS, "question_tokens": 7, "cached_tokens": CONTEXT_TOKENS}


@dataclass
class Script:
    """The scripted answer to a question."""

    words: tuple[str | Piece, ...] = ("The ", "answer ", "is ", "42.")
    first_after_s: float = 0.0
    pause_s: float = 0.0  # after each piece
    fail_at: int | None = None  # raise `error` instead of the piece with this index
    error: BaseException | None = None
    reason: Finish = "stop"
    stop: str | None = None
    top: tuple[tuple[str, bytes, float], ...] = ()
    ends_without_done: bool = False


@dataclass
class FakeBackend:
    """A Backend with a slot for each running request and a bounded queue."""

    scripts: dict[str | tuple[int, ...], Script] = field(default_factory=dict)  # by the last turn, or the prompt
    max_requests: int = 4
    max_queued: int = 4
    infos: dict[str, ContextInfo] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    asks: list[Ask] = field(default_factory=list)
    held: tuple[Held, ...] = ()
    failed_builds: tuple[FailedBuild, ...] = ()
    more_metrics: list[Metric] = field(default_factory=list)
    health_now: Health = field(default_factory=lambda: Health(True))
    running: set[str] = field(default_factory=set)
    num_queued: int = 0
    num_ended_early: int = 0
    looked_up: list[str | None] = field(default_factory=list)  # names that `contexts` was called with; None: all
    ended_early_at: list[float] = field(default_factory=list)

    def add(self, name: str, **changes: object) -> None:
        ready = ContextInfo(
            name=name, state="ready", artifact_id="a" * 64, num_tokens=CONTEXT_TOKENS, created_at=1.7e9, progress=1.0
        )
        self.infos[name] = replace(ready, **changes)  # type: ignore[arg-type]

    async def generate(self, ask: Ask) -> AsyncGenerator[Event, None]:
        self.asks.append(ask)
        self._admit(ask)
        self.num_queued += 1
        try:
            while len(self.running) >= self.max_requests:
                await asyncio.sleep(0.001)
        finally:
            self.num_queued -= 1
        assert ask.request_id not in self.running, "two requests of one id"
        self.running.add(ask.request_id)
        is_done = False
        try:
            question = ask.turns[-1].content if ask.turns else ask.prompt or ""
            async for event in _said(ask, self.scripts.get(question, Script())):
                is_done = isinstance(event, Done)
                yield event
        finally:
            self.running.remove(ask.request_id)
            if not is_done:
                self.num_ended_early += 1
                self.ended_early_at.append(time.monotonic())

    def _admit(self, ask: Ask) -> None:
        info = self.infos.get(ask.context)
        if info is None:
            raise UnknownModelError(f"there is no context {ask.context!r}", "model")
        if info.state != "ready":
            raise ContextNotReadyError(f"the context {ask.context!r} is {info.state}", "model")
        if len(self.running) >= self.max_requests and self.num_queued >= self.max_queued:
            raise OverloadedError("the queue is full; come again later", retry_after_s=2.4)

    async def tokenize(self, ask: TokenizeAsk) -> Tokens:
        """Return a token for each character."""
        text = ask.text if ask.text is not None else "".join(turn.content for turn in ask.turns)
        return Tokens(ids=tuple(map(ord, text)), texts=tuple(text), max_positions=2048)

    async def detokenize(self, ids: tuple[int, ...]) -> str:
        return "".join(map(chr, ids))

    async def contexts(self, name: str | None = None) -> list[ContextInfo]:
        self.looked_up.append(name)
        return [info for info in self.infos.values() if name in (None, info.name)]

    async def register(self, name: str, text: str) -> ContextInfo:
        if self.texts.get(name, text) != text:
            raise ContextExistsError(f"another text has the name {name!r} already", "name")
        self.texts[name] = text
        if name not in self.infos:
            self.add(name, state="building", progress=0.0, num_tokens=None, artifact_id=None, what="prefill")
        return self.infos[name]

    async def delete(self, name: str) -> None:
        if self.infos.pop(name, None) is None:
            raise UnknownContextError(f"there is no context {name!r}", "name")
        self.texts.pop(name, None)

    def status(self) -> WorkerStatus:
        return WorkerStatus(
            since=1.7e9,
            num_running=len(self.running),
            max_requests=self.max_requests,
            held=self.held,
            failed_builds=self.failed_builds,
        )

    async def workers(self) -> dict[str, WorkerStatus | None]:
        return {"this process": self.status()}

    async def health(self) -> Health:
        return self.health_now

    async def metrics(self) -> list[Metric]:
        running = GaugeMetricFamily("csattn_running_requests", "Requests being decoded.", value=len(self.running))
        return [running, *self.more_metrics]


async def _said(ask: Ask, script: Script) -> AsyncGenerator[Event, None]:
    words = (script.words * ask.sampling.max_new_tokens)[: max(len(script.words), 1)][: ask.sampling.max_new_tokens]
    await asyncio.sleep(script.first_after_s)
    for index, word in enumerate(words):
        if index == script.fail_at and script.error is not None:
            raise script.error
        piece = word if isinstance(word, Piece) else Piece(word, _scores(ask, script, index, word))
        yield replace(piece, usage=Usage(**PROMPT, new_tokens=index + 1)) if ask.reports_usage else piece
        await asyncio.sleep(script.pause_s)
    if script.ends_without_done:
        return
    reason: Finish = "length" if len(words) < len(script.words) else script.reason
    yield Done(reason=reason, stop=script.stop, **PROMPT, new_tokens=len(words))


def _scores(ask: Ask, script: Script, index: int, word: str) -> tuple[TokenScore, ...]:
    if ask.sampling.top_logprobs is None:
        return ()
    return (TokenScore(index, word, -0.5 - index, script.top[: ask.sampling.top_logprobs]),)
