"""Continuous batching when something goes wrong: deadlines, slow readers, full queues, broken engines."""

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from csattn.config import SearchConfig
from csattn.errors import ConfigError
from tests.tiny import loaded
from tests.workers.serving.full_engine import FullEngine
from tests.workers.serving.requests import alone, make_request, make_scheduler, read, run
from tests.workers.serving.soundness import check
from workers.serving import scheduler as scheduling
from workers.serving.messages import (
    BadRequestError,
    Done,
    OverloadedError,
    ServingError,
    TimedOutError,
    WorkerLostError,
)
from workers.serving.outlet import MAX_UNREAD
from workers.serving.plan import QuestionRows, plan_step
from workers.serving.request import Request
from workers.serving.scheduler import STALL_S


def test_timed_out_requests_are_ended_in_the_queue_and_while_running(built: Path) -> None:
    scheduler, engine, clock = make_scheduler(built, FullEngine(loaded(), max_requests=1))
    running = make_request(scheduler, max_new_tokens=200, timeout_s=5.0)
    queued = make_request(scheduler, timeout_s=3.0)
    scheduler.turn()
    clock.now += 4
    scheduler.turn()
    late = read(queued)[1]
    assert isinstance(late, TimedOutError) and "waited for its turn for 4.0 s" in str(late) and not running.is_over
    clock.now += 1
    scheduler.turn()
    late = read(running)[1]
    assert isinstance(late, TimedOutError) and "took 5.0 s" in str(late) and "fewer tokens" in str(late)
    assert not engine.request_slots


def test_a_request_cancelled_after_its_deadline_counts_as_timed_out(built: Path) -> None:
    """As after a step that took so long that the reader's own timeout came first."""
    scheduler, _, clock = make_scheduler(built)
    requests = [make_request(scheduler, max_new_tokens=200, timeout_s=timeout_s) for timeout_s in (5.0, 50.0)]
    scheduler.turn()
    clock.now += 7
    for request in requests:
        scheduler.inbox.cancel(request)
    scheduler.turn()
    for outcome in ("timeout", "cancelled"):
        assert scheduler.metrics.registry.get_sample_value("csattn_requests_total", {"outcome": outcome}) == 1


def test_a_slow_reader_pauses_its_request_and_then_times_out(built: Path) -> None:
    engine = FullEngine(loaded(), tail_capacity=2000)
    scheduler, _, clock = make_scheduler(built, engine)
    slow = make_request(scheduler, max_new_tokens=MAX_UNREAD + 300)
    idle_s = 0.0
    while idle_s == 0.0:
        idle_s = scheduler.turn()
    assert idle_s == pytest.approx(STALL_S)
    assert len(slow.outlet) == MAX_UNREAD and len(slow.token_ids) <= 2 * MAX_UNREAD
    paused_at = len(slow.token_ids)
    brisk = make_request(scheduler, max_new_tokens=10)
    run(scheduler)
    assert read(brisk)[1] is not None and len(slow.token_ids) == paused_at
    read(slow)
    assert scheduler.inbox._nudged, "reading wakes the scheduler"
    scheduler.turn()
    scheduler.turn()
    assert len(slow.token_ids) == paused_at + 2
    run(scheduler)
    if not slow.is_over:
        clock.now += STALL_S
        scheduler.turn()
    stuck = make_request(scheduler, max_new_tokens=MAX_UNREAD + 300)
    run(scheduler)
    clock.now += STALL_S  # nothing has woken the scheduler meanwhile
    scheduler.turn()
    assert stuck.is_over and len(stuck.outlet) == MAX_UNREAD + 1
    assert isinstance(read(stuck)[1], TimedOutError)
    assert not engine.request_slots


def test_requests_beyond_the_queue_are_refused_with_retry_after(built: Path) -> None:
    scheduler, _, clock = make_scheduler(built, FullEngine(loaded(), max_requests=2), max_queued=3)
    for _ in range(5):
        make_request(scheduler, max_new_tokens=4)
    with pytest.raises(OverloadedError) as unmeasured:
        make_request(scheduler)
    assert unmeasured.value.retry_after_s == 1.0
    while scheduler.turn() == 0.0:
        clock.now += 10.0
    for _ in range(5):
        make_request(scheduler, max_new_tokens=4)
    with pytest.raises(OverloadedError) as measured:
        make_request(scheduler)
    # two slots, four steps of ten seconds each: a request ends every twenty seconds, and three wait
    assert 20 <= measured.value.retry_after_s <= 90


