"""Markdown tables in the form of StreamIndex's: the paper's printed figures with those measured here."""

from collections.abc import Callable, Iterable
from typing import Any

from bench.lightning.cases import KEY, K
from bench.records import Case

TITLES = {
    2: "Table 2: recall of 512 keys against float32 products",
    3: "Table 3: V4-Flash, 512 keys",
    4: "Table 4: V4-Pro, 1024 keys",
    5: "Table 5: choosing and sparse attention, no causal mask",
    6: "Table 6: chunks and k, time at 256K, recall at 16K",
    7: "Table 7: ablations, time at 256K, recall at 16K",
}
# table -> tokens / 1024 -> milliseconds and GiB that the paper prints for its method
PRINTED: dict[int, dict[int, tuple[float, float]]] = {
    3: {32: (31, 0.40), 64: (122, 0.59), 128: (485, 0.96), 256: (1935, 1.71), 512: (7730, 3.21), 1024: (30900, 6.21)},
    4: {32: (32, 0.64), 64: (127, 1.02), 128: (502, 1.77), 256: (2004, 3.27), 512: (7994, 6.27), 1024: (31973, 12.27)},
    5: {8: (7.5, 0.58), 32: (47.2, 2.32), 64: (152.3, 4.64), 128: (531.3, 9.28), 256: (1968.8, 18.56)},
}
_HEAD = (
    "| tokens | method | chunks | k | ms | GiB | TFLOP/s | × published | paper: ms | GiB | recall | min | rows = 1 |"
)
_RULE = "|---:|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"


def as_markdown(content: dict[str, Any]) -> str:
    """Return all tables that have cases, after a sentence about the machine."""
    lines = [measured_on(content["machine"])]
    for table, title in TITLES.items():
        cases = [case for case in content["cases"] if case["table"] == table]
        if cases:
            lines += ["", f"### {title}", "", _HEAD, _RULE, *_rows(cases)]
    return "\n".join(lines)


def measured_on(machine: dict[str, Any]) -> str:
    """Return one sentence with the machine, the library versions and the commit."""
    where, of = machine.get("gpu") or machine.get("cpu", "?"), machine.get("commit") or "?"
    return f"Measured on {where}, torch {machine.get('torch', '?')}, triton {machine.get('triton', '-')}, commit {of}."


def ratio_to_published(case: Case, cases: Iterable[Case]) -> float | None:
    """Return the speed-up over the published method at the same size, with the same chunks or else the paper's."""
    same = [name for name in KEY if name not in ("variant", "query_chunk", "key_chunk")]
    others = [c for c in cases if c["variant"] == "published" and "ms" in c and all(c[n] == case[n] for n in same)]
    if "ms" not in case or not others:
        return None
    alike = [c for c in others if _chunks(c) == _chunks(case)] or [c for c in others if _chunks(c) == (2 * K, 8 * K)]
    return float(alike[0]["ms"]) / float(case["ms"]) if alike else None


def _rows(cases: list[Case]) -> list[str]:
    lines = []
    for case in sorted(cases, key=_order):
        ratio = ratio_to_published(case, cases)
        of_paper = PRINTED.get(case["table"], {}) if case["variant"] == "published" else {}
        printed = of_paper.get(case["num_tokens"] // K, ("", ""))
        found = case.get("recall", {})
        cells = [
            f"{case['num_tokens']:,}",
            case["variant"] + (", order as materialised" if case.get("identical") else ""),
            "–" if case["query_chunk"] is None else f"{case['query_chunk']:,} × {case['key_chunk']:,}",
            str(case["top_k"]),
            case.get("refused") or _number(case, "ms", lambda x: f"{x:,.1f}"),
            _number(case, "peak_gib", lambda x: f"{x:.2f}"),
            _number(case, "tflops", lambda x: f"{x:.0f}"),
            "" if ratio is None else f"{ratio:.2f}",
            *map(str, printed),
            _number(found, "mean", lambda x: f"{x:.4f}"),
            _number(found, "min", lambda x: f"{x:.4f}"),
            _number(found, "perfect", lambda x: f"{100 * x:.2f} %"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _chunks(case: Case) -> tuple[int | None, int | None]:
    return case["query_chunk"], case["key_chunk"]


def _order(case: Case) -> tuple[Any, ...]:
    chunks = tuple(-1 if chunk is None else chunk for chunk in _chunks(case))
    return case["kind"], case["num_tokens"], case["top_k"], chunks, case["variant"]


def _number(case: dict[str, Any], name: str, text: Callable[[float], str]) -> str:
    return text(case[name]) if name in case else ""
