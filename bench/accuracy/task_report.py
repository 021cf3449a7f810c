"""Scores of the tasks as a table."""

from collections.abc import Iterable
from typing import Any

from bench.records import Case


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
