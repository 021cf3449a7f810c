"""Tables and plots of the figures of `bench.accuracy long`."""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from bench.records import Case
from workers.settings import EngineSettings

Rows = dict[tuple[str, float], dict[str, Case]]  # contender and share kept -> setting -> case


def table(cases: list[Case]) -> str:
    """Return a Markdown table: KL of every contender and share kept, with a column for each text and length."""
    settings, rows = by_setting(cases), by_contender(cases)
    if not settings:
        return "nothing was measured"
    lines = [
        "| | exact rows, % | codes, B/key | on the device, B/key | " + " | ".join(settings.values()) + " | × exact |",
        "|---|---:|---:|---:|" + "---:|" * (len(settings) + 1),
    ]
    for (name, keep), of_row in rows.items():
        largest = max(of_row.values(), key=lambda case: case["context_len"])
        cells = [f"{of_row[setting]['kl']:.5f}" if setting in of_row else "" for setting in settings]
        ratios = [case["times_exact"] for case in of_row.values() if case.get("times_exact")]
        lines.append(
            "| "
            + " | ".join(
                [
                    name,
                    f"{100 * keep:g}",
                    f"{largest['code_bytes_per_key']:.1f}",
                    f"{largest['device_bytes_per_key']:.1f}",
                    *cells,
                    f"{geometric_mean(ratios):.2f}" if ratios else "",
                ]
            )
            + " |"
        )
    notes = (
        "KL to full attention, nats. Bytes of a key with its value, for each KV head: of codes alone, and of all on "
        "the device, with transforms and the rows that are always attended to, at the longest context. × exact: "
        "geometric mean of the ratios to exact selection at the same share."
    )
    return "\n".join([*lines, "", notes])


def by_setting(cases: list[Case]) -> dict[str, str]:
    """Return the settings (text, length and stretch), the shortest first, with their column titles."""
    ordered = sorted(cases, key=lambda case: (case["context_len"], case["text"]))
    return {setting_of(case): setting_of(case) for case in ordered}


def setting_of(case: Case) -> str:
    stretch = f", × {case['stretch']:g}" if case["stretch"] != 1 else ""
    return f"{case['text']}, {case['context_len'] / 1024:.1f}K{stretch}"


def by_contender(cases: list[Case]) -> Rows:
    rows: Rows = defaultdict(dict)
    order = list(dict.fromkeys(case["contender"] for case in cases))
    for case in sorted(cases, key=lambda case: (order.index(case["contender"]), case["keep"])):
        rows[case["contender"], case["keep"]][setting_of(case)] = case
    return rows


def draw(cases: list[Case], path: Path) -> None:
    """Plot KL over the share of rows that are read exactly, and over the bytes held on the device.

    Points are geometric means over the settings in which everything shown was measured.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = _common(cases)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.8), sharey=True)
    _draw_series(left, shown, _BY_SHARE, lambda case: 100 * case["keep"])
    _draw_series(right, shown, _BY_BYTES, lambda case: case["code_bytes_per_key"])
    _draw_series(right, shown, _IN_HYBRID, hybrid_bytes)
    ours = [case["kl"] for case in shown if case["contender"] == "default" and case["keep"] == _KEEP]
    for axis in (left, right):
        if ours:
            axis.axhline(geometric_mean(ours), color=_BLUE, linewidth=1, linestyle=":")
        axis.set(xscale="log", yscale="log", ylim=(1e-5, 0.8))
        axis.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False, fontsize=9, loc="lower left", markerscale=0.7, labelspacing=0.25)
    left.set(xlabel="rows that a token chooses, % of the context; 260 more are always read", title="What is read")
    left.set_xticks([2, 5, 10, 25, 50, 70], ["2", "5", "10", "25", "50", "70"])
    left.set(ylabel="KL to full attention (nats)")
    right.set(xlabel="bytes of a key and its value on the device (in 16 bits: 256)", title="What is held on the device")
    right.set_xticks([16, 32, 64, 128, 256], ["16", "32", "64", "128", "256"])
    right.set(xlim=(12, 300))
    lengths = [case["context_len"] for case in shown]
    if lengths:
        of = f"{shown[0]['text']}, {lengths[0]:,} tokens"
        if (number := len(by_setting(shown))) > 1:
            of = f"geometric means over {number} texts and lengths, {min(lengths):,} to {max(lengths):,} tokens"
        figure.suptitle(f"{shown[0]['model']}, {of}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110, bbox_inches="tight")


_KEEP = 0.02
_BLUE = "#0072b2"
# A panel's lines: label, contenders whose points the line joins, colour, marker. Colours and markers are distinct over
# both panels, for colour-blind readers too.
Series = tuple[tuple[str, tuple[str, ...], str, str], ...]
_BY_SHARE: Series = (
    ("csattn, default: the rest by codes", ("default",), _BLUE, "*"),
    ("exact Top-K, the rest dropped", ("exact",), "black", "x"),
    ("PQCache", ("pqcache",), "#009e73", "^"),
    ("SparQ, with its mean value", ("sparq",), "#e69f00", "s"),
    ("Quest", ("quest",), "#d55e00", "D"),
    ("H2O", ("h2o",), "#cc79a7", "P"),
    ("preset paper: CSAttention's lists", ("paper",), "#6b4a2b", "v"),
    ("preset lists: those corrected", ("lists",), "#56b4e9", "h"),
)
_BY_BYTES: Series = (
    ("csattn: codes alone", ("default",), _BLUE, "*"),
    ("all rows, KIVI: 2 and 4 bits", ("KIVI, 2 bits", "KIVI, 4 bits"), "#555555", "o"),
    ("all rows, TurboQuant: 3.5 and 4", ("TurboQuant, 3.5 bits", "TurboQuant, 4 bits"), "#a6761d", "<"),
    ("all rows, llama.cpp's q4_0", ("q4_0",), "#7a3e9d", "p"),
)
_IN_HYBRID: Series = (("csattn: with the cache of rows from the host", ("default",), "#7fb8d9", "*"),)


def hybrid_bytes(case: Case) -> float:
    """Return the device bytes of a key and its value in placement `hybrid`: codes, and rows times the slot share."""
    slots: float = EngineSettings().slot_share * case["host_bytes_per_key"]
    return slots + case["code_bytes_per_key"]


def _common(cases: list[Case]) -> list[Case]:
    """Return the cases that the plot shows, from settings in which every contender and share kept was measured."""
    shown = {name for _, names, _, _ in (*_BY_SHARE, *_BY_BYTES) for name in names}
    of = [case for case in cases if case["contender"] in shown and case["kl"] > 0]
    names = {(case["contender"], case["keep"]) for case in of}
    measured = {
        setting: {(c["contender"], c["keep"]) for c in of if setting_of(c) == setting} for setting in by_setting(of)
    }
    return [case for case in of if names <= measured[setting_of(case)]]


def _draw_series(axis: Any, cases: list[Case], series: Series, place: Callable[[Case], float]) -> None:
    for label, names, color, marker in series:
        points: dict[tuple[str, float], list[Case]] = defaultdict(list)
        for case in cases:
            if case["contender"] in names and (case["keep"] == 0 or place(case) > 0):
                points[case["contender"], case["keep"]].append(case)
        if not points:
            continue
        at = sorted((place(of[0]), geometric_mean([case["kl"] for case in of])) for of in points.values())
        size = 16 if marker == "*" else 8
        axis.plot(*zip(*at, strict=True), "-" + marker, color=color, label=label, markersize=size)