def test_a_failed_step_fails_its_requests_and_no_other(built: Path) -> None:
    engine = FullEngine(loaded(), max_requests=2)
    scheduler, _, _ = make_scheduler(built, engine)
    first, second, queued = (make_request(scheduler, max_new_tokens=6) for _ in range(3))
    scheduler.turn()
    real, engine.step = engine.step, lambda *args: (_ for _ in ()).throw(RuntimeError("a lost row"))

    def fail_once(*args):
        engine.step = real
        raise RuntimeError("a lost row")

    engine.step = fail_once
    scheduler.turn()
    for request in (first, second):
        error = read(request)[1]
        assert isinstance(error, ServingError) and "a lost row" in error.message and "again" in error.message
    assert scheduler.health.fault is None
    run(scheduler)
    assert (queued.token_ids, read(queued)[0]) == alone(built, {"max_new_tokens": 6})
    check(scheduler)


@pytest.mark.parametrize(
    ("sampling", "name", "engine_draws"),
    [
        ({}, "take", False),
        ({"temperature": 0.8}, "choose", False),
        ({"temperature": 0.8}, "take", True),
        ({"temperature": 0.8}, "draw_specs", True),
        ({"temperature": 0.8}, "draw_specs", False),
    ],
)
def test_a_fault_in_one_requests_sampling_ends_no_other(
    built: Path, sampling: dict[str, float], name: str, engine_draws: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduling, "MANY_TOKENS", 0)
    scheduler, _, _ = make_scheduler(built, FullEngine(loaded(), max_requests=2, draws=engine_draws))
    faulty, other = (make_request(scheduler, max_new_tokens=6, **sampling) for _ in range(2))
    scheduler.turn()
    real = getattr(Request, name)

    def real_or_fault(request: Request, *args):
        if request is faulty:
            raise IndexError("beyond the vocabulary")
        return real(request, *args)

    monkeypatch.setattr(Request, name, real_or_fault)
    run(scheduler)
    error = read(faulty)[1]
    assert isinstance(error, ServingError) and "beyond the vocabulary" in error.message
    assert (other.token_ids, read(other)[0]) == alone(built, {"max_new_tokens": 6, **sampling})
    check(scheduler)


@pytest.mark.parametrize("engine_draws", [False, True])
def test_a_grammars_refusal_ends_its_request_as_a_bad_request(built: Path, engine_draws: bool) -> None:
    scheduler, _, _ = make_scheduler(built, FullEngine(loaded(), max_requests=2, draws=engine_draws))
    request = make_request(scheduler, max_new_tokens=6)

    class Grammar:
        def begin(self) -> None: ...

        def allowed(self, vocab_size: int) -> None:
            raise BadRequestError("ask for a simpler one")

    request.grammar = Grammar()
    run(scheduler)
    error = read(request)[1]
    assert isinstance(error, BadRequestError) and error.message == "ask for a simpler one"
    check(scheduler)


def test_a_grammar_mask_is_begun_at_once_and_awaited_when_used(built: Path) -> None:
    scheduler, _, _ = make_scheduler(built, FullEngine(loaded(), max_requests=2, draws=True))
    request = make_request(scheduler, max_new_tokens=6)
    request.grammar = Mock()
    request.grammar.allowed.return_value = np.arange(5) == 3
    (spec,) = request.draw_specs(set())
    found = spec.allowed(5)
    assert [call[0] for call in request.grammar.method_calls] == ["begin"]
    assert found().tolist() == [False, False, False, True, False]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 1}, {"top_logprobs": 2}])
