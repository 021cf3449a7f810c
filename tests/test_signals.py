"""`own_handlers` restores our signal handlers after a library has replaced them while starting."""

import signal
import subprocess
import sys
import threading

import pytest

from csattn.signals import own_handlers


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]


def library() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)


def test_own_handlers_restores_replaced_handlers() -> None:
    before = handlers()
    with own_handlers(undo=lambda: pytest.fail("nothing ended it")):
        library()
        assert handlers() != before
    assert handlers() == before


def test_own_handlers_works_in_another_thread() -> None:
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
def test_an_exit_while_starting_is_undone_and_has_the_signals_exit_code(code: int, wanted: int) -> None:
    before, undone = handlers(), []
    with pytest.raises(SystemExit) as ended, own_handlers(undo=lambda: undone.append(handlers())):
        exit_within(code)
    assert ended.value.code == wanted and undone == [before]


@pytest.mark.parametrize("is_handled", [True, False])
@pytest.mark.parametrize(
    ("sent", "has_terminal"), [(signal.SIGHUP, True), (signal.SIGHUP, False), (signal.SIGTERM, False)]
)
def test_a_handled_signal_spares_started_processes(
    monkeypatch: pytest.MonkeyPatch, sent: signal.Signals, has_terminal: bool, is_handled: bool
) -> None:
    """A handled signal spares started processes, and our handler still gets it. One that is not handled ends them."""
    told: list[int] = []
    monkeypatch.setattr("os.isatty", lambda file: has_terminal)
    before = signal.signal(sent, (lambda number, _: told.append(number)) if is_handled else signal.SIG_DFL)
    try:
        with own_handlers(undo=lambda: pytest.fail("nothing ended it")):
            done = subprocess.run(["sh", "-c", f"kill -{sent} $$"])
            if is_handled:
                signal.raise_signal(sent)  # to this thread, which blocks it
                assert not told
    finally:
        signal.signal(sent, before)
    assert done.returncode == (0 if is_handled else -sent) and told == [sent] * is_handled
    assert sent not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_started_processes_of_a_terminal_end_by_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.isatty", lambda file: True)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with own_handlers(undo=lambda: pytest.fail("nothing ended it")):
            done = subprocess.run(["sh", "-c", "kill -TERM $$"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert done.returncode == -signal.SIGTERM
