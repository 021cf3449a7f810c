"""The retry-after time of requests that are refused for overload, with a fake clock."""

from dataclasses import dataclass

import pytest

from workers.serving.flow import Flow
from workers.serving.messages import OverloadedError

RUNNING, QUEUED = 8, 16


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def flow(clock: Clock) -> Flow:
    return Flow(RUNNING, QUEUED, clock)


def fill(flow: Flow) -> float:
    """Reserve all places, and return the seconds after which the next request may try again."""
    while flow.num_in_flight < RUNNING + QUEUED:
        flow.reserve()
    with pytest.raises(OverloadedError, match="try again in") as refused:
        flow.reserve()
    assert refused.value.retry_after_s is not None
    return refused.value.retry_after_s


def answer(flow: Flow, clock: Clock, batches: int, took_s: float) -> None:
    """Answer batches of RUNNING requests, one after another."""
    for _ in range(batches):
        clock.now += took_s
        for _ in range(RUNNING):
            flow.release(was_answered=True)


def answer_alone(flow: Flow, clock: Clock, took_s: float) -> None:
    flow.reserve()
    clock.now += took_s
    flow.release(was_answered=True)


def test_retry_after_is_the_time_that_a_full_queue_takes(flow: Flow, clock: Clock) -> None:
    for _ in range(10):
        fill(flow)
        answer(flow, clock, 2, took_s=3.0)
    assert fill(flow) == pytest.approx(2 * 3.0, rel=0.1)  # two batches wait


def test_idle_time_does_not_change_retry_after(flow: Flow, clock: Clock) -> None:
    for _ in range(10):
        fill(flow)
        answer(flow, clock, 3, took_s=3.0)
    before = fill(flow)
    answer(flow, clock, 3, took_s=3.0)
    assert flow.num_in_flight == 0
    clock.now += 3600.0
    assert fill(flow) == pytest.approx(before, rel=0.1)


def test_slow_requests_without_a_queue_do_not_raise_retry_after(flow: Flow, clock: Clock) -> None:
    answer_alone(flow, clock, 600.0)
    assert fill(flow) == 1.0
    answer(flow, clock, 3, took_s=3.0)
    for _ in range(5):
        answer_alone(flow, clock, 600.0)
    assert fill(flow) <= 10.0


def test_retry_after_grows_while_the_first_burst_is_unanswered(flow: Flow, clock: Clock) -> None:
    told = [fill(flow)]
    for _ in range(4):
        clock.now += 2.0
        told.append(fill(flow))
    assert told[0] == 1.0 and told == sorted(told) and len(set(told)) == len(told)
    clock.now += 1e6
    assert fill(flow) == 600.0


def test_requests_that_were_not_answered_do_not_count_for_retry_after(flow: Flow, clock: Clock) -> None:
    fill(flow)
    for _ in range(100):  # refused because of what they ask for
        flow.release(was_answered=False)
        flow.reserve()
    clock.now += 4.0
    assert fill(flow) == pytest.approx(4.0 / (RUNNING / 2) * QUEUED)
