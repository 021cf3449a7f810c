"""How a module of this project is run as a process of its own, and ends with the one that started it."""

import os
import select
import sys
import time
from pathlib import Path
from threading import Thread

_ROOT = Path(__file__).resolve().parents[1]


def module_command(module: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """The command, and the environment in which it finds the packages where this process has them."""
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return [sys.executable, "-P", "-m", module, *arguments], os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def end_with(fd: int, grace_s: float) -> None:
    """End this process, whatever it does, so long after the other end of that pipe or socket has closed: its owner may
    have been killed, and has not said so."""
    Thread(target=_await_end, args=(fd, grace_s), name="owner-watch", daemon=True).start()


def _await_end(fd: int, grace_s: float) -> None:
    poller = select.poll()
    poller.register(fd, 0)  # no more than that it is closed: what is said there is for others
    poller.poll()
    time.sleep(grace_s)
    os._exit(0)
