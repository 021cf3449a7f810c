"""Work that runs in a thread, concurrently with steps."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from time import sleep

import pytest
import torch

from workers.engine.gpu.stream_thread import run_in_thread, stream_thread


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with stream_thread(torch.device("cpu"), "beside") as executor:
        yield executor


def test_steps_continue_while_the_thread_works(thread: ThreadPoolExecutor) -> None:
    stepped, steps = Event(), []

    def work() -> int:
        assert stepped.wait(60)
        return 7

    def step() -> None:
        steps.append(1)
        stepped.set()

    assert run_in_thread(thread, work, step) == 7 and steps


def test_an_error_in_the_thread_is_raised_to_the_caller(thread: ThreadPoolExecutor) -> None:
    def work() -> None:
        raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        run_in_thread(thread, work, lambda: None)


def test_a_failed_step_is_raised_only_after_the_thread_has_finished(thread: ThreadPoolExecutor) -> None:
    failing, ended = Event(), []

    def work() -> None:
        assert failing.wait(60)
        sleep(0.05)
        ended.append(True)

    def fails() -> None:
        failing.set()
        raise RuntimeError("a step failed")

    with pytest.raises(RuntimeError, match="a step failed"):
        run_in_thread(thread, work, fails)
    assert ended
