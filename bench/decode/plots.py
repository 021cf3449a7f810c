"""Figures as pictures: time over context length, with the roofline drawn in; both axes logarithmic."""

import textwrap
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bench.decode.report import NAMES, best_speedup, length, speedup
from bench.decode.rivals.report import RIVALS, rivals_in
from bench.records import Case

OURS, POOLED = "default", "pooled"
_POOLED = POOLED, f"{POOLED} 32"  # whatever the number of centroids
_CLOSE = 1.6  # times as long
_DPI = 110
_LEFT, _RIGHT, _PANEL = 0.95, 2.8, 3.7  # inches: what stands beside the panels, and a panel
_LEGEND_WIDTH = 27  # characters
_LEAST_BYTES = "dotted: the fewest bytes, at the read rate measured"
_DASHED = "dashed: one query per KV head"
_STYLES: dict[str, tuple[str, str]] = {  # what is drawn -> colour, marker
    "full": ("#222222", "o"),
    "streamed": ("#b3261e", "s"),
    "paper": ("#d98e04", "^"),
    OURS: ("#0b61a4", "D"),
    POOLED: ("#5aa9e6", "D"),
    "window": ("#8a8a8a", "v"),
    "device": ("#0b61a4", "D"),
    "hybrid": ("#2a9d8f", "P"),
    "host": ("#7b3fa0", "X"),
    "h2o": ("#222222", "o"),
    "magicpig": ("#d81b7a", "^"),
    "sparq": ("#d98e04", "s"),
    "pqcache": ("#b3261e", "v"),
    "pqcache on the GPU": ("#e08a7d", "v"),
}
_BATCH_COLOURS = ("#7fb8de", "#0b61a4", "#0a2f5c", "#000000")
_PLACES = {"device": "all on the GPU", "hybrid": "KV on the host", "host": "KV and search on the host"}


def draw_all(content: dict[str, Any], directory: Path) -> list[Path]:
    """Write every picture that the cases give; returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    cases = [case for case in content["cases"] if "refused" not in case]
    if rivals := rivals_in(cases):
        path = directory / "decode-rivals.png"
        draw_rivals(rivals, content).savefig(path, dpi=_DPI, pil_kwargs={"optimize": True})
        return [path]
    pictures: dict[str, tuple[str, Callable[..., Any]]] = {
        "decode-attention.png": ("op", draw_op),
        "decode-split.png": ("op", draw_split),
        "decode-tpot.png": ("e2e", draw_tpot),
    }
    written = []
    for name, (kind, draw) in pictures.items():
        chosen = [case for case in cases if case["kind"] == kind]
        if any(case["variant"] == OURS for case in chosen):
            draw(chosen, content).savefig(directory / name, dpi=_DPI, pil_kwargs={"optimize": True})
            written.append(directory / name)
    if written:
        draw_speedup(cases, content).savefig(directory / "decode-speedup.png", dpi=_DPI, pil_kwargs={"optimize": True})
        written.append(directory / "decode-speedup.png")
    return written


def draw_op(cases: list[Case], content: dict[str, Any]) -> Any:
    """One layer's attention over context length, a panel per batch size."""
    batch_sizes = sorted({case["batch_size"] for case in cases})
    figure, panels = _figure(len(batch_sizes), "One layer's attention in one decode step", _setting(content))
    for axes, batch_size in zip(panels, batch_sizes, strict=True):
        shown = [c for c in cases if c["batch_size"] == batch_size and c["schedule"] in ("none", "every step")]
        for variant in ("streamed", "full", "paper", OURS, POOLED, "window"):
            line = [case for case in shown if case["variant"] == variant]
            _line(axes, line, variant, NAMES[variant], lambda case: case["p50_us"])
            if variant in ("full", OURS):
                _dotted(axes, line, variant, lambda case: case["roofline_us"])
        _finish_panel(axes, cases, f"batch {batch_size}", _time)
    _legend(figure, panels, _LEAST_BYTES)
    return figure


