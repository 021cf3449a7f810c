"""The scores of runs, kept in a file, and their table."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.timing import gate

TASKS = "niah_single_1", "niah_multikey_2", "ruler_vt", "ruler_cwe", "ruler_fwe"
FULL = "full attention"


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    settings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Some samples of one task."""

    task: str
    length: int
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The scores of one variant on a part."""

    task: str
    length: int
    variant: str
    scores: dict[str, float]  # by sample
    prompt_tokens: int
    cached_tokens: int
    seconds: float  # lm-eval's
    of: str = ""  # model, placement and dtype


def table(outcomes: list[Outcome], names: list[str]) -> list[dict[str, Any]]:
    """Return, for each length, task and variant, the score and its difference from full attention's, with errors."""
    scores: dict[tuple[int, str], dict[str, dict[str, float]]] = {}
    for of in outcomes:
        scores.setdefault((of.length, of.task), {}).setdefault(of.variant, {}).update(of.scores)
    cases = []
    for length, task in sorted(scores, key=lambda of: (of[0], TASKS.index(of[1]))):
        by_name = scores[length, task]
        for name in [name for name in names if name in by_name]:
            both = sorted(by_name[name].keys() & by_name[FULL].keys())
            values, full = (np.array([by_name[of][sample] for sample in both]) for of in (name, FULL))
            case = {"length": length, "task": task, "variant": name, "samples": len(both)}
            case |= dict(zip(("score", "stderr"), mean_and_error(values), strict=True))
            case |= dict(zip(("difference", "difference_stderr"), mean_and_error(values - full), strict=True))
            cases.append(case)
    return cases


def mean_and_error(values: NDArray[np.float64]) -> tuple[float, float | None]:
    error = float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None
    return round(float(values.mean()), 4), None if error is None else round(error, 4)


def prefills(outcomes: list[Outcome], names: list[str]) -> list[dict[str, Any]]:
    """Return, for each variant, the prompt tokens sent, and how many of them had to be computed."""
    rows = []
    for name in names:
        if not (of := [outcome for outcome in outcomes if outcome.variant == name]):
            continue
        sent, cached = sum(o.prompt_tokens for o in of), sum(o.cached_tokens for o in of)
        seconds = round(sum(o.seconds for o in of), 1)
        rows.append({"variant": name, "sent_tokens": sent, "computed_tokens": sent - cached, "lm_eval_s": seconds})
    return rows


class Outcomes:
    """All outcomes: those of earlier runs in a file, and new ones, which are also added to the file."""

    def __init__(self, path: Path | None, of: str) -> None:
        """of: model, placement and dtype. Raises GateError if the file has outcomes of other ones."""
        self._path, self._of, self._lock = path, of, Lock()
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self.all = [Outcome(**json.loads(line)) for line in lines]
        for other in {outcome.of for outcome in self.all} - {of}:
            gate(False, f"{path} has outcomes of {other or 'who knows what'}, these are of {of}; name another file")

    def has(self, part: Part, variant: Variant) -> bool:
        of = part.task, part.length, variant.name
        found = {sample for o in self.all if (o.task, o.length, o.variant) == of for sample in o.scores}
        return found >= set(map(str, part.samples))

    def add(self, outcome: Outcome) -> None:
        outcome = replace(outcome, of=self._of)
        with self._lock:
            self.all.append(outcome)
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")
