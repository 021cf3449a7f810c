"""Where a process of the service logs: lines of one form on stderr."""

import faulthandler
import logging
import sys
from contextlib import suppress
from typing import Any

from workers.words import harmless

FORM = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_OURS = ("csattn", "offload", "workers")


def log_to_stderr() -> None:
    """What the service's own packages say of their work, and others' warnings. A process that logs already does so as
    it was set up. A signal that ends it at once, where a file has lost what is mapped of it, say, leaves a trace."""
    if sys.__stderr__ is not None and not faulthandler.is_enabled():  # Ray has it in its workers
        with suppress(OSError, ValueError, AttributeError):  # a stream without a descriptor
            faulthandler.enable(sys.__stderr__)
    logging.setLogRecordFactory(_OneLine)  # in whatever form they are written: Serve's handlers have their own
    logging.basicConfig(stream=sys.__stderr__, format=FORM, level=logging.WARNING)
    for name in _OURS:
        logging.getLogger(name).setLevel(logging.INFO)
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # else it warns of every client that has left


class _OneLine(logging.LogRecord):
    """A message is one line, and those of a trace are indented: names of files, which a stranger may have given, write
    none that looks like another."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.exc_info:
            trace = logging.Formatter().formatException(self.exc_info)
            self.exc_text = harmless("\n".join(f"  {line}" for line in trace.splitlines()))

    def getMessage(self) -> str:  # noqa: N802, it is logging's
        return harmless(" ".join(super().getMessage().splitlines()))
