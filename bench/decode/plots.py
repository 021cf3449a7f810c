"""Figures as pictures: time over context length, with the roofline drawn in; both axes logarithmic."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench.decode.panels import (
    DASHED,
    DPI,
    LISTS,
    OURS,
    draw_dotted,
    draw_legend,
    draw_line,
    finish_panel,
    make_figure,
    setting,
    time_name,
)
from bench.decode.report import NAMES, best_speedup, length, speedup
from bench.records import Case

_LEAST_BYTES = "dotted: the fewest bytes, at the read rate measured"
_BATCH_COLOURS = ("#7fb8de", "#0b61a4", "#0a2f5c", "#000000")
_PLACES = {"device": "all on the GPU", "hybrid": "KV on the host", "host": "KV and search on the host"}


def draw_all(content: dict[str, Any], directory: Path) -> list[Path]:
    """Write every picture that the cases give; returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    cases = [case for case in content["cases"] if "refused" not in case]
    pictures: dict[str, tuple[str, Callable[..., Any]]] = {
        "decode-attention.png": ("op", draw_op),
        "decode-split.png": ("op", draw_split),
        "decode-tpot.png": ("e2e", draw_tpot),
    }
    written = []
    for name, (kind, draw) in pictures.items():
        chosen = [case for case in cases if case["kind"] == kind]
        if any(case["variant"] == OURS for case in chosen):
            draw(chosen, content).savefig(directory / name, dpi=DPI, pil_kwargs={"optimize": True})
            written.append(directory / name)
    if shared := [case for case in cases if case["kind"] == "shared"]:
        written.append(directory / "decode-shared.png")
        draw_shared(shared, content).savefig(written[-1], dpi=DPI, pil_kwargs={"optimize": True})
    if any(case["kind"] in ("op", "e2e") for case in cases):
        draw_speedup(cases, content).savefig(directory / "decode-speedup.png", dpi=DPI, pil_kwargs={"optimize": True})
        written.append(directory / "decode-speedup.png")
    return written


def draw_op(cases: list[Case], content: dict[str, Any]) -> Any:
    """One layer's attention over context length, a panel per batch size."""
    batch_sizes = sorted({case["batch_size"] for case in cases})
    figure, panels = make_figure(len(batch_sizes), "One layer's attention in one decode step", setting(content))
    for axes, batch_size in zip(panels, batch_sizes, strict=True):
        shown = [c for c in cases if c["batch_size"] == batch_size and c["schedule"] in ("none", "every step")]
        for variant in ("streamed", "full", "paper", LISTS, OURS, "window"):
            line = [case for case in shown if case["variant"] == variant]
            draw_line(axes, line, variant, NAMES[variant], lambda case: case["p50_us"])
            if variant in ("full", OURS):
                draw_dotted(axes, line, variant, lambda case: case["roofline_us"])
        finish_panel(axes, cases, f"batch {batch_size}", time_name)
    draw_legend(figure, panels, _LEAST_BYTES)
    return figure


def draw_split(cases: list[Case], content: dict[str, Any]) -> Any:
    """Where our time goes: search and attention, each beside its fewest bytes, a panel per batch size."""
    ours = [c for c in cases if c["variant"] == OURS and c["schedule"] == "every step" and c["parts_us"]]
    batch_sizes = sorted({case["batch_size"] for case in ours})
    read_gbps = content["ceilings"]["read_gbps"]
    title = "What csattn's attention spends its time on"
    figure, panels = make_figure(len(batch_sizes), title, f"One layer. {setting(content)}")
    parts: dict[str, tuple[str | None, str, str]] = {  # -> what it reads, style, name
        "search": ("index", OURS, "search: score every key"),
        "select": (None, "paper", "select: choose the best"),
        "rest": (None, "host", "rest: what is not chosen, by its codes"),
        "attend": ("rows", "hybrid", "attend"),
    }

    def took(case: Case, part: str) -> float:
        return float(case["parts_us"][part])

    def least(case: Case, read: str) -> float:
        return float(case["moved_parts_bytes"][read] / read_gbps / 1e3)

    for axes, batch_size in zip(panels, batch_sizes, strict=True):
        shown = [case for case in ours if case["batch_size"] == batch_size]
        for part, (read, style, name) in parts.items():
            draw_line(axes, [c for c in shown if part in c["parts_us"]], style, name, partial(took, part=part))
            if read is not None:
                draw_dotted(axes, shown, style, partial(least, read=read))
        finish_panel(axes, ours, f"batch {batch_size}", time_name)
    draw_legend(figure, panels, _LEAST_BYTES)
    return figure


