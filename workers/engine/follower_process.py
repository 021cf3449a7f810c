"""`follow` as a process, which ends with the one that started it."""

import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from threading import Thread

from workers.engine.follower import follow

_LOOK_S = 0.5  # from one look for the first process to the next


def main(descriptor: str, parent: str) -> None:
    for number in (signal.SIGINT, signal.SIGHUP):  # of the terminal, which are the first process's business
        signal.signal(number, signal.SIG_IGN)
    Thread(target=_end_with, args=(int(parent),), daemon=True).start()
    status = 1
    try:
        follow(Connection(int(descriptor)))
        status = 0
    except Exception:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status)  # what the device still waits for, if so, is waited for by nobody


def _end_with(parent: int) -> None:
    """A device that waits for another whose process is gone waits for ever, and its process with it."""
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
