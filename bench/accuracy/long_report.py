"""Tables and plots of what `bench.accuracy long` measured."""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from bench.records import Case

Rows = dict[tuple[str, float], dict[str, Case]]  # contender and share kept -> setting -> case


def table(cases: list[Case]) -> str:
    """Markdown: KL of every contender and share kept, a column for each text and length."""
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
    return "\n".join([*lines, "", notes, "", cache_table(cases)])


def cache_table(cases: list[Case]) -> str:
    """Markdown: what slot caches would hit."""
    sizes = sorted({name for case in cases for name in case if name.startswith("hit_share_")})
    names = "exact", "default", "default+ahead"
    shown = [case for case in cases if sizes and sizes[0] in case and case["contender"] in names]
    if not shown:
        return ""
    lines = [
        "| | "
        + " | ".join(f"cache of {size.removeprefix('hit_share_').upper()}" for size in sizes)
        + " | as last step |",
        "|---|" + "---:|" * (len(sizes) + 1),
    ]
    for case in shown:
        cells = [f"{case[name]:.3f}" for name in (*sizes, "shared_with_last_step")]
        lines.append(
            f"| {case['contender']}, {100 * case['keep']:g} %, {setting_of(case)} | " + " | ".join(cells) + " |"
        )
    return "\n".join(lines)


def by_setting(cases: list[Case]) -> dict[str, str]:
    """Text, length and stretch, the shortest first, and how a column is called."""
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
    """KL over the bytes that are held, and over the share that is kept: means over all texts of a kind."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.2))
    _draw_bytes(left, cases)
    _draw_keeps(right, cases)
    figure.tight_layout()
    figure.savefig(path, dpi=110, bbox_inches="tight")


_KEEP = 0.02
_SAME_SIZE = "sketch of 4 + 0 words"  # as the default: one of them is enough for a line
# prefix of a name -> (label, marker)
_FAMILIES = {
    "sketch of": ("sketch, and 2 % exact rows from the host", "o"),
    "KIVI": ("KIVI", "s"),
    "TurboQuant": ("TurboQuant", "^"),
    "KVTC": ("KVTC's transform", "D"),
    "q4_0": ("llama.cpp q4_0", "P"),
}


def _common(cases: list[Case], shown: Callable[[str], bool]) -> list[Case]:
    """The cases in those settings in which all of the contenders that are shown were measured."""
    names = {case["contender"] for case in cases if shown(case["contender"])}
    settings = [
        setting
        for setting in by_setting(cases)
        if names <= {case["contender"] for case in cases if setting_of(case) == setting}
    ]
    return [case for case in cases if setting_of(case) in settings and case["contender"] in names and case["kl"] > 0]


def _draw_bytes(axis: Any, cases: list[Case]) -> None:
    cases = _common(cases, lambda name: name in ("exact", "default") or name.startswith(tuple(_FAMILIES)))
    series: dict[str, list[tuple[float, float]]] = defaultdict(list)
    markers = {}
    for (name, keep), of_row in by_contender(cases).items():
        prefix = "sketch of" if name == "default" else name
        family = next((family for start, family in _FAMILIES.items() if prefix.startswith(start)), None)
        if family is None or keep not in (0.0, _KEEP) or name == _SAME_SIZE:
            continue
        kls = [case["kl"] for case in of_row.values()]
        series[family[0]].append((next(iter(of_row.values()))["code_bytes_per_key"], geometric_mean(kls)))
        markers[family[0]] = family[1]
    for label, points in series.items():
        points.sort()
        axis.plot(*zip(*points, strict=True), "-" + markers[label], label=label, markersize=8, markeredgecolor="white")
    exact = [case["kl"] for case in cases if case["contender"] == "exact" and case["keep"] == _KEEP]
    if exact:
        axis.axhline(geometric_mean(exact), color="black", linewidth=1, linestyle="--", label="exact 2 %, no rest")
    axis.set(
        xscale="log",
        yscale="log",
        xlabel="bytes of codes per key and KV head, on the device (16-bit KV: 256)",
        xlim=(6, 160),
        ylim=(1e-4, 0.6),
    )
    axis.set(ylabel="KL to full attention (nats)", title="What is held, and what it loses")
    axis.set_xticks([8, 16, 32, 64, 128], ["8", "16", "32", "64", "128"])
    axis.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, loc="lower right")


def _draw_keeps(axis: Any, cases: list[Case]) -> None:
    shown = ("exact", "sketch of 2 + 0 words", "default", "default+ahead", "sketch of 4 + 2 words")
    rows = by_contender(_common(cases, lambda name: name in shown))
    for name in shown:
        points = sorted(
            (100 * keep, geometric_mean([case["kl"] for case in of_row.values()]))
            for (contender, keep), of_row in rows.items()
            if contender == name
        )
        if len(points) > 1:
            style = "--k" if name == "exact" else "-o"
            axis.plot(*zip(*points, strict=True), style, label=name, markersize=7, markeredgecolor="white")
    axis.set(xscale="log", yscale="log", xlabel="rows read exactly, % of the context")
    axis.set(ylabel="KL to full attention (nats)", title="How many rows are read exactly")
    axis.set_xticks([0.5, 1, 2, 5], ["0.5", "1", "2", "5"])
    axis.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