def draw_split(cases: list[Case], content: dict[str, Any]) -> Any:
    """Where our time goes: search and attention, each beside its fewest bytes, a panel per batch size."""
    ours = [c for c in cases if c["variant"] == OURS and c["schedule"] == "every step" and c["parts_us"]]
    batch_sizes = sorted({case["batch_size"] for case in ours})
    read_gbps = content["ceilings"]["read_gbps"]
    title = "What csattn's attention spends its time on"
    figure, panels = _figure(len(batch_sizes), title, f"One layer. {_setting(content)}")
    parts: dict[str, tuple[str | None, str, str]] = {  # -> what it reads, style, name
        "search": ("table", OURS, "search: score every key"),
        "select": (None, "paper", "select: choose the best"),
        "attend": ("rows", "hybrid", "attend"),
    }

    def took(case: Case, part: str) -> float:
        return float(case["parts_us"][part])

    def least(case: Case, read: str) -> float:
        return float(case["moved_parts_bytes"][read] / read_gbps / 1e3)

    for axes, batch_size in zip(panels, batch_sizes, strict=True):
        shown = [case for case in ours if case["batch_size"] == batch_size]
        for part, (read, style, name) in parts.items():
            _line(axes, [c for c in shown if part in c["parts_us"]], style, name, partial(took, part=part))
            if read is not None:
                _dotted(axes, shown, style, partial(least, read=read))
        _finish_panel(axes, ours, f"batch {batch_size}", _time)
    _legend(figure, panels, _LEAST_BYTES)
    return figure


def draw_tpot(cases: list[Case], content: dict[str, Any]) -> Any:
    """Time per output token over context length: placements beside full attention, a panel per batch size."""
    batch_sizes = sorted({case["batch_size"] for case in cases})
    figure, panels = _figure(len(batch_sizes), "Time per output token, whole model", _setting(content))
    for axes, batch_size in zip(panels, batch_sizes, strict=True):
        shown = [case for case in cases if case["batch_size"] == batch_size]
        for variant in ("streamed", "full"):
            line = [case for case in shown if case["variant"] == variant]
            _line(axes, line, variant, NAMES[variant], lambda case: case["p50_us"])
        _dotted(axes, [c for c in shown if c["variant"] == "full"], "full", lambda case: case["roofline_us"])
        for placement in ("host", "hybrid", "device"):
            here = [case for case in shown if case["placement"] == placement]
            line = _fastest_schedule([case for case in here if _is_ours(case)])
            _line(axes, line, placement, f"csattn, {_PLACES[placement]}", lambda case: case["p50_us"])
            pooled = _fastest_schedule([case for case in here if any(_is_ours(case, name) for name in _POOLED)])
            _line(axes, pooled, placement, None, lambda case: case["p50_us"])
            if placement == "device":
                _dotted(axes, line, placement, lambda case: case["roofline_us"])
        window = [case for case in shown if case["variant"] == "window"]
        _line(axes, window, "window", NAMES["window"], lambda case: case["p50_us"])
        _finish_panel(axes, cases, f"batch {batch_size}", _time)
    _legend(figure, panels, _DASHED, _LEAST_BYTES)
    return figure


def draw_speedup(cases: list[Case], content: dict[str, Any]) -> Any:
    """How much faster than full attention, one layer's attention and whole steps, all on the GPU."""
    measured = [c for c in cases if c["placement"] == "device" and speedup(c, cases) is not None]
    presets = {variant: [c for c in measured if _is_ours(c, variant)] for variant in (OURS, POOLED)}
    ours = presets[OURS] + presets[POOLED]
    panels_of = {"op": "one layer's attention", "e2e": "whole steps"}
    kinds = [kind for kind in panels_of if any(case["kind"] == kind for case in ours)]
    title = "Times as fast as full attention"
    figure, panels = _figure(len(kinds), title, f"All on the GPU. {_setting(content)}", share_y=False)
    batch_sizes = sorted({case["batch_size"] for case in ours})
    for axes, kind in zip(panels, kinds, strict=True):
        for batch_size, colour in zip(batch_sizes, _BATCH_COLOURS, strict=False):
            for variant, line in presets.items():
                line = [c for c in line if c["kind"] == kind and c["batch_size"] == batch_size]
                line = sorted(_fastest_schedule(line), key=lambda case: case["context_len"])
                lengths = [case["context_len"] for case in line]
                axes.plot(
                    lengths, [speedup(case, cases) for case in line], "D-" if variant == OURS else "D--", color=colour,
                    label=f"batch {batch_size}" if variant == OURS else None, markeredgecolor="white", linewidth=2,
                )  # fmt: skip
                if kind == "e2e" and variant == OURS:
                    axes.plot(lengths, [best_speedup(case, content) for case in line], ":", color=colour)
        axes.axhline(1, color="#222222", linewidth=1)
        _finish_panel(axes, [c for c in ours if c["kind"] == kind], panels_of[kind], lambda ratio: f"{ratio:g} ×")
    _legend(figure, panels, _DASHED, *(["dotted: the most that bytes allow"] if "e2e" in kinds else []))
    return figure


