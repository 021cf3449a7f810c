"""Work beside the calling thread: its errors come back, and it keeps nothing alive."""

import gc
import weakref

import pytest

from workers.beside import Beside

WAIT_S = 60


def test_calls_are_made_one_after_the_other_and_their_errors_come_back() -> None:
    seen: list[int] = []
    beside = Beside("test")

    def fail() -> None:
        raise ValueError("no")

    first, second, third = (
        beside.start(lambda: seen.append(1)),
        beside.start(fail),
        beside.start(lambda: seen.append(2)),
    )
    third.result(WAIT_S)
    first.result(0)
    with pytest.raises(ValueError, match="no"):
        second.result(0)
    assert seen == [1, 2]


def test_it_ends_when_it_is_dropped_and_forgets_what_it_has_done() -> None:
    class Thing:
        def use(self) -> None: ...

    beside, thing = Beside("test"), Thing()
    beside.start(thing.use).result(WAIT_S)
    beside.start(lambda: None).result(WAIT_S)
    kept, thread = weakref.ref(thing), beside._thread
    del thing
    gc.collect()
    assert kept() is None
    del beside
    gc.collect()
    thread.join(WAIT_S)
    assert not thread.is_alive()
