"""The entry point of `csattn`: exit code 0 only on success, and every failure is a sentence on stderr."""

import errno
import os
import signal
import sys
from contextlib import suppress
from io import TextIOWrapper
from typing import Any

import typer

from csattn.errors import CsattnError
from csattn.signals import TERMINATED, ending_signals
from offload.errors import is_out_of_memory
from workers.cli import signals
from workers.cli.app import app
from workers.cli.usage import ClickError, sentence_of
from workers.garbage import reduce_gc
from workers.words import printable

_BUILDING = ["build"], ["demo"]
_MAX_REPORTED = 300  # characters of a library's message
_REMEDIES = (
    "end other programs, use a shorter context, a narrower --dtype or a machine with more memory; `csattn doctor` "
    "shows how much is available"
)


def main() -> None:
    """Run the command line in `sys.argv`. Returns on success, and exits with a non-zero code otherwise."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the caller, as with >&-
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper):  # an answer may have characters that the terminal's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr does
    signals.record_signal(signal.SIGINT)
    interrupting = [signal.SIGTERM] if sys.argv[1:2] in _BUILDING else []
    if sys.argv[1:2] == ["eval"]:  # it has to remove its temporary artifacts
        interrupting = ending_signals()
    with signals.as_interrupts(interrupting):
        run()


def run() -> None:
    """Run a command without handling signals: a service that ends its builds waits for no message."""
    reduce_gc()
    try:
        if app(standalone_mode=False, prog_name="csattn") == 130:  # typer catches Ctrl-C itself, and returns this
            raise KeyboardInterrupt
    except CsattnError as error:
        _fail({"type": type(error).__name__, "message": str(error)}, 1)
    except ClickError as error:
        if not (message := sentence_of(error, app)):  # no arguments: the help is printed already
            sys.exit(error.exit_code)
        _fail({"type": "UsageError", "message": message}, error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        _interrupted()
    except SystemExit as ended:
        if ended.code != TERMINATED:
            raise
        signals.record_signal(signal.SIGTERM)
        _interrupted()
    except (MemoryError, RuntimeError, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            from workers.cli.terminal import output_that_may_fail

            with output_that_may_fail():
                sys.stdout.flush()
            what = (
                "a disk that is written to is full, perhaps that of the output; free some space, and run the "
                "command again"
            )
            _fail({"type": "OSError", "message": what}, 1)
        if not is_out_of_memory(error):
            raise
        wanted = " ".join(str(error).split())[:_MAX_REPORTED] or "how much was requested is unknown"
        _fail({"type": "MemoryError", "message": f"there is not enough memory ({wanted}); {_REMEDIES}"}, 1)


def _interrupted() -> None:
    goes_on = "; a build continues where it stopped when it is run again" if sys.argv[1:2] in _BUILDING else ""
    _fail({"type": "Interrupted", "message": f"interrupted{goes_on}"}, signals.exit_code())


def _fail(error: dict[str, Any], exit_code: int) -> None:
    with suppress(OSError):  # a full disk, say, must not prevent the JSON object
        print(f"error: {printable(error['message'])}", file=sys.stderr)
    if "--json" in sys.argv[1:]:
        from workers.cli.terminal import output_that_may_fail, print_json

        with output_that_may_fail():
            print_json({"error": error})
    sys.exit(exit_code)
