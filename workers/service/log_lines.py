"""Where a process of the service logs: lines of one form on stderr."""

import faulthandler
import logging
import sys
from contextlib import suppress
from functools import cache
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
    _clean_records()
    logging.basicConfig(stream=sys.__stderr__, format=FORM, level=logging.WARNING)
    for name in _OURS:
        logging.getLogger(name).setLevel(logging.INFO)
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # else it warns of every client that has left


@cache
def _clean_records() -> None:
    """In whatever form they are written: Serve's handlers have their own. What made records before, Ray's too, goes on
    making them.

    A message is one line, and those of a trace are indented: names of files, which a stranger may have given, write
    none that looks like another.
    """
    make = logging.getLogRecordFactory()

    def cleaned(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        if record.name:
            record.name = _one_line(record.name)
        with suppress(Exception):  # it does not go with its arguments: who writes it says so
            record.msg, record.args = _one_line(record.getMessage()), None
        if record.exc_info:
            record.exc_text = _indented(logging.Formatter().formatException(record.exc_info))
        if record.stack_info:
            record.stack_info = _indented(record.stack_info)
        return record

    logging.setLogRecordFactory(cleaned)


def _one_line(text: str) -> str:
    return harmless(" ".join(text.splitlines()))


def _indented(text: str) -> str:
    return harmless("\n".join(f"  {line}" for line in text.splitlines()))
