"""Where a process of the service logs: lines of one form on stderr."""

import faulthandler
import logging
import sys
from contextlib import suppress

from workers.words import harmless

FORM = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_OURS = ("csattn", "offload", "workers")


def log_to_stderr() -> None:
    """What the service's own packages say of their work, and others' warnings. A process that logs already does so as
    it was set up. A signal that ends it at once, where a file has lost what is mapped of it, say, leaves a trace."""
    if sys.__stderr__ is not None and not faulthandler.is_enabled():  # Ray has it in its workers
        with suppress(OSError, ValueError, AttributeError):  # a stream without a descriptor
            faulthandler.enable(sys.__stderr__)
    handler = logging.StreamHandler(sys.__stderr__)
    handler.setFormatter(_Lines(FORM))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)  # Serve puts its own in its place
    for name in _OURS:
        logging.getLogger(name).setLevel(logging.INFO)
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # else it warns of every client that has left


class _Lines(logging.Formatter):
    """A message is one line, and those of a trace are indented: names of files, which a stranger may have given, write
    none that looks like another."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802, it is logging's
        return " ".join(super().formatMessage(record).splitlines())

    def format(self, record: logging.LogRecord) -> str:
        return harmless("\n  ".join(super().format(record).splitlines()))
