"""A service whose requests name no context, and its answers: for tests of kept rows and contexts."""

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

from csattn.config import SearchConfig
from csattn.models import LoadedModel
from tests.offload import soundness
from tests.tiny import loaded
from workers.engine.cpu.engine import CpuEngine
from workers.serving.kept_rows import PrefixCache
from workers.serving.kept_store import DIRECTORY
from workers.serving.local import LocalBackend
from workers.serving.messages import Ask, Done, Sampling, Turn
from workers.settings import BuildSettings, KeptSettings, Settings, StoreSettings

SEARCH = SearchConfig(keep=0.1, window_len=32)
DOCUMENT = "".join(f"Lamp {n} is {'red' if n % 3 else 'blue'} and burns {n * 7 % 24} hours. " for n in range(23))
# long enough to fill blocks of rows: a token is a byte
FIRST, SECOND = "Tell me of lamps, and of what they are made. " * 3, "And of their hours? " * 4


def make_backend(
    store: Path,
    model: LoadedModel | None = None,
    search: SearchConfig = SEARCH,
    build: BuildSettings | None = None,
    **kept: Any,
) -> LocalBackend:
    model = model or loaded()
    engine = CpuEngine(model, max_rows=16, max_requests=6, tail_capacity=700, num_threads=1)
    settings = Settings(
        store=StoreSettings(path=store),
        search=search,
        build=build or BuildSettings(),
        kept=KeptSettings(**{"context_tokens": 300, **kept}),
    )
    return LocalBackend(engine, model, settings)


def turns_of(*texts: str) -> tuple[Turn, ...]:
    """Return turns of the user and the assistant, alternating."""
    return tuple(Turn("assistant" if number % 2 else "user", text) for number, text in enumerate(texts))


def ask(*texts: str, new: int = 20, salt: str = "", **more: Any) -> Ask:
    named = {name: more.pop(name) for name in ("context", "prompt", "echo", "keep", "selector") if name in more}
    turns = {} if "prompt" in named else {"turns": turns_of(*texts)}
    sampling = Sampling(max_new_tokens=new, **more)
    return Ask(**{"request_id": "1", "context": "", **turns, **named}, cache_salt=salt, sampling=sampling)


def flush(kept: PrefixCache) -> None:
    """Wait until all blocks that were given to `keep` are on the disk, or refused."""
    kept._taker.submit(int).result()
    soundness.flush(kept.blocks)


async def answer(backend: LocalBackend, asked: Ask) -> tuple[str, Done]:
    """Return the answer once its rows are kept, too, which a thread does in the background."""
    text = ""
    async with aclosing(backend.generate(asked)) as events:
        async for event in events:
            if isinstance(event, Done):
                await asyncio.to_thread(flush, backend._prefixes.cache)
                return text, event
            text += event.text
    raise AssertionError("events end with Done")


def computed(done: Done) -> int:
    return done.context_tokens + done.question_tokens - done.cached_tokens


def answers(store: Path, *asks: Ask, **options: Any) -> list[tuple[str, Done]]:
    """Answer the requests one after another, in a service of their own."""

    async def main() -> list[tuple[str, Done]]:
        async with make_backend(store, **options) as backend:
            return [await answer(backend, asked) for asked in asks]

    return asyncio.run(main())


def afresh(tmp_path: Path, asked: Ask, **options: Any) -> str:
    """Return the answer of a service that keeps no rows."""
    return answers(tmp_path / "fresh", asked, memory_bytes=0, **options)[0][0]


def files_of(store: Path) -> list[Path]:
    return sorted((store / DIRECTORY).glob("*.block"))
