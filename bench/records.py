"""Saves measured cases in one JSON file, which is rewritten after every case, so that a stopped run loses nothing."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from bench.timing import gate, write_json

RESULTS = Path(__file__).parent / "results"
Case = dict[str, Any]


def called(model: str | Path) -> str:
    """Return a model's name for result files: of a file or directory, without its path."""
    return Path(model).name.removesuffix(".gguf")


class Records:
    """The cases of one file. Callers skip a case that the file already has (`has`)."""

    def __init__(
        self, path: Path | None, header: dict[str, Any], key: tuple[str, ...], fixed_fields: tuple[str, ...] = ()
    ) -> None:
        """Open a file of cases; None: they are not saved.

        header: the facts of the whole run; an existing file keeps its cases and gets the new header.
        key: the fields that identify a case; its other fields are results. An added case gets its run's commit, because
        the header's commit is that of the last run.
        fixed_fields: of the header, which cases lack. Raises GateError if they differ in an existing file.
        """
        self._path = path
        self._key = key
        self._commit = dict(header["machine"]).get("commit") if isinstance(header.get("machine"), dict) else None
        self.content: dict[str, Any] = {**header, "cases": []}
        if path is not None and path.exists():
            before = json.loads(path.read_text())
            for name in ("bench", *fixed_fields) if "bench" in header else fixed_fields:
                gate(
                    name not in before or before[name] == json.loads(json.dumps(header[name])),
                    f"{path} was measured with {name} {before.get(name)}, not {header[name]}; name another file",
                )
            self.content["cases"] = before["cases"]
        self._seen = {self.key_of(case) for case in self.cases if "refused" not in case}

    @property
    def cases(self) -> list[Case]:
        return self.content["cases"]

    def key_of(self, case: Case) -> tuple[Any, ...]:
        return tuple(case.get(name) for name in self._key)

    def has(self, **key: Any) -> bool:
        """Whether a case with that key was measured; refused cases do not count."""
        return self.key_of(key) in self._seen

    def add(self, case: Case) -> None:
        """Add a case, replacing an earlier one with the same key, print it, and write the file."""
        if self._commit is not None:
            case = {**case, "commit": self._commit}
        key = self.key_of(case)
        self.content["cases"] = [c for c in self.cases if self.key_of(c) != key] + [case]
        if "refused" not in case:
            self._seen.add(key)
        print(json.dumps(case), flush=True)
        if self._path is not None:
            write_json(self._path, self.content)


def tables(cases: list[Case], fields: tuple[str, ...], table: Callable[[list[Case]], str]) -> str:
    """Return the table of the cases; if they differ in `fields`, one for each, because their figures do not compare."""
    parts: dict[str, list[Case]] = {}
    for case in cases:
        parts.setdefault(", ".join(f"{name} {case.get(name)}" for name in fields), []).append(case)
    if len(parts) < 2:
        return table(cases)
    return "\n\n".join(f"{title}:\n\n{table(of)}" for title, of in parts.items())


def require_one(cases: list[Case], fields: tuple[str, ...]) -> None:
    """Raise GateError if the cases differ in one of `fields`: a plot would mix figures that do not compare."""
    for name in fields:
        found = {str(case.get(name)) for case in cases}
        gate(len(found) < 2, f"a plot is of one {name}, the file has {', '.join(sorted(found))}; use a file for each")


def load_cases(path: Path) -> list[Case]:
    return json.loads(path.read_text())["cases"]


@cache
def measured(name: str) -> list[Case]:
    """Return the cases of a result file in bench/results."""
    return load_cases(RESULTS / name)


def only(name: str, **wanted: Any) -> Case:
    """Return the single case of a result file whose fields have these values."""
    [found] = [of for of in measured(name) if all(of.get(field) == value for field, value in wanted.items())]
    return found
