"""csattn and its rivals side by side: speed measured here, quality as `bench.pareto` has measured it."""

import json
from pathlib import Path
from typing import Any

from bench.decode.report import NAMES, describe, length
from bench.records import Case

QUALITY = Path(__file__).parents[2] / "results" / "selectors.json"
# as measured here -> as `bench.pareto` calls it
CONTENDERS = {
    "default": "default+ahead",
    "h2o": "h2o",
    "magicpig": "magicpig",
    "sparq": "sparq",
    "pqcache": "pqcache",
    "pqcache on the GPU": "pqcache",
}
RIVALS = tuple(name for name in CONTENDERS if name != "default")


def rivals_in(cases: list[Case]) -> list[Case]:
    """Whole steps of ours and the rivals', if there are any of the latter."""
    shown = [case for case in cases if case["kind"] == "e2e" and case["variant"] in CONTENDERS]
    shown = [case for case in shown if case["placement"] != "device" or case["variant"] == "h2o"]
    return shown if any(case["variant"] in RIVALS for case in shown) else []


def rival_tables(content: dict[str, Any]) -> str:
    """A table of all cases, and one of the ratios."""
    cases = rivals_in(content["cases"])
    keep = content["keep"]
    parts = [describe(content), "", *ratio_tables(cases), "", case_table(cases, kl_of_selectors(keep), keep)]
    return "\n".join(parts)


def kl_of_selectors(keep: float) -> dict[str, float]:
    """The mean KL from full attention over all texts that each selector was measured on, on the demo model."""
    cases = [case for case in json.loads(QUALITY.read_text())["cases"] if case["keep"] == keep]
    texts = {case["text"] for case in cases}
    found = {name: [c["kl"] for c in cases if c["contender"] == contender] for name, contender in CONTENDERS.items()}
    return {name: sum(kls) / len(kls) for name, kls in found.items() if len(kls) == len(texts) > 0}


def case_table(cases: list[Case], kl: dict[str, float], keep: float) -> str:
    """A line per context length, batch size and method, fastest first."""
    lines = [
        "| context | batch | | tokens/s | TPOT p50, ms | p99 | link MB a step | CPU, µs a layer | cache hits | "
        f"KL at {100 * keep:g} % |",
        "|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for case in sorted(cases, key=lambda c: (c["context_len"], c["batch_size"], -c.get("tokens_per_s", 0))):
        start = f"| {length(case['context_len'])} | {case['batch_size']} | {method(case)} |"
        if "refused" in case:
            lines.append(f"{start} — | | | | | | {case['refused']} |")
            continue
        cpu, hits = case.get("cpu_search_us"), case.get("hit_rate")
        quality = kl.get(case["variant"])
        lines.append(
            f"{start} {case['tokens_per_s']:.0f} | {case['p50_us'] / 1e3:.2f} | {case['p99_us'] / 1e3:.2f} | "
            f"{case['link_bytes'] / 1e6:.1f} | {'' if cpu is None else f'{cpu:.0f}'} | "
            f"{'' if hits is None else f'{hits:.3f}'} | {'' if quality is None else f'{quality:.4f}'} |"
        )
    return "\n".join(lines)


def ratio_tables(cases: list[Case]) -> list[str]:
    """Our tokens/s by theirs, in each of our placements, over context lengths; batch sizes apart."""
    lines: list[str] = []
    measured = [case for case in cases if "refused" not in case]
    for batch_size in sorted({case["batch_size"] for case in measured}):
        of_batch = [case for case in measured if case["batch_size"] == batch_size]
        lengths = sorted({case["context_len"] for case in of_batch})
        for ours in sorted({method(case) for case in of_batch if case["variant"] not in RIVALS}):
            lines += ["", f"{ours}, batch {batch_size}: times as many tokens/s as", ""]
            lines += [f"| | {' | '.join(map(length, lengths))} |", "|---|" + "---:|" * len(lengths)]
            for rival in RIVALS:
                row = [_ratio(of_batch, ours, rival, context_len) for context_len in lengths]
                lines.append(f"| {NAMES[rival]} | {' | '.join(row)} |")
    return lines


def method(case: Case) -> str:
    """A name that tells our placements and schedules apart."""
    name = NAMES.get(case["variant"], str(case["variant"]))
    if case["variant"] in RIVALS:
        return name
    ahead = "" if case["schedule"] == "every step" else f", {case['schedule']}"
    return f"{name}, `{case['placement']}`{ahead}"


def _ratio(cases: list[Case], ours: str, rival: str, context_len: int) -> str:
    at_length = [case for case in cases if case["context_len"] == context_len]
    us = [case["tokens_per_s"] for case in at_length if method(case) == ours]
    them = [case["tokens_per_s"] for case in at_length if case["variant"] == rival]
    return f"{us[0] / them[0]:.2f}" if us and them else ""
