"""What a library that starts leaves of our handlers."""

import signal
import sys
import threading

import pytest

from csattn.signals import own_handlers


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]


def library() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)


def test_handlers_are_ours_again() -> None:
    before = handlers()
    with own_handlers(undo=lambda: pytest.fail("nothing ended it")):
        library()
        assert handlers() != before
    assert handlers() == before


def test_another_thread_may_start_it_too() -> None:
    told: list[str] = []

    def start() -> None:
        with own_handlers(undo=told.clear):
            told.append("started")
        told.append("went on")

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert told == ["started", "went on"]


def exit_within(code: int) -> None:
    library()
    sys.exit(code)


@pytest.mark.parametrize(("code", "wanted"), [(signal.SIGTERM, 143), (3, 3)])
def test_an_exit_from_within_is_undone_and_has_the_signals_code(code: int, wanted: int) -> None:
    before, undone = handlers(), []
    with pytest.raises(SystemExit) as ended, own_handlers(undo=lambda: undone.append(handlers())):
        exit_within(code)
    assert ended.value.code == wanted and undone == [before]
