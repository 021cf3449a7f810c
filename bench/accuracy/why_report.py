"""Tables and a picture of the figures of `bench.accuracy why`; the picture is like Fig. 1 of the publication."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, mean
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bench.accuracy.ways import CURVES, ways
from bench.records import Case

LEAST_KL = 1e-7  # in a geometric mean: less is 0 within float32
_COLOURS = {"exact": "#222222", "letter": "#b3261e", "path": "#0b61a4"}
_CURVE_STYLES = dict(
    zip(
        CURVES,
        (("#222222", "exact"), ("#b3261e", "paper"), ("#d98c00", "lists"), ("#0b61a4", "sketch")),
        strict=True,
    )
)


def by_way(cases: Sequence[Case], keep: float) -> dict[str, list[Case]]:
    """Return the cases of each way that was measured at that share kept, one for each text."""
    found = defaultdict(list)
    for case in cases:
        if case["keep"] == keep:
            found[case["way"]].append(case)
    return {way.name: found[way.name] for way in ways() if way.name in found}


def over_texts(cases: Sequence[Case], name: str) -> float:
    """Return the mean over texts of the figure `name`: geometric for KL, else arithmetic."""
    if name == "kl":
        return geometric_mean([max(case[name], LEAST_KL) for case in cases])
    return mean([case[name] for case in cases])


def table(cases: Sequence[Case]) -> str:
    """Return Markdown tables, one for each share kept."""
    lines = []
    for keep in sorted({case["keep"] for case in cases if isinstance(case["keep"], float)}):
        texts = list(dict.fromkeys(case["text"] for case in cases if case["keep"] == keep))
        lines += [f"| {100 * keep:g} % | KL: {' | '.join(texts)} | mean | recall | mass | rows |"]
        lines += ["|---|" + "---:|" * (len(texts) + 4)]
        for name, own in by_way(cases, keep).items():
            kls = {case["text"]: f"{case['kl']:.4f}" for case in own}
            cells = [kls.get(text, "") for text in texts] + [f"{over_texts(own, 'kl'):.4f}"]
            cells += [f"{over_texts(own, of):.3f}" for of in ("recall", "mass", "rows_per_kv_head")]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def changes_table(cases: Sequence[Case], keep: float) -> list[str]:
    """Return Markdown for the documents: the effect of each change, as means over the texts."""
    groups = {way.name: way.group for way in ways()}
    titles = {"letter": "the letter, with one change", "path": "change after change", "exact": "exact Top-K"}
    measured = by_way(cases, keep)
    lines = [f"| at {100 * keep:g} % of the rows | KL | recall | mass | rows a KV head fetches |"]
    lines.append("|---|---:|---:|---:|---:|")
    for group in ("path", "letter", "exact"):
        lines.append(f"| **{titles[group]}** | | | | |")
        for name, own in measured.items():
            if groups[name] == group:
                kl, recall, mass, rows = (over_texts(own, of) for of in ("kl", "recall", "mass", "rows_per_kv_head"))
                lines.append(f"| {name} | {kl:.4f} | {recall:.2f} | {mass:.2f} | {100 * rows:.1f} % |")
    share = 100 * mean([case["mean_share"][0] for case in cases if case["keep"] is None])
    letter, corrected, exact = (
        over_texts(measured[name], "kl") for name in ("paper", "+ weighed by norm", "exact, per query head")
    )
    return [
        *lines,
        "",
        f"**In this model {share:.0f} % of the keys' energy is their mean. Softmax does not see the mean, but sums "
        "over truncated lists do. Tables of the same size go from a KL of "
        f"{letter:.4f} to {corrected:.4f} when the mean is subtracted before they are made and subspaces are weighed "
        f"by the query's norm. Exact Top-K per query head has {exact:.4f}.**",
    ]


def draw(cases: Sequence[Case], path: Path) -> None:
    figure = Figure(figsize=(12.5, 9.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2)
    measured = [case for case in cases if isinstance(case["keep"], float)]
    texts = ", ".join(dict.fromkeys(case["text"] for case in cases))
    figure.suptitle(
        f"{cases[0]['model']}, {cases[0]['context_len']} tokens of context: means over all heads, layers and texts "
        f"({texts})",
        fontsize=11,
    )
    _draw_recall(panels[0][0], [case for case in cases if case["keep"] == "all"])
    _draw_kl(panels[0][1], measured)
    heads = [case for case in cases if case["keep"] is None]
    of_heads = {name: np.mean([case[name] for case in heads], axis=0) for name in heads[0] if name in _HEADS}
    _draw_subspaces(panels[1][0], of_heads)
    _draw_spectra(panels[1][1], of_heads)
    for panel in panels.flat:
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


_HEADS = (
    "spectrum_queries", "spectrum_keys", "spectrum_centred_keys", "keys_by_query_axis", "mean_share", "share_plain",
    "share_centred", "in_list",
)  # fmt: skip


def _draw_recall(axes: Any, curves: Sequence[Case]) -> None:
    """Plot recall (solid) and mass (dashed) over the share kept."""
    for name, (colour, label) in _CURVE_STYLES.items():
        own = [case for case in curves if case["way"] == name]
        if not own:
            continue
        kept = [100 * keep for keep in own[0]["keeps"]]
        axes.plot(kept, np.mean([case["recall"] for case in own], axis=0), "o-", color=colour, label=f"{label}: recall")
        mass = np.mean([case["mass"] for case in own], axis=0)
        axes.plot(kept, mass, "s--", color=colour, markersize=4, alpha=0.7, label=f"{label}: mass")
    axes.set(xscale="log", ylim=(0, 1.03), xlabel="rows read besides sinks and window, % of the context")
    axes.set(title="(a) Sparsity: recall of each head's Top-K, attention mass")
    ticks = (0.2, 0.5, 1, 2, 5, 10, 20, 50)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.invert_xaxis()
    axes.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.13), frameon=False)


def _draw_kl(axes: Any, measured: Sequence[Case]) -> None:
    keep = min(case["keep"] for case in measured)
    groups = {way.name: way.group for way in ways()}
    labels = {"exact": "exact Top-K", "letter": "paper with one change", "path": "all changes so far, paper to default"}
    points = {name: (over_texts(own, "recall"), over_texts(own, "kl")) for name, own in by_way(measured, keep).items()}
    for group, label in labels.items():
        own = [points[name] for name in points if groups[name] == group]
        if own:
            style = "o-" if group == "path" else "o"
            axes.plot(*zip(*own, strict=True), style, color=_COLOURS[group], label=label, linewidth=1, alpha=0.9)
    _label(axes, points, groups)
    axes.set(yscale="log", xlim=(0, 1.35), xlabel="recall of each query head's exact Top-K", ylabel="KL (nats)")
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
    axes.set(title=f"(b) Recall and KL, {100 * keep:g} % of the rows kept")
    axes.legend(fontsize=8, loc="upper right")


def _label(axes: Any, points: dict[str, tuple[float, float]], groups: Mapping[str, str]) -> None:
    """Write names beside their points; changes that hardly move `paper` are listed together in one place."""
    x, y = points.get("paper", (0.0, 1.0))
    same = [
        name
        for name, of in points.items()
        if groups[name] == "letter" and abs(of[0] - x) < 0.08 and 0.75 < of[1] / y < 1.35
    ]
    if same:
        text = "paper, and it with\n" + "\n".join(same)
        axes.annotate(text, (x, y), (0.02, 0.36), textcoords="axes fraction", fontsize=8, va="center", color="#b3261e")
    taken: list[tuple[float, float]] = []
    for name in sorted(points.keys() - {*same, "paper"}, key=lambda name: -points[name][1]):
        left, height = points[name][0], float(np.log10(points[name][1]))
        column = 0.7 if 0.4 < left < 0.7 else left + 0.03  # names of the dense region go to its right
        while any(abs(column - other) < 0.4 and abs(height - at) < 0.085 for other, at in taken):
            height -= 0.01
        taken.append((column, height))
        axes.annotate(
            name.replace("`", ""), points[name], (column, 10**height), fontsize=8, va="center",
            color=_COLOURS[groups[name]],
            arrowprops={"arrowstyle": "-", "color": "#bbbbbb", "linewidth": 0.6, "shrinkB": 5},
        )  # fmt: skip


def _draw_subspaces(axes: Any, heads: dict[str, Any]) -> None:
    ranks = np.arange(1, len(heads["share_plain"]) + 1)
    for name, shift, colour, label in (
        ("share_plain", -0.2, "#b3261e", "share of |q·k|, keys as they are"),
        ("share_centred", 0.2, "#0b61a4", "share of |q·k|, keys centred"),
    ):
        axes.bar(ranks + shift, heads[name], 0.38, color=colour, label=label)
    axes.plot(ranks, heads["in_list"], "D-", color="#222222", label="share of the Top-K in its list alone")
    axes.axhline(1 / len(ranks), color="#888888", linestyle=":", label="equal shares of |q·k|")
    axes.axhline(0.25, color="#222222", linestyle=":", label="a list by chance")
    axes.set(xlabel="subspace of 8, in the order of its share", ylabel="share", ylim=(0, 1))
    axes.set(title="(c) Subspaces")
    axes.legend(fontsize=8)


def _draw_spectra(axes: Any, heads: dict[str, Any]) -> None:
    for name, colour, style, label in (
        ("spectrum_queries", "#d98c00", "-", "queries"),
        ("spectrum_keys", "#b3261e", "-", f"keys ({100 * heads['mean_share'][0]:.0f} % of it is their mean)"),
        ("spectrum_centred_keys", "#0b61a4", "-", "keys, centred"),
        ("keys_by_query_axis", "#0b61a4", ":", "keys, centred, by the queries' axes"),
    ):
        axes.plot(np.arange(1, len(heads[name]) + 1), heads[name], style, color=colour, label=label)
    axes.set(yscale="log", xlabel="principal axis", ylabel="share of the energy", title="(d) Spectra")
    axes.legend(fontsize=8)
