"""Work beside steps."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from workers.engine.beside import run_beside, thread_beside


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with thread_beside(torch.device("cpu"), "beside") as executor:
        yield executor


def test_steps_go_on_between_its_parts(thread: ThreadPoolExecutor) -> None:
    seen = []

    def work(give_way: Callable[[], None]) -> None:
        for part in range(5):
            seen.append(f"part {part}")
            give_way()

    run_beside(thread, work, lambda: seen.append("step"))
    for part in range(4):
        assert "step" in seen[seen.index(f"part {part}") : seen.index(f"part {part + 1}")]


def test_what_it_raises_is_raised(thread: ThreadPoolExecutor) -> None:
    def work(give_way: Callable[[], None]) -> None:
        give_way()
        raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        run_beside(thread, work, lambda: None)


def test_a_step_that_fails_waits_for_it(thread: ThreadPoolExecutor) -> None:
    ended = []

    def work(give_way: Callable[[], None]) -> None:
        for _ in range(3):
            give_way()
        ended.append(True)

    def fails() -> None:
        raise RuntimeError("a step failed")

    with pytest.raises(RuntimeError, match="a step failed"):
        run_beside(thread, work, fails)
    assert ended
