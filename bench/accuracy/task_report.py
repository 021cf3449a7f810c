"""Scores of the tasks as a table, and as heat maps of depth and length."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from bench.records import Case

_DPI = 110
_COLUMNS = 4  # panels in a row
_CELL = (0.62, 0.42)  # inches
_GREY = "#d9d9d9"
_COLOURS = LinearSegmentedColormap.from_list("scores", ["#b3261e", "#f6e3b4", "#0b61a4"])


def score(cases: Iterable[Case]) -> float | None:
    """Return the mean score; None without cases."""
    scores = [case["score"] for case in cases]
    return sum(scores) / len(scores) if scores else None


def kept(cases: Iterable[Case], full: dict[tuple[Any, ...], float]) -> float | None:
    """Return the share of full attention's score that is left, summed over samples; None where full scores nothing.

    A sample counts at most as much as with full attention, even if the selector scores higher.
    """
    pairs = [(case["score"], full[_sample(case)]) for case in cases if _sample(case) in full]
    possible = sum(by_full for _, by_full in pairs)
    return sum(min(pair) for pair in pairs) / possible if possible else None


def full_scores(cases: Iterable[Case]) -> dict[tuple[Any, ...], float]:
    return {_sample(case): case["score"] for case in cases if case["contender"] == "full"}


def table(cases: list[Case]) -> str:
    """Return Markdown tables, one for each keep: the score of full attention and of each selector, with its `kept`."""
    full = full_scores(cases)
    lines: list[str] = []
    for keep in _keeps(cases):
        shown = [case for case in cases if case["keep"] == keep and case["contender"] != "full"]
        names = _names(shown)
        lines += ["", f"| keep {100 * keep:g} %: score (share of full's) | full | " + " | ".join(names) + " |"]
        lines += ["|---|" + "---:|" * (len(names) + 1)]
        for task, length in sorted({(case["task"], case["length"]) for case in cases}):
            rows = [case for case in cases if (case["task"], case["length"]) == (task, length)]
            by_full = score(case for case in rows if case["contender"] == "full")
            by_name = [[c for c in rows if (c["contender"], c["keep"]) == (name, keep)] for name in names]
            cells = [_text(score(own), kept(own, full)) for own in by_name]
            lines.append(f"| {task}, {length} | {_percent(by_full)} | " + " | ".join(cells) + " |")
        own = [[case for case in shown if case["contender"] == name] for name in names]
        cells = [_text(score(of_one), kept(of_one, full)) for of_one in own]
        by_full = score(case for case in cases if case["contender"] == "full")
        lines.append(f"| all | {_percent(by_full)} | {' | '.join(cells)} |")
    lines += ["", "×: full attention finds nothing there, so a selector cannot fail."]
    return "\n".join(lines[1:])


def draw_depths(cases: list[Case], directory: Path) -> list[Path]:
    """Draw a picture for each task and keep, with a panel for each contender, depth over length. Returns the paths."""
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    placed = [case for case in cases if case["depth"] is not None]
    for task in dict.fromkeys(case["task"] for case in placed):
        for keep in _keeps(placed):
            shown = [c for c in placed if c["task"] == task and (c["keep"] == keep or c["contender"] == "full")]
            if _names(shown) != ["full"]:
                path = directory / f"tasks-{task}-{100 * keep:g}.png"
                _draw(shown, f"{task}, {100 * keep:g} % of the context read").savefig(path, dpi=_DPI)
                written.append(path)
    return written


def _draw(cases: list[Case], title: str) -> Figure:
    names = sorted(_names(cases), key=lambda name: name != "full")
    lengths = sorted({case["length"] for case in cases})
    depths = sorted({case["depth"] for case in cases})
    columns = min(_COLUMNS, len(names))
    rows = -(-len(names) // columns)
    size = columns * (_CELL[0] * len(lengths) + 0.35) + 0.8, rows * (_CELL[1] * len(depths) + 0.75) + 0.95
    figure = Figure(figsize=(max(size[0], 6.5), size[1]), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    question = cases[0]["question"]
    figure.suptitle(f"{title}; question {question}", fontsize=13, weight="bold", x=0.01, ha="left")
    figure.supxlabel("tokens of context · % found · ×: full attention finds nothing there", fontsize=9)
    figure.supylabel("depth of the answer", fontsize=9)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    full = full_scores(cases)
    for place, axes in enumerate(panels.flat):
        if place < len(names):
            own = [case for case in cases if case["contender"] == names[place]]
            _draw_panel(axes, own, full, lengths, depths)
            axes.set_title("full attention" if names[place] == "full" else names[place], fontsize=10)
        else:
            axes.set_axis_off()
    return figure


def _draw_panel(
    axes: Any, cases: list[Case], full: dict[tuple[Any, ...], float], lengths: list[int], depths: list[float]
) -> None:
    for x, length in enumerate(lengths):
        for y, depth in enumerate(depths):
            cell = [case for case in cases if (case["length"], case["depth"]) == (length, depth)]
            found = score(cell)
            if found is None:
                continue
            lost = not sum(full.get(_sample(case), 0.0) for case in cell)
            colour = _GREY if lost else _COLOURS(found)
            axes.add_patch(Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, color=colour, linewidth=0))
            shade = "#222222" if lost or 0.25 < found < 0.75 else "white"
            axes.text(x, y, "×" if lost else f"{100 * found:.0f}", ha="center", va="center", fontsize=9, color=shade)
    axes.set_xlim(-0.5, len(lengths) - 0.5)
    axes.set_ylim(len(depths) - 0.5, -0.5)
    axes.set_xticks(range(len(lengths)), [str(length) for length in lengths], fontsize=8)
    axes.set_yticks(range(len(depths)), [f"{100 * depth:.0f} %" for depth in depths], fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _sample(case: Case) -> tuple[Any, ...]:
    return tuple(case[name] for name in ("model", "task", "length", "depth", "sample", "question"))


def _names(cases: list[Case]) -> list[str]:
    return list(dict.fromkeys(case["contender"] for case in cases))


def _keeps(cases: list[Case]) -> list[float]:
    return sorted({case["keep"] for case in cases if case["contender"] != "full"}, reverse=True)


def _text(found: float | None, left: float | None) -> str:
    if found is None:
        return ""
    return f"{_percent(found)} (×)" if left is None else f"{_percent(found)} ({_percent(left)} %)"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f}"
