"""What a library that starts leaves of our handlers."""

import signal
import threading

from csattn.signals import own_handlers


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]


def library() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)


def test_handlers_are_ours_again() -> None:
    before = handlers()
    with own_handlers():
        library()
        assert handlers() != before
    assert handlers() == before


def test_another_thread_may_start_it_too() -> None:
    told: list[str] = []

    def start() -> None:
        with own_handlers():
            told.append("started")
        told.append("went on")

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert told == ["started", "went on"]
