"""Runs `follow` in a process that ends with the process that started it."""

import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from threading import Thread

from workers.engine.gpu.follower import follow

_POLL_S = 0.5  # between checks whether the first process is alive


def main(descriptor: str, parent: str) -> None:
    for number in (signal.SIGINT, signal.SIGHUP):  # from the terminal; the first process handles them
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
        os._exit(status)  # without waiting for work on the device, which may never end


def _end_with(parent: int) -> None:
    """End this process with its parent. Otherwise its device could wait for ever for one whose process is gone."""
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