def test_non_finite_logits_fail_their_request_and_no_other(built: Path, sampling: dict[str, float]) -> None:
    engine = FullEngine(loaded(), max_requests=2)
    scheduler, _, _ = make_scheduler(built, engine)
    poisoned = make_request(scheduler, max_new_tokens=6, **sampling)
    other = make_request(scheduler, max_new_tokens=6, **sampling)
    scheduler.turn()
    real, request_slot = engine.step, poisoned.request_slot

    def step(rows, *args):
        result = real(rows, *args)
        for row in (i for i, row in enumerate(rows) if row.request_slot == request_slot):
            result.next_ids[row] = -1
            if result.logits is not None:
                result.logits[row, 3] = np.nan
        return result

    engine.step = step
    scheduler.turn()
    error = read(poisoned)[1]
    assert isinstance(error, ServingError) and "cannot be drawn" in error.message
    engine.step = real
    run(scheduler)
    assert (other.token_ids, read(other)[0]) == alone(built, {"max_new_tokens": 6, **sampling})
    check(scheduler)


def test_a_broken_engine_refuses_requests_until_it_recovers(built: Path) -> None:
    engine = FullEngine(loaded(), max_requests=2)
    scheduler, _, clock = make_scheduler(built, engine)
    requests = [make_request(scheduler, max_new_tokens=6) for _ in range(4)]
    scheduler.turn()
    real = engine.step

    def fail(*args):
        raise RuntimeError("the device is gone")

    engine.step = fail
    scheduler.turn()
    idle_s = scheduler.turn()
    assert all(isinstance(read(request)[1], ServingError) for request in requests)
    assert idle_s and 0 < idle_s <= 1.0
    with pytest.raises(WorkerLostError, match="the device is gone"):
        make_request(scheduler)
    clock.now += 1
    scheduler.turn()
    assert scheduler.health.fault is not None
    engine.step = real
    clock.now += 1
    scheduler.turn()
    again = make_request(scheduler, max_new_tokens=6)
    run(scheduler)
    assert isinstance(read(again)[1], Done)
    assert not engine.request_slots


def test_a_request_unsupported_by_the_engine_fails_alone(built: Path) -> None:
    engine = FullEngine(loaded())
    scheduler, _, _ = make_scheduler(built, engine)
    real = engine.open

    def refuse(request_slot, context_id, config, selector):
        if selector == "exact":
            raise ConfigError("this engine has no exact selector")
        real(request_slot, context_id, config, selector)

    engine.open = refuse
    refused, other = make_request(scheduler, selector="exact"), make_request(scheduler)
    run(scheduler)
    assert isinstance(read(refused)[1], BadRequestError)
    assert isinstance(read(other)[1], Done)


def test_fidelity_is_measured_every_hundred_steps_in_rotation(built: Path) -> None:
    engine = FullEngine(loaded(), tail_capacity=2000)
    scheduler, _, _ = make_scheduler(built, engine)
    seen, real = [], engine.step

    def watching(rows, want_logits, watch):
        seen.append(watch if watch is None else (rows[watch[0]].request_slot, watch[1]))
        return real(rows, want_logits, watch)

    engine.step = watching
    requests = [make_request(scheduler, max_new_tokens=601) for _ in range(2)]
    while not all(request.is_over for request in requests):
        scheduler.turn()
        for request in requests:
            read(request)
    watched = [watch for watch in seen if watch is not None]
    assert len(watched) == -(-len(seen) // 100)
    assert len(set(watched[:6])) == 6, "each layer of each request once"
    text = next(m for m in scheduler.metrics.collect() if m.name == "csattn_fidelity_recall")
    assert sum(s.value for s in text.samples if s.name.endswith("_count")) == len(watched)


def test_a_step_has_one_row_for_every_decoding_request(built: Path) -> None:
    scheduler, _, _ = make_scheduler(built, FullEngine(loaded(), max_rows=4, max_requests=16))
    requests = [make_request(scheduler, max_new_tokens=30) for _ in range(4)]
    rows = QuestionRows()
    assert [num_rows for _, num_rows in plan_step(requests, 4, rows)] == [1, 1, 1, 1]
    for request in requests[:3]:
        request.num_fed = len(request.question_ids)
    assert plan_step(requests, 16, rows) == [(request, 1) for request in requests[:3]], "what they take alone is asked"
    rows.add(3, 0, 0.0)
    assert sorted(num_rows for _, num_rows in plan_step(requests, 16, rows)) == [1, 1, 1, 4]
    assert np.sum([num_rows for _, num_rows in plan_step(requests, 4, rows)]) == 4
    assert SearchConfig().keep == requests[0].config.keep
