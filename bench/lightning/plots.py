"""Plots of time and memory over length, of csattn and the published method: a picture for each table with both."""

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bench.lightning.cases import K
from bench.lightning.report import PRINTED, TITLES
from bench.records import Case

_STYLES = {
    "published": ("#b3261e", "s", "partition-merge as published"),
    "materialised": ("#8a8a8a", "v", "materialised"),
    "csattn": ("#0b61a4", "D", "csattn, bf16"),  # larger than the next marker, because both take the same memory
    "csattn fp8": ("#e69f00", ".", "csattn, FP8"),
}
_SIZE = 7
# the rate of a bf16 matrix product, measured on an H200; the floor is causal products at this rate
_PEAK_TFLOPS = 790.0


def draw_all(content: dict[str, Any], directory: Path) -> list[Path]:
    """Write the pictures and return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for table in (3, 4, 5):
        cases = [case for case in content["cases"] if case["table"] == table and "ms" in case]
        if cases:
            path = directory / f"lightning-table-{table}.png"
            _draw(cases, TITLES[table], table).savefig(path, dpi=110)
            written.append(path)
    return written


def _draw(cases: list[Case], title: str, table: int) -> Figure:
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title.partition(": ")[2])
    left, right = figure.subplots(1, 2)
    for variant, (colour, marker, label) in _STYLES.items():
        line = sorted((case for case in cases if case["variant"] == variant), key=lambda case: case["num_tokens"])
        if not line:
            continue  # else the legend would name a missing line
        for axes, figure_of in ((left, "ms"), (right, "peak_gib")):
            there = [case for case in line if figure_of in case]
            tokens = [case["num_tokens"] for case in there]
            axes.plot(
                tokens, [case[figure_of] for case in there], marker=marker, color=colour, label=label, markersize=_SIZE
            )
    printed = PRINTED[table]
    for axes, place in ((left, 0), (right, 1)):
        values = [pair[place] for pair in printed.values()]
        axes.plot([tokens * K for tokens in printed], values, ":", color="#b3261e", label="as its paper prints")
    ours = [case for case in cases if case["variant"] == "csattn"]
    floors = sorted((case["num_tokens"], case["ms"] * case["tflops"] / _PEAK_TFLOPS) for case in ours)
    left.plot(*zip(*floors, strict=True) if floors else ([], []), ":", color="#222222", label="790 TFLOP/s")
    for axes, unit in ((left, "ms"), (right, "GiB above the inputs")):
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel=unit)
        axes.grid(alpha=0.3)
    left.legend(fontsize=8)
    return figure
