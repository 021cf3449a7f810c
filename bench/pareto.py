"""What quality costs: plots KL of every selector over bytes read and moved per step, and over bytes of index.

    python -m bench.pareto FILE ... [--texts novel,code] [--plot FILE] [--json FILE]

FILE: figures of `python -m bench.accuracy selectors`. Time is not plotted: there csattn is compiled, and the others are
plain torch. KL is the geometric mean over the texts.
The Pareto front, drawn as a line, connects the selectors that no other beats in both.
"""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from bench.records import Case
from bench.selector_cases import selector_cases
from bench.timing import finish, gate
from csattn.config import PRESET_NAMES

# x axis -> its title, and its value for a case
AXES: dict[str, tuple[str, Callable[[Case], float]]] = {
    "read": (
        "MB read per step: search, the rest and fetched rows",
        lambda c: (c["search_bytes_per_step"] + c["rest_bytes_per_step"] + c["moved_bytes_per_step"]) / 1e6,
    ),
    "moved": ("MB moved per step: fetched rows", lambda c: c["moved_bytes_per_step"] / 1e6),
    "index": ("bytes of index per token and KV head", lambda c: c["index_bytes_per_key"]),
}
_DPI = 110
_MARKER, _LABEL_HEIGHT = 13, 17  # pixels
_SHIFTS = sorted(range(-400, 400, 2), key=abs)  # pixels
Box = tuple[float, float, float, float]  # left, right, bottom, top, in pixels
_OUR_COLOUR, _COLOUR, _LINE = "#0b61a4", "#7a4b12", "#b3261e"


def points(cases: list[Case], keep: float, axis: str) -> dict[str, tuple[float, float]]:
    """Return cost and KL of each contender that has all texts and lengths: the mean cost, the geometric mean KL."""
    shown = [case for case in cases if case["keep"] == keep]
    settings = {(case["text"], case["context_len"]) for case in shown}
    by_name: dict[str, list[Case]] = {}
    for case in shown:
        by_name.setdefault(case["contender"], []).append(case)
    cost = AXES[axis][1]
    return {
        name: (
            float(np.mean([cost(case) for case in own])),
            float(np.exp(np.mean([np.log(max(case["kl"], 1e-7)) for case in own]))),
        )
        for name, own in by_name.items()
        if {(case["text"], case["context_len"]) for case in own} == settings
    }


def front(costs: Mapping[str, tuple[float, float]]) -> list[str]:
    """Return the Pareto front, cheapest first: names that no other equals or beats in both and beats in one."""
    return sorted(
        (
            name
            for name, (x, y) in costs.items()
            if not any(a <= x and b <= y and (a, b) != (x, y) for a, b in costs.values())
        ),
        key=lambda name: costs[name],
    )


def draw(cases: list[Case], path: Path) -> None:
    """Draw a column of panels for each keep, and a row for each axis, at the width of a page."""
    keeps = sorted({case["keep"] for case in cases}, reverse=True)
    figure = Figure(
        figsize=(5.2 * len(keeps), 3.4 * len(AXES) + 0.9), dpi=_DPI, layout=ConstrainedLayoutEngine(hspace=0.08)
    )
    FigureCanvasAgg(figure)
    lengths = sorted({case["context_len"] for case in cases})
    figure.suptitle(
        f"What each selector costs and loses; {', '.join(map(str, lengths))} tokens of context.\n"
        "Down and left is better; red: nothing beats these.",
        fontsize=12, x=0.01, ha="left",
    )  # fmt: skip
    panels, shown = figure.subplots(len(AXES), len(keeps), squeeze=False, sharey="col"), []
    for column, keep in enumerate(keeps):
        for row, axis in enumerate(AXES):
            axes = panels[row][column]
            axes.set_ylabel("KL (nats)")
            shown.append((axes, _draw_panel(axes, points(cases, keep, axis), AXES[axis][0])))
        texts = dict.fromkeys(case["text"] for case in cases if case["keep"] == keep)
        panels[0][column].set_title(f"keep {100 * keep:g} %: {', '.join(texts)}", fontsize=10)
    figure.draw_without_rendering()  # sets the panels' sizes, which labels need
    for axes, places in shown:
        _label(axes, places)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI)


