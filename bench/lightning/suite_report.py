"""Markdown tables of the suites: a table for each name, a row for each case, a column for each variant."""

from typing import Any

from bench.lightning.report import measured_on
from bench.records import Case


def suites_as_markdown(content: dict[str, Any]) -> str:
    """Return a sentence about the machine, and the tables with times in microseconds.

    HISA's cells also have its IoU with DSA, and its speed-up over the faster form of DSA.
    """
    cases: list[Case] = content["cases"]
    names = list(dict.fromkeys((case["suite"], case["name"]) for case in cases))
    tables = (line for name in names for line in _table(*name, cases))
    return "\n".join([measured_on(content["machine"]), "", *tables])


def _table(suite: str, name: str, cases: list[Case]) -> list[str]:
    own = [case for case in cases if (case["suite"], case["name"]) == (suite, name)]
    variants = list(dict.fromkeys(case["variant"] for case in own))
    lines = [f"### {suite}: {name} (µs)", "", "| | " + " | ".join(variants) + " |", "|---" * (len(variants) + 1) + "|"]
    for row in dict.fromkeys(case["case"] for case in own):
        found = {case["variant"]: case for case in own if case["case"] == row}
        cells = [_cell(found[variant], found) if variant in found else "" for variant in variants]
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _cell(case: Case, row: dict[str, Case]) -> str:
    if "refused" in case:
        return str(case["refused"])
    text = f"{case['p50_us']:,.1f}"
    dsa = [other["p50_us"] for name, other in row.items() if name.startswith("DSA") and "p50_us" in other]
    if dsa and case["variant"].startswith("HISA"):
        text += f", {min(dsa) / case['p50_us']:.1f} ×"
    if "iou_mean" in case:
        text += f", IoU {case['iou_mean']:.4f} (least {case['iou_min']:.4f})"
    text += f", {case['tflops']:,.0f} TFLOP/s" if "tflops" in case else ""
    return text + (f", {case['gbps']:,.0f} GB/s" if "gbps" in case else "")
