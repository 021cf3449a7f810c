"""A time limit for code that may block for ever, however it blocks."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_GUARD = """
import os, select, signal, sys
pid, seconds, why = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
if not select.select([0], [], [], seconds)[0] and os.getppid() == pid:
    os.write(2, f"{why}; process {pid} ends: start it again\\n".encode())
    os.kill(pid, signal.SIGKILL)
"""


@contextmanager
def ends_within(seconds: float, why: str) -> Iterator[None]:
    """Kill this process if the body has not returned within `seconds`. `why` is written to stderr first.

    A separate process is the watchdog: torch waits for other devices' memory while it holds Python's lock (the GIL),
    which stops every thread of this process.
    """
    command = [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid()), str(seconds), why]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as guard:
        try:
            yield
        finally:
            guard.communicate(b"done")
