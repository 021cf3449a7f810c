"""`check` raises AssertionError if a stream's bookkeeping is inconsistent."""

from functools import singledispatch
from typing import Any

from workers.streaming.heavy_hitters import HeavyRows
from workers.streaming.window import WindowRows


@singledispatch
def check(thing: Any) -> None:
    raise TypeError(f"nothing is known of what keeps {thing!r} right")


@check.register
def _(rows: WindowRows) -> None:
    """Raise AssertionError if the window has lost a row that the next token sees."""
    kept = max(0, min(rows.kv_len - rows._sink_len, rows._window_len - 1))
    assert kept <= rows._end <= rows._k.shape[1], f"{rows!r} has {rows._end} rows in its window"


@check.register
def _(rows: HeavyRows) -> None:
    """Raise AssertionError if a row is lost, or attention is counted where no row is."""
    num_rows = rows._num_heavy + min(rows._end, rows._window_len)
    assert num_rows == min(rows.kv_len, rows._heavy_len + rows._window_len), f"{rows!r} keeps {num_rows} rows"
    assert not rows._heavy_mass[:, rows._num_heavy :].any(), f"{rows!r} counts attention where no row is"
