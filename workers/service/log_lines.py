"""Logging in a process of the service: lines of one format on stderr."""

import faulthandler
import logging
import sys
from contextlib import suppress
from functools import cache
from typing import Any

from workers.words import printable

FORM = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_OWN_PACKAGES = ("csattn", "offload", "workers")


def log_to_stderr() -> None:
    """Log the service's own packages from level INFO, others from WARNING. Logging that is set up already stays.

    A fatal signal, such as SIGBUS after a memory-mapped file was truncated, leaves a traceback.
    """
    if sys.__stderr__ is not None and not faulthandler.is_enabled():  # Ray enables it in its workers
        with suppress(OSError, ValueError, AttributeError):  # a stream without a descriptor
            faulthandler.enable(sys.__stderr__)
    _clean_records()
    logging.basicConfig(stream=sys.__stderr__, format=FORM, level=logging.WARNING)
    for name in _OWN_PACKAGES:
        logging.getLogger(name).setLevel(logging.INFO)
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # else it warns of every client that has left


@cache
def _clean_records() -> None:
    """Clean records when they are made, because handlers, as Serve's, have formats of their own.

    The record factory that was set before, such as Ray's, still makes them. A message becomes one line, and a
    traceback is indented: text of strangers, such as file names, cannot forge a log line.
    """
    make = logging.getLogRecordFactory()

    def cleaned(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        if record.name:
            record.name = _one_line(record.name)
        with suppress(Exception):  # message and arguments do not match: the handler reports it
            record.msg, record.args = _one_line(record.getMessage()), None
        if record.exc_info:
            record.exc_text = _indented(logging.Formatter().formatException(record.exc_info))
        if record.stack_info:
            record.stack_info = _indented(record.stack_info)
        return record

    logging.setLogRecordFactory(cleaned)


def _one_line(text: str) -> str:
    return printable(" ".join(text.splitlines()))


def _indented(text: str) -> str:
    return printable("\n".join(f"  {line}" for line in text.splitlines()))