def _draw_panel(axes: Any, costs: dict[str, tuple[float, float]], title: str) -> dict[str, tuple[float, float]]:
    """Draw a panel with logarithmic axes, and return each point's place. A cost of 0 is at the left edge, as "0"."""
    positive = [x for x, _ in costs.values() if x > 0]
    least, most = (min(positive), max(positive)) if positive else (1.0, 1.0)
    nothing = least / 4
    places = {name: (x if x > 0 else nothing, y) for name, (x, y) in costs.items()}
    line = [places[name] for name in front(costs)]
    axes.plot(*zip(*line, strict=True), color=_LINE, linewidth=1.4, drawstyle="steps-post", alpha=0.7, zorder=1)
    axes.set(xscale="log", yscale="log", xlabel=title)
    axes.set_xlim(nothing / 1.6, most * (most / nothing) ** 0.24)  # leaves room for the last label
    for name, (x, y) in places.items():
        colour = _OUR_COLOUR if _is_csattn(name) else _COLOUR
        axes.plot(x, y, "D" if _is_csattn(name) else "o", color=colour, markeredgecolor="white", markersize=8, zorder=2)
    shown = _ticks(least, most)
    zero = [nothing] if any(x == 0 for x, _ in costs.values()) else []
    axes.set_xticks([*zero, *shown], [*("0" for _ in zero), *(f"{tick:g}" for tick in shown)])
    losses = _ticks(*axes.get_ylim())
    axes.set_yticks(losses, [f"{tick:g}" for tick in losses])
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return places


def _is_csattn(name: str) -> bool:
    return name.partition("+")[0] in PRESET_NAMES


def _ticks(least: float, most: float) -> list[float]:
    marks = (1,) if most / least > 300 else (1, 3) if most / least > 30 else (1, 2, 5)
    ticks = [mark * 10.0**power for power in range(-7, 7) for mark in marks]
    return [tick for tick in ticks if least / 1.05 <= tick <= most * 1.05]


def _label(axes: Any, places: dict[str, tuple[float, float]]) -> None:
    """Write names beside their points, moved up or down so that they cover no other name or point."""
    points = {name: axes.transData.transform(place) for name, place in places.items()}
    taken = [_box(x - _MARKER / 2, y, _MARKER) for x, y in points.values()]
    for name, (x, y) in sorted(points.items(), key=lambda item: float(item[1][1])):
        x += _MARKER
        shift = next(up for up in _SHIFTS if not any(_overlap(_box(x, y + up, 8 * len(name)), box) for box in taken))
        taken.append(_box(x, y + shift, 8 * len(name)))
        label = axes.annotate(
            name, places[name], (8, shift * 72 / _DPI - 3), textcoords="offset points", fontsize=9, zorder=1.5,
            color=_OUR_COLOUR if _is_csattn(name) else "#333333",
            bbox={"boxstyle": "square,pad=0.05", "color": "white", "alpha": 0.75},
            arrowprops={"arrowstyle": "-", "color": "#bbbbbb", "linewidth": 0.6} if abs(shift) > 8 else None,
        )  # fmt: skip
        label.set_in_layout(False)  # so that axes do not move after places were computed


def _box(left: float, middle: float, width: float) -> Box:
    return left, left + width, middle - _LABEL_HEIGHT / 2, middle + _LABEL_HEIGHT / 2


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[1] and other[0] < one[1] and one[2] < other[3] and other[2] < one[3]


def run(arguments: argparse.Namespace) -> None:
    missing = [str(file) for file in arguments.files if not file.is_file()]
    gate(not missing, f"there is no file {', '.join(missing)}; make it by `python -m bench.accuracy selectors --json`")
    cases = [case for file in arguments.files for case in selector_cases(file)]
    wanted = arguments.texts.split(",") if arguments.texts else None
    cases = [case for case in cases if wanted is None or case["text"] in wanted]
    gate(bool(cases), "there is nothing to show: no figures of these texts and this version")
    fronts = []
    for keep in sorted({case["keep"] for case in cases}, reverse=True):
        for axis, (title, _) in AXES.items():
            names = front(points(cases, keep, axis))
            fronts.append({"keep": keep, "axis": axis, "front": names})
            print(f"keep {100 * keep:g} %, {title}: {', '.join(names)}")
    if arguments.plot:
        draw(cases, arguments.plot)
    finish({"bench": "pareto", "fronts": fronts}, arguments.json)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--texts", help="use only these texts")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
