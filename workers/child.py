"""Run a module of this project as a child process, and end it with the process that started it."""

import os
import select
import sys
import time
from pathlib import Path
from threading import Thread

_ROOT = Path(__file__).resolve().parents[1]


def module_command(module: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Return the command, and an environment in which the child imports the same packages as this process."""
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return [sys.executable, "-P", "-m", module, *arguments], os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def end_with(fd: int, grace_s: float) -> None:
    """Exit this process grace_s after the other end of a pipe or socket has closed, whatever it is doing.

    The owner may have been killed and sends no message then.
    """
    Thread(target=_await_end, args=(fd, grace_s), name="owner-watch", daemon=True).start()


def _await_end(fd: int, grace_s: float) -> None:
    poller = select.poll()
    poller.register(fd, 0)  # only POLLHUP and POLLERR: the data is for other readers
    poller.poll()
    time.sleep(grace_s)
    os._exit(0)
