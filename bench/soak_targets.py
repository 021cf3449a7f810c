"""What `bench.soak` asks: a backend in this process, or any server that speaks as OpenAI's do."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from csattn.models import load_model
from workers.engine.cpu_engine import CpuEngine
from workers.serving.local import LocalBackend
from workers.serving.messages import Ask, Done, NewContext, Sampling, Turn
from workers.settings import LimitSettings, ModelSettings, Settings, StoreSettings

_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of a context; the same question has the same answer."""

    context: str
    text: str
    max_new_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, and when it came."""

    text: str
    num_tokens: int
    first_at: float
    ended_at: float


class Target(Protocol):
    """Where questions go."""

    async def build(self, name: str, text: str) -> None:
        """Register a context and wait until it is ready."""
        ...

    async def ask(self, question: Question) -> Reply: ...


class InProcess:
    """The backend itself, without HTTP."""

    def __init__(self, backend: LocalBackend) -> None:
        self._backend = backend

    async def build(self, name: str, text: str) -> None:
        info = await self._backend.register(NewContext(name=name, text=text))
        while info.state == "building":
            await asyncio.sleep(_POLL_S)
            info = next(info for info in await self._backend.contexts() if info.name == name)
        if info.state != "ready":
            raise RuntimeError(f"the context {name} could not be built: {info.what}")

    async def ask(self, question: Question) -> Reply:
        sampling = Sampling(
            max_new_tokens=question.max_new_tokens, temperature=question.temperature, seed=question.seed
        )
        turns = (Turn("user", question.text),)
        asked = Ask(request_id="soak", context=question.context, turns=turns, sampling=sampling)
        text, first_at = "", 0.0
        async with aclosing(self._backend.generate(asked)) as events:
            async for event in events:
                first_at = first_at or time.perf_counter()
                if isinstance(event, Done):
                    return Reply(text, event.new_tokens, first_at, time.perf_counter())
                text += event.text
        raise RuntimeError("an answer broke off")


class OverHttp:
    """A server, by the official client."""

    def __init__(self, client: Any, key: str) -> None:
        self._client, self._model = client, ""
        self._headers = {"Authorization": f"Bearer {key}"}

    async def build(self, name: str, text: str) -> None:
        info = await self._client.post("/contexts", body={"name": name, "text": text}, cast_to=object)
        while info["state"] == "building":
            await asyncio.sleep(_POLL_S)
            info = await self._client.get(f"/contexts/{name}", cast_to=object)
        if info["state"] != "ready":
            raise RuntimeError(f"the context {name} could not be built: {info['what']}")
        self._model = str(info["model"]).partition("@")[0]

    async def ask(self, question: Question) -> Reply:
        text, first_at, num_tokens = "", 0.0, 0
        stream = await self._client.chat.completions.create(
            model=f"{self._model}@{question.context}",
            messages=[{"role": "user", "content": question.text}],
            max_tokens=question.max_new_tokens,
            temperature=question.temperature,
            seed=question.seed,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            first_at = first_at or time.perf_counter()
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
            if chunk.usage:
                num_tokens = chunk.usage.completion_tokens
        return Reply(text, num_tokens, first_at, time.perf_counter())


@asynccontextmanager
async def in_process(model: str | None, store: Path, num_streams: int) -> AsyncIterator[InProcess]:
    settings = Settings(
        model=ModelSettings(name=model),
        store=StoreSettings(path=store),
        limits=LimitSettings(max_concurrent_requests=num_streams, max_queued_requests=num_streams),
    )
    loaded = load_model(model, settings.build.dtype)
    engine = CpuEngine(loaded, max_rows=2 * num_streams, num_slots=num_streams, tail_capacity=1024)
    async with LocalBackend(engine, loaded, settings) as backend:
        yield InProcess(backend)


@asynccontextmanager
async def over_http(url: str, key: str) -> AsyncIterator[OverHttp]:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=f"{url.rstrip('/')}/v1", api_key=key, max_retries=0) as client:
        yield OverHttp(client, key)
