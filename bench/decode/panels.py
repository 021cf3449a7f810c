"""Panels side by side over context lengths or batch sizes: what the pictures of the decode benchmark are made of."""

import textwrap
from collections.abc import Callable, Iterable
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bench.decode.report import length
from bench.records import Case

OURS, LISTS = "default", "lists"
_CLOSE = 1.6  # times as long
DPI = 110
_LEFT, _RIGHT, _PANEL = 0.95, 2.8, 3.7  # inches: what stands beside the panels, and a panel
_LEGEND_WIDTH = 27  # characters
DASHED = "dashed: lists"
_STYLES: dict[str, tuple[str, str]] = {  # what is drawn -> colour, marker
    "full": ("#222222", "o"),
    "streamed": ("#b3261e", "s"),
    "paper": ("#d98e04", "^"),
    OURS: ("#0b61a4", "D"),
    LISTS: ("#5aa9e6", "D"),
    "window": ("#8a8a8a", "v"),
    "device": ("#0b61a4", "D"),
    "hybrid": ("#2a9d8f", "P"),
    "host": ("#7b3fa0", "X"),
}


def setting(content: dict[str, Any]) -> str:
    return f"{content['shape']}, {100 * content['keep']:g} % of the context kept, on one {content['machine']['gpu']}."


def make_figure(num_panels: int, title: str, subtitle: str, share_y: bool = True) -> tuple[Any, list[Any]]:
    width = _LEFT + _PANEL * num_panels + _RIGHT
    figure = Figure(figsize=(width, 5.4), dpi=DPI)
    FigureCanvasAgg(figure)
    space = 0.1 if share_y else 0.22
    grid = figure.add_gridspec(
        1, num_panels, left=_LEFT / width, right=1 - _RIGHT / width, top=0.80, bottom=0.12, wspace=space
    )
    panels = [figure.add_subplot(grid[0, 0])]
    panels += [figure.add_subplot(grid[0, i], sharey=panels[0] if share_y else None) for i in range(1, num_panels)]
    if share_y:
        for axes in panels[1:]:
            axes.tick_params(axis="y", labelleft=False)
    figure.text(_LEFT / width, 0.935, title, fontsize=16, weight="bold")
    figure.text(_LEFT / width, 0.89, subtitle, fontsize=10.5, color="#444444")
    return figure, panels


def draw_line(
    axes: Any,
    cases: Iterable[Case],
    style: str,
    name: str | None,
    value: Callable[[Case], float],
    over: str = "context_len",
) -> None:
    """Dashed where it has no name of its own."""
    ordered = sorted(cases, key=lambda case: case[over])
    if not ordered:
        return
    colour, marker = _STYLES[style]
    axes.plot(
        [case[over] for case in ordered], [value(case) for case in ordered], color=colour, marker=marker,
        markersize=7, markeredgecolor="white", linewidth=2, linestyle="-" if name else "--", label=name,
    )  # fmt: skip


def draw_dotted(axes: Any, cases: Iterable[Case], style: str, value: Callable[[Case], float]) -> None:
    ordered = sorted(cases, key=lambda case: case["context_len"])
    lengths = [case["context_len"] for case in ordered]
    axes.plot(lengths, [value(case) for case in ordered], ":", color=_STYLES[style][0], linewidth=1.6)


def finish_panel(
    axes: Any, cases: list[Case], title: str, name_of: Callable[[float], str], over: str = "context_len"
) -> None:
    """cases: what the axis over context lengths, or batch sizes, should hold, also where a panel lacks some."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    lengths = sorted({case[over] for case in cases})
    told = length if over == "context_len" else str
    # a tick close above another has no room for its name
    names = [told(n) if n > _CLOSE * below else "" for below, n in zip([0, *lengths], lengths, strict=False)]
    axes.set_xticks(lengths, names, fontsize=9)
    axes.set_xlim(lengths[0] / 1.3, lengths[-1] * 1.3)
    low, high = axes.get_ylim()
    marks = (1, 1.5, 2, 3, 5) if high / low < 30 else (1, 3) if high / low < 3000 else (1,)
    ticks = [mark * 10.0**power for power in range(-2, 8) for mark in marks]
    axes.set_yticks([tick for tick in ticks if low <= tick <= high])
    axes.yaxis.set_major_formatter(lambda value, _: name_of(value))
    axes.minorticks_off()
    axes.set_xlabel({"context_len": "tokens of context", "batch_size": "requests at a time"}[over])
    axes.set_title(title, fontsize=12, loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def time_name(us: float) -> str:
    return f"{us:g} µs" if us < 1000 else f"{us / 1000:g} ms"


def draw_legend(figure: Any, panels: list[Any], *notes: str) -> None:
    handles: dict[str, Any] = {}
    for axes in panels:
        handles.update({name: handle for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)})
    for note in notes:
        handles[note] = Line2D([], [], linestyle="--" if note == DASHED else ":", color="#444444")
    names = ["\n".join(textwrap.wrap(name, _LEGEND_WIDTH)) for name in handles]
    figure.legend(
        handles.values(), names, loc="center left", bbox_to_anchor=(panels[-1].get_position().x1 + 0.01, 0.48),
        frameon=False, fontsize=10, labelspacing=0.9,
    )  # fmt: skip