def draw_rivals(cases: list[Case], content: dict[str, Any]) -> Any:
    """Tokens per second over context length: ours in each placement beside the rivals, a panel per batch size."""
    batch_sizes = sorted({case["batch_size"] for case in cases})
    figure, panels = _figure(len(batch_sizes), "Tokens per second, beside other selectors", _setting(content))
    for axes, batch_size in zip(panels, batch_sizes, strict=True):
        shown = [case for case in cases if case["batch_size"] == batch_size]
        for placement in ("hybrid", "host"):
            ours = [case for case in shown if case["placement"] == placement and case["variant"] not in RIVALS]
            name = f"csattn, {'search on the GPU' if placement == 'hybrid' else 'search on the host'}"
            _line(axes, _fastest_schedule(ours), placement, name, lambda case: case["tokens_per_s"])
        for rival in RIVALS:
            line = [case for case in shown if case["variant"] == rival]
            _line(axes, line, rival, NAMES[rival], lambda case: case["tokens_per_s"])
        _finish_panel(axes, cases, f"batch {batch_size}", lambda rate: f"{rate:g}")
    _legend(figure, panels)
    return figure


def _is_ours(case: Case, variant: str = OURS) -> bool:
    return case["variant"] == variant and case["schedule"] in ("every step", "one layer ahead")


def _fastest_schedule(cases: list[Case]) -> list[Case]:
    best: dict[int, Case] = {}
    for case in cases:
        if case["context_len"] not in best or case["p50_us"] < best[case["context_len"]]["p50_us"]:
            best[case["context_len"]] = case
    return list(best.values())


def _setting(content: dict[str, Any]) -> str:
    return f"{content['shape']}, {100 * content['keep']:g} % of the context kept, on one {content['machine']['gpu']}."


def _figure(num_panels: int, title: str, subtitle: str, share_y: bool = True) -> tuple[Any, list[Any]]:
    width = _LEFT + _PANEL * num_panels + _RIGHT
    figure = Figure(figsize=(width, 5.4), dpi=_DPI)
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


def _line(axes: Any, cases: Iterable[Case], style: str, name: str | None, value: Callable[[Case], float]) -> None:
    """Dashed where it has no name of its own."""
    ordered = sorted(cases, key=lambda case: case["context_len"])
    if not ordered:
        return
    colour, marker = _STYLES[style]
    axes.plot(
        [case["context_len"] for case in ordered], [value(case) for case in ordered], color=colour, marker=marker,
        markersize=7, markeredgecolor="white", linewidth=2, linestyle="-" if name else "--", label=name,
    )  # fmt: skip


def _dotted(axes: Any, cases: Iterable[Case], style: str, value: Callable[[Case], float]) -> None:
    ordered = sorted(cases, key=lambda case: case["context_len"])
    lengths = [case["context_len"] for case in ordered]
    axes.plot(lengths, [value(case) for case in ordered], ":", color=_STYLES[style][0], linewidth=1.6)


def _finish_panel(axes: Any, cases: list[Case], title: str, name_of: Callable[[float], str]) -> None:
    """cases: those whose context lengths the axis should hold, also where a panel lacks some."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    lengths = sorted({case["context_len"] for case in cases})
    # a tick close above another has no room for its name
    names = [length(n) if n > _CLOSE * below else "" for below, n in zip([0, *lengths], lengths, strict=False)]
    axes.set_xticks(lengths, names, fontsize=9)
    axes.set_xlim(lengths[0] / 1.3, lengths[-1] * 1.3)
    low, high = axes.get_ylim()
    marks = (1, 1.5, 2, 3, 5) if high / low < 30 else (1, 3) if high / low < 3000 else (1,)
    ticks = [mark * 10.0**power for power in range(-2, 8) for mark in marks]
    axes.set_yticks([tick for tick in ticks if low <= tick <= high])
    axes.yaxis.set_major_formatter(lambda value, _: name_of(value))
    axes.minorticks_off()
    axes.set_xlabel("tokens of context")
    axes.set_title(title, fontsize=12, loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _time(us: float) -> str:
    return f"{us:g} µs" if us < 1000 else f"{us / 1000:g} ms"


def _legend(figure: Any, panels: list[Any], *notes: str) -> None:
    handles: dict[str, Any] = {}
    for axes in panels:
        handles.update({name: handle for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)})
    for note in notes:
        handles[note] = Line2D([], [], linestyle="--" if note == _DASHED else ":", color="#444444")
    names = ["\n".join(textwrap.wrap(name, _LEGEND_WIDTH)) for name in handles]
    figure.legend(
        handles.values(), names, loc="center left", bbox_to_anchor=(panels[-1].get_position().x1 + 0.01, 0.48),
        frameon=False, fontsize=10, labelspacing=0.9,
    )  # fmt: skip
