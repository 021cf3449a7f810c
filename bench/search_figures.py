"""Tables of the search on a CPU."""

import json
from functools import cache
from typing import Any

from bench.records import RESULTS

LONG, SHORT = 131_072, 8192
NUM_SUBSPACES, LISTED_SHARE = 8, 0.25  # of the preset lists
RUNS = (  # a row's title, its layout, its run in the result file
    ("sketch: search, choice included", "sketch", "threads"),
    ("sketch: search, and attention to the rest", "sketch", "threads_with_rest"),
    ("lists: search", "lists", "threads"),
)


def search() -> list[str]:
    """Return a table of the search's time by one thread and by two."""
    lines = [
        f"| {LONG:,} keys from memory, head_dim 128, groups of 4: µs per query head | one thread | two threads |",
        "|---|---:|---:|",
    ]
    for name, layout, run in RUNS:
        one, two = (us_of(layout, LONG, run, threads) for threads in (1, 2))
        lines.append(f"| {name} | {one:.0f} | {two:.0f} ({one / two:.2f} × as fast) |")
    return lines


def search_log() -> list[str]:
    """Return the log's table: the search's time at two lengths, and attention to the rest alone."""
    one, two = (_content()["read_gbps"][threads] for threads in "12")
    later = ""
    if "lists" in _content():  # a run of lists alone, put into the file of another
        of_lists = [_content()["lists"]["read_gbps"][threads] for threads in "12"]
        later = f"; lists on those of a later day, which read {of_lists[0]} and {of_lists[1]}"
    lines = [
        f"Two virtual cores of a Xeon, quiet; one thread reads at most {one} GB/s from memory, two {two}{later} "
        "(`results/search-cpu.json`):",
        "",
        f"| from memory, µs per query head | {SHORT:,} keys | {LONG:,} keys | two threads, {LONG:,} |",
        "|---|---:|---:|---:|",
    ]
    for name, layout, run in RUNS:
        short, long, beside = (us_of(layout, *of) for of in ((SHORT, run, 1), (LONG, run, 1), (LONG, run, 2)))
        entries = [_by_entry(us, length) if layout == "lists" else "" for us, length in ((short, SHORT), (long, LONG))]
        lines.append(f"| {name} | {short:.0f}{entries[0]} | {long:.0f}{entries[1]} | {beside:.0f} |")
    alone = [_measured("sketch", length)["rest_alone"]["us_per_query_head"] for length in (SHORT, LONG)]
    name = "sketch: attention to the rest alone, by codes that are scored anew"
    return [*lines[:-1], f"| {name} | {alone[0]:.0f} | {alone[1]:.0f} | |", lines[-1]]


def us_of(layout: str, context_len: int, run: str, threads: int) -> float:
    """Return microseconds per query head."""
    return float(_measured(layout, context_len)[run][str(threads)]["us_per_query_head"])


def _by_entry(us: float, context_len: int) -> str:
    """Return a search's time per entry of the lists that it reads, as text."""
    return f" ({1e3 * us / (NUM_SUBSPACES * LISTED_SHARE * context_len):.1f} ns an entry)"


def _measured(layout: str, context_len: int) -> dict[str, Any]:
    [found] = [of for of in _content()["searches"] if (of["layout"], of["context_len"]) == (layout, context_len)]
    return dict(found)


@cache
def _content() -> dict[str, Any]:
    return dict(json.loads((RESULTS / "search-cpu.json").read_text()))
