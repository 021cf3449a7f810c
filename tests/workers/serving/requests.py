"""Requests for the tests of the scheduler, and what their readers got."""

from pathlib import Path
from typing import Any

from csattn.artifact import open_artifact
from csattn.config import SearchConfig
from csattn.selector_names import SelectorName
from tests.tiny import loaded
from tests.workers.serving.artifacts import SECRETS
from tests.workers.serving.full_engine import FullEngine
from tests.workers.serving.soundness import check
from workers.serving.context_file import ContextFile
from workers.serving.messages import Ask, Done, Piece, Sampling, ServingError
from workers.serving.metrics import Metrics
from workers.serving.outlet import Outlet
from workers.serving.request import Request, Writer
from workers.serving.scheduler import Scheduler


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_scheduler(
    store: Path, engine: FullEngine | None = None, max_running: int = 16, max_queued: int = 1000, **options: Any
) -> tuple[Scheduler, FullEngine, Clock]:
    """A scheduler whose turns the test takes itself, with the context of every secret word loaded."""
    engine, clock = engine or FullEngine(loaded()), Clock()
    scheduler = Scheduler(
        engine, set(), max_running=max_running, max_queued=max_queued, metrics=Metrics(), clock=clock, **options
    )
    for context_id, secret in enumerate(SECRETS):
        artifact_id = ContextFile(store).read()[secret].artifact_id
        assert artifact_id is not None
        with open_artifact(store / artifact_id) as artifact:
            scheduler.load(context_id, artifact)
    return scheduler, engine, clock


def make_request(
    scheduler: Scheduler,
    question: str | list[int] = "who?",
    context_id: int = 0,
    selector: SelectorName = "csattn",
    timeout_s: float = 1e9,
    **sampling: Any,
) -> Request:
    """Reserve a place for a request, and submit it."""
    scheduler.flow.reserve()
    asked = Sampling(**{"max_new_tokens": 5, **sampling})
    ids = loaded().tokenizer(question).input_ids if isinstance(question, str) else question
    request = Request(
        ask=Ask(request_id="test", context=SECRETS[context_id], sampling=asked),
        context_id=context_id,
        context_len=350,
        num_cached=350,
        question_ids=ids,
        max_new_tokens=asked.max_new_tokens,
        config=SearchConfig(window_len=8),
        selector=selector,
        seed=asked.seed or 0,
        arrived_at=scheduler.clock(),
        deadline=scheduler.clock() + timeout_s,
        outlet=Outlet(on_room=scheduler.inbox.nudge),
        writer=Writer(loaded().tokenizer, asked.stop),
    )
    scheduler.inbox.submit(request)
    return request


def read(request: Request) -> tuple[str, Done | ServingError | None]:
    """Return all text that is there, and how the request ended, if it did."""
    text, last = "", None
    while (event := request.outlet.take()) is not None:
        assert last is None, "nothing comes after the end"
        if isinstance(event, Piece):
            text += event.text
        else:
            last = event
    return text, last


def run(scheduler: Scheduler, max_turns: int = 10_000) -> int:
    """Take turns until there is nothing to do, and return their number."""
    for turn in range(max_turns):
        if scheduler.turn() != 0.0:
            return turn + 1
        check(scheduler)
    raise AssertionError(f"{scheduler!r} does not come to an end")


def alone(store: Path, asked: dict) -> tuple[list[int], str]:
    scheduler, _, _ = make_scheduler(store)
    request = make_request(scheduler, **asked)
    run(scheduler)
    return request.token_ids, read(request)[0]
