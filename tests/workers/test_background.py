"""A background thread returns the errors of its calls, and keeps nothing alive."""

import gc
import weakref

import pytest

from workers.background import BackgroundThread

WAIT_S = 60


def test_calls_run_in_order_and_their_errors_are_returned() -> None:
    seen: list[int] = []
    background = BackgroundThread("test")

    def fail() -> None:
        raise ValueError("no")

    first, second, third = (
        background.start(lambda: seen.append(1)),
        background.start(fail),
        background.start(lambda: seen.append(2)),
    )
    third.result(WAIT_S)
    first.result(0)
    with pytest.raises(ValueError, match="no"):
        second.result(0)
    assert seen == [1, 2]


def test_a_background_thread_frees_finished_calls_and_ends_when_dropped() -> None:
    class Thing:
        def use(self) -> None: ...

    background, thing = BackgroundThread("test"), Thing()
    background.start(thing.use).result(WAIT_S)
    background.start(lambda: None).result(WAIT_S)
    kept, thread = weakref.ref(thing), background._thread
    del thing
    gc.collect()
    assert kept() is None
    del background
    gc.collect()
    thread.join(WAIT_S)
    assert not thread.is_alive()
