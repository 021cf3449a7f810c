"""What the command line shows: progress, and tables or one JSON line."""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from workers.words import counted, printable

if TYPE_CHECKING:  # commands that only look must not wait for torch, nor fail if it is broken
    from index_build.board import BuildProgress


class _Console(Console):
    def render_str(self, text: str, **options: Any) -> Text:
        shown = printable(text).encode(self.encoding, "backslashreplace").decode(self.encoding)  # its final width
        return super().render_str(shown, **options)


class _StderrConsole(_Console):
    """The console on stderr, for all but the result. If its reader is gone, or its disk is full, the work goes on."""

    def on_broken_pipe(self) -> None:
        """Do nothing: rich's own method ends the process."""

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError:
            self._buffer.clear()  # else it is written again, with all that follows


# In pipes and logs, tables need a fixed width, because nobody can resize a window.
_WIDTH = None if sys.stdout.isatty() else 140
# Models, paths and errors are shown as they are: "csattn[serve]" is no markup, ":smile:" no picture.
out = _Console(highlight=False, markup=False, emoji=False, width=_WIDTH)
err = _StderrConsole(stderr=True, highlight=False, markup=False, emoji=False)


def write(text: str) -> None:
    """Write a piece of an answer without rich, which would turn its tabs into spaces."""
    if not out.quiet:
        sys.stdout.write(printable(text))
        sys.stdout.flush()


@contextmanager
def only_json() -> Iterator[None]:
    """Print nothing but JSON to stdout within the block."""
    out.quiet = True
    try:
        yield
    finally:
        out.quiet = False


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object on one line of stdout."""
    is_utf = (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    line = json.dumps(value, ensure_ascii=not is_utf)
    sys.stdout.write(re.sub("[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", line) + "\n")
    sys.stdout.flush()


@contextmanager
def output_that_may_fail() -> Iterator[None]:
    """If stdout is a full disk, or its reader is gone, go on, and redirect it to the null device.

    Else Python would write the buffered rest again at exit, and end with another exit code.
    """
    try:
        yield
    except OSError:
        with suppress(OSError):  # stdout may have no descriptor
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_json_to_stderr(value: dict[str, Any]) -> None:
    """Print one JSON object on one line of stderr; if that cannot be written, go on."""
    with suppress(OSError):
        print(json.dumps(value), file=sys.stderr, flush=True)


def end(result: dict[str, Any], json: bool) -> None:
    """End a command: print its result if `--json` was given."""
    if json:
        print_json(result)


def table(title: str, columns: list[str], rows: list[list[str]]) -> Table:
    """Return a table whose first column is text and whose others are figures."""
    shown = Table(title=title, title_justify="left", header_style="bold")
    for position, column in enumerate(columns):
        shown.add_column(column, justify="left" if position == 0 else "right", overflow="fold")
    for row in rows:
        shown.add_row(*row)
    return shown


class Bar:
    """A progress bar on a terminal, and nothing elsewhere, for the length of the block."""

    def __init__(self, *more: ProgressColumn, transient: bool = False) -> None:
        columns = TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), *more
        self._bar = Progress(*columns, console=err, disable=not err.is_terminal, transient=transient)
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def show(self, what: str, done: float, total: float, **fields: Any) -> None:
        """fields: the values of additional columns."""
        self._bar.update(self._task, description=what, completed=done, total=total, refresh=True, **fields)

    def advance(self, more: float) -> None:
        self._bar.advance(self._task, more)

    def stop(self) -> None:
        self._bar.stop()


class BuildDisplay(Bar):
    """A build's progress: a bar with layer, phase, rate and time left; a plain line per layer without a terminal."""

    def __init__(self) -> None:
        super().__init__(TextColumn("{task.fields[rate]}", markup=False), TimeRemainingColumn())
        self._started = time.monotonic()
        self._first_rows: int | None = None

    def __call__(self, progress: "BuildProgress") -> None:
        rows = progress.layer_idx * progress.total + progress.done
        all_rows = progress.num_layers * progress.total
        if self._first_rows is None:
            self._first_rows = progress.layer_idx * progress.total  # a resumed build starts there
        elapsed = time.monotonic() - self._started
        rate = (rows - self._first_rows) / progress.num_layers / max(elapsed, 1e-9)
        where = f"layer {progress.layer_idx + 1}/{progress.num_layers} {progress.phase:7}"
        self.show(where, rows, all_rows, rate=f"{rate:.0f} tokens/s")
        if not err.is_terminal and progress.phase == "write":
            left = elapsed * (all_rows - rows) / max(rows - self._first_rows, 1)
            err.print(f"{where} {100 * rows / all_rows:.0f} %, {rate:.0f} tokens/s, {left:.0f} s left")


class JsonProgress:
    """A build's progress for programs: one JSON object per line on stderr, whenever another percent is done."""

    def __init__(self, artifact_id: str) -> None:
        self._artifact_id, self._reported_share = artifact_id, -1.0

    def __call__(self, progress: "BuildProgress") -> None:
        share = progress.share
        if share < self._reported_share + 0.01 and share < 1.0:
            return
        self._reported_share = share
        what = {"progress": round(share, 4), "layer": progress.layer_idx + 1, "layers": progress.num_layers}
        print_json_to_stderr({**what, "phase": progress.phase, "artifact": self._artifact_id})


@contextmanager
def counting(what: str, total: int, one: str) -> Iterator[Bar]:
    """Yield a bar to be advanced; print a line at the end, without a terminal also at the start.

    one: the singular of what is counted.
    """
    started = time.monotonic()
    if not err.is_terminal:
        err.print(f"{what}: {counted(total, one)}")
    with Bar(TimeRemainingColumn(), transient=True) as bar:
        bar.show(what, 0, total)
        yield bar
    err.print(f"{what}: done in {time.monotonic() - started:.1f} s")


@contextmanager
def reading(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a callback (done, total) that shows a bar until all tokens are done; nothing without a terminal."""
    with Bar(TimeRemainingColumn(), transient=True) as bar:

        def show(done: int, total: int) -> None:
            bar.show(f"{what}, {done} of {total} tokens", done, total)
            if done == total:
                bar.stop()  # what follows may be on the same line

        yield show


@contextmanager
def steps() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a callback (part, done, total) that shows a bar; without a terminal, a line for each part."""
    printed = set()
    with Bar(transient=True) as bar:

        def show(part: str, done: int, total: int) -> None:
            if part not in printed and not err.is_terminal:
                err.print(part)
            printed.add(part)
            bar.show(part, done, total)

        yield show