def draw_tpot(cases: list[Case], content: dict[str, Any]) -> Any:
    """Time per output token over context length: placements beside full attention, a panel per batch size."""
    batch_sizes = sorted({case["batch_size"] for case in cases})
    figure, panels = make_figure(len(batch_sizes), "Time per output token, whole model", setting(content))
    for axes, batch_size in zip(panels, batch_sizes, strict=True):
        shown = [case for case in cases if case["batch_size"] == batch_size]
        for variant in ("streamed", "full"):
            line = [case for case in shown if case["variant"] == variant]
            draw_line(axes, line, variant, NAMES[variant], lambda case: case["p50_us"])
        draw_dotted(axes, [c for c in shown if c["variant"] == "full"], "full", lambda case: case["roofline_us"])
        for placement in ("host", "hybrid", "device"):
            here = [case for case in shown if case["placement"] == placement]
            line = _fastest_schedule([case for case in here if _is_ours(case)])
            draw_line(axes, line, placement, f"csattn, {_PLACES[placement]}", lambda case: case["p50_us"])
            lists = _fastest_schedule([case for case in here if _is_ours(case, LISTS)])
            draw_line(axes, lists, placement, None, lambda case: case["p50_us"])
            if placement == "device":
                draw_dotted(axes, line, placement, lambda case: case["roofline_us"])
        window = [case for case in shown if case["variant"] == "window"]
        draw_line(axes, window, "window", NAMES["window"], lambda case: case["p50_us"])
        finish_panel(axes, cases, f"batch {batch_size}", time_name)
    draw_legend(figure, panels, DASHED, _LEAST_BYTES)
    return figure


def draw_speedup(cases: list[Case], content: dict[str, Any]) -> Any:
    """How much faster than full attention, one layer's attention and whole steps, all on the GPU."""
    panels_of = {"op": "one layer's attention", "e2e": "whole steps"}
    of_panels = [c for c in cases if c["kind"] in panels_of and c["placement"] == "device"]
    measured = [c for c in of_panels if speedup(c, cases) is not None]
    presets = {variant: [c for c in measured if _is_ours(c, variant)] for variant in (OURS, LISTS)}
    ours = presets[OURS] + presets[LISTS]
    kinds = [kind for kind in panels_of if any(case["kind"] == kind for case in ours)]
    title = "Times as fast as full attention"
    figure, panels = make_figure(len(kinds), title, f"All on the GPU. {setting(content)}", share_y=False)
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
        finish_panel(axes, [c for c in ours if c["kind"] == kind], panels_of[kind], lambda ratio: f"{ratio:g} ×")
    draw_legend(figure, panels, DASHED, *(["dotted: the most that bytes allow"] if "e2e" in kinds else []))
    return figure


def draw_shared(cases: list[Case], content: dict[str, Any]) -> Any:
    """Tokens per second over requests that continue one context, a panel per context length."""
    lengths = sorted({case["context_len"] for case in cases})
    title = "Tokens per second of all requests that share one context"
    figure, panels = make_figure(len(lengths), title, setting(content))
    for axes, context_len in zip(panels, lengths, strict=True):
        shown = [case for case in cases if case["context_len"] == context_len]
        for variant, placement, style in (
            ("full", "device", "full"),
            *((OURS, placement, placement) for placement in _PLACES),
            ("streamed", "host", "streamed"),
        ):
            line = [case for case in shown if (case["variant"], case["placement"]) == (variant, placement)]
            line = _fastest_schedule(line, over="batch_size")
            ours = f"csattn, {_PLACES[placement]}"
            name = {OURS: ours, "full": "full attention, KV on the GPU read once for all"}.get(variant, NAMES[variant])
            draw_line(axes, line, style, name, lambda case: case["tokens_per_s"], over="batch_size")
        finish_panel(axes, cases, f"{length(context_len)} tokens", lambda rate: f"{rate:g}", over="batch_size")
    draw_legend(figure, panels)
    return figure


def _is_ours(case: Case, variant: str = OURS) -> bool:
    return case["variant"] == variant and case["schedule"] in ("every step", "one layer ahead")


def _fastest_schedule(cases: list[Case], over: str = "context_len") -> list[Case]:
    best: dict[int, Case] = {}
    for case in cases:
        if case[over] not in best or case["p50_us"] < best[case[over]]["p50_us"]:
            best[case[over]] = case
    return list(best.values())
