"""A service of one process that can be killed, and the replies that its clients get."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from tests.workers.service import serving as any_service

MODEL = "smollm2-135m"
TEXTS = Path(__file__).parents[1] / "texts"
NEVER_ENDS = {"0": -100, "1": -100, "2": -100}  # logit bias against the demo model's end tokens


@dataclass
class Service(any_service.Service):
    """A service that is ready."""

    model: str = MODEL

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def metric(self, name: str) -> float:
        """Return a metric's sum over all its labels, or the value for one: `name{label="value"}`."""
        lines = self.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    def wait_until_written(self) -> float:
        """Wait until all kept blocks in memory are also in files; return the seconds waited."""
        since = time.perf_counter()
        while self.metric('csattn_kept_blocks{place="disk"}') < self.metric('csattn_kept_blocks{place="memory"}'):
            time.sleep(0.01)
        return time.perf_counter() - since


@contextmanager
def serving(store: Path, *settings: str, model: Path | None = None) -> Iterator[Service]:
    """Run a service until the block ends or it is killed. model: a directory or a GGUF file; None: the demo model."""
    options = [part for setting in settings for part in ("--set", setting)]
    if model is not None:
        options += ["--model", str(model)]
    with any_service.serving("--local", "--store", str(store), *options) as service:
        yield Service(service.process, service.url, MODEL if model is None else model.name)


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply and its times."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    ttft_s: float
    times_s: tuple[float, ...]  # when each piece arrived, from sending the request

    @property
    def computed(self) -> int:
        """Tokens of the prompt that were not cached."""
        return self.prompt_tokens - self.cached_tokens


def ask(
    client: openai.OpenAI, messages: list[Any], max_tokens: int, salt: str = "", model: str = MODEL, **fields: Any
) -> Reply:
    """Send the whole conversation to the model, without naming a context, and return the reply."""
    since, times, text, usage = time.perf_counter(), [], "", None
    extra = {"cache_salt": salt} if salt else {}
    options: dict[str, Any] = {"include_usage": True}
    create: Any = client.chat.completions.create
    for chunk in create(
        model=model, messages=messages, max_tokens=max_tokens, stream=True, stream_options=options, extra_body=extra,
        **fields,
    ):  # fmt: skip
        if chunk.choices and chunk.choices[0].delta.content:
            times.append(time.perf_counter() - since)
            text += chunk.choices[0].delta.content
        usage = chunk.usage or usage
    assert usage is not None and usage.prompt_tokens_details is not None
    cached = usage.prompt_tokens_details.cached_tokens or 0
    first = times[0] if times else time.perf_counter() - since
    return Reply(text, usage.prompt_tokens, cached, usage.completion_tokens, first, tuple(times))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
