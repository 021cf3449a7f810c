"""Random arrivals, drafts, cancellations, time-outs, slow readers and faults: no request is lost or disturbed."""

from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.tiny import loaded, token_ids
from tests.workers.serving.full_engine import FullEngine
from tests.workers.serving.requests import make_request, make_scheduler, read
from tests.workers.serving.soundness import check
from workers.serving import outlet, scheduler
from workers.serving.drafts import MAX_DRAFT, Drafts, Ngrams
from workers.serving.messages import Done, OverloadedError, ServingError, TimedOutError
from workers.serving.request import Request

NUM_EVENTS = 1000
KINDS = tuple(
    {
        "question": token_ids(1 + 7 * i % 40, seed=i).tolist(),
        "context_id": i % 3,
        "max_new_tokens": 1 + 5 * i % 37,
        "temperature": (0.0, 0.8)[i % 2],
        "seed": i,
        "selector": ("csattn", "window")[i % 5 == 0],
    }
    for i in range(24)
)


class Fuzz:
    """A scheduler, its requests, and what the test knows of them."""

    def __init__(self, store: Path, rng: np.random.Generator) -> None:
        self.rng, self.store = rng, store
        self.engine = FullEngine(loaded(), max_rows=8, max_requests=6)
        self.scheduler, _, self.clock = make_scheduler(store, self.engine, max_running=6, max_queued=10)
        self.alive: dict[Request, tuple[int, list[str]]] = {}  # kind, and the pieces of text that were read
        self.slow: set[Request] = set()
        self.outcomes: Counter[str] = Counter()

    @cache  # noqa: B019  # as long as the test
    def alone(self, kind: int) -> tuple[str, list[int]]:
        """The answer's text and tokens."""
        sched, _, _ = make_scheduler(self.store)
        request, text = make_request(sched, **KINDS[kind]), ""
        while not request.is_over:
            sched.turn()
            text += read(request)[0]
        return text, request.token_ids

    def arrive(self) -> None:
        kind = int(self.rng.integers(len(KINDS)))
        timeout_s = float(self.rng.choice([0.4, 1e6], p=[0.1, 0.9]))
        try:
            request = make_request(self.scheduler, timeout_s=timeout_s, **KINDS[kind])
        except OverloadedError:
            assert self.scheduler.flow.num_in_flight == 16
            self.outcomes["refused"] += 1
            return
        self.alive[request] = kind, []
        if self.rng.random() < 0.5:
            wrong = self.rng.random(KINDS[kind]["max_new_tokens"]) < 0.2
            request.drafts = Drafts([Ngrams((np.array(self.alone(kind)[1], np.int32) + wrong) % 256)])
        if self.rng.random() < 0.1:
            self.slow.add(request)

    def rush(self) -> None:
        for _ in range(14):
            self.arrive()

    def leave(self) -> None:
        """A reader leaves; what it has read must be the start of its answer."""
        if not self.alive:
            return
        request = list(self.alive)[int(self.rng.integers(len(self.alive)))]
        self.scheduler.inbox.cancel(request)
        self.scheduler.turn()
        assert request.is_over and (
            request.request_slot is None or self.engine.request_slots.get(request.request_slot) is not request
        )
        kind, parts = self.alive.pop(request)
        assert self.alone(kind)[0].startswith("".join(parts))
        self.outcomes["cancelled"] += 1

    def fail(self) -> None:
        real = self.engine.step

        def fail_once(*args):
            self.engine.step = real
            raise RuntimeError("a fault")

        self.engine.step = fail_once
        self.turn()
        self.engine.step = real

    def turn(self) -> None:
        self.scheduler.turn()
        self.clock.now += 0.02

    def read(self) -> None:
        for request in list(self.alive):
            if request in self.slow and self.rng.random() < 0.99:
                continue
            text, last = read(request)
            kind, parts = self.alive[request]
            parts.append(text)
            if last is None:
                continue
            del self.alive[request]
            if isinstance(last, Done):
                assert "".join(parts) == self.alone(kind)[0]
                assert last.new_tokens == KINDS[kind]["max_new_tokens"]
            else:
                assert isinstance(last, ServingError)
                assert self.alone(kind)[0].startswith("".join(parts))
            self.outcomes[type(last).__name__ if last else ""] += 1

    def check(self) -> None:
        check(self.scheduler)
        assert set(self.engine.request_slots) == set(self.scheduler._running)
        assert sum(not request.is_over for request in self.alive) == self.scheduler.flow.num_in_flight
        assert all(len(request.outlet) <= outlet.MAX_UNREAD + MAX_DRAFT + 2 for request in self.alive)


def test_random_traffic_loses_and_disturbs_no_request(built: Path, rng, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlet, "MAX_UNREAD", 12)  # so that slow readers are paused, and ended, within these answers
    monkeypatch.setattr(scheduler, "STALL_S", 0.8)
    fuzz = Fuzz(built, rng)
    events = [fuzz.arrive, fuzz.rush, fuzz.leave, fuzz.fail, fuzz.turn]
    for _ in range(NUM_EVENTS):
        events[rng.choice(5, p=[0.13, 0.01, 0.02, 0.015, 0.825])]()
        fuzz.read()
        fuzz.check()
    fuzz.slow.clear()
    while fuzz.alive:
        fuzz.turn()
        fuzz.read()
        fuzz.check()
    assert not fuzz.engine.request_slots and fuzz.scheduler.flow.num_in_flight == 0
    assert fuzz.outcomes["Done"] > 100 and fuzz.scheduler.metrics.accepted_tokens._value.get() > 20
    rare = ("cancelled", "refused", TimedOutError.__name__, "ServingError")
    assert all(fuzz.outcomes[kind] > 5 for kind in rare), fuzz.outcomes
