"""Figures as they come: one JSON file, written anew after every case, so that a run that is stopped loses nothing."""

import json
from pathlib import Path
from typing import Any

Case = dict[str, Any]

# what tells one case from another; whatever else a case holds was measured
KEY = ("kind", "context_len", "batch_size", "variant", "placement", "schedule")


class Results:
    """The cases of one file. Cases that are there already are not measured again."""

    def __init__(self, path: Path | None, header: dict[str, Any]) -> None:
        """header: what holds for the whole run; a file that exists keeps its cases and gets the new header."""
        self._path = path
        self.content: dict[str, Any] = {"bench": "decode", **header, "cases": []}
        if path is not None and path.exists():
            self.content["cases"] = load_cases(path)

    @property
    def cases(self) -> list[Case]:
        return self.content["cases"]  # type: ignore[no-any-return]

    def has(self, **key: Any) -> bool:
        """Whether there is a measured case of that key; one that could not run does not count."""
        return any(case_key(case) == case_key(key) and "refused" not in case for case in self.cases)

    def add(self, case: Case) -> None:
        """Keep a case, in place of an earlier one of the same key, and write the file."""
        self.content["cases"] = [c for c in self.cases if case_key(c) != case_key(case)] + [case]
        print(json.dumps(case), flush=True)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            scratch = self._path.with_suffix(".part")
            scratch.write_text(json.dumps(self.content, indent=1) + "\n")
            scratch.rename(self._path)


def case_key(case: Case) -> tuple[Any, ...]:
    return tuple(case.get(name) for name in KEY)


def load_cases(path: Path) -> list[Case]:
    return json.loads(path.read_text())["cases"]  # type: ignore[no-any-return]


def merge_files(paths: list[Path]) -> dict[str, Any]:
    """The content of several files as one: the first one's header, of equal cases the last."""
    contents = [json.loads(path.read_text()) for path in paths]
    cases = {case_key(case): case for content in contents for case in content["cases"]}
    return {**contents[0], "cases": list(cases.values())}
