"""Figures as they come: one JSON file, written anew after every case, so that a run that is stopped loses nothing."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from bench.timing import gate, write_json

RESULTS = Path(__file__).parent / "results"
Case = dict[str, Any]


def called(model: str | Path) -> str:
    """A model's name in figures: of a file or directory, without where it lies."""
    return Path(model).name.removesuffix(".gguf")


class Records:
    """The cases of one file. Cases that are there already are not measured again."""

    def __init__(
        self, path: Path | None, header: dict[str, Any], key: tuple[str, ...], fixed_fields: tuple[str, ...] = ()
    ) -> None:
        """header: what holds for the whole run; a file that exists keeps its cases and gets the new header.

        key: the fields that tell one case from another; whatever else a case holds was measured. A case that is added
        has its run's commit, for the header's is that of the last run.
        fixed_fields: of the header, which no case has. Raises GateError for a file in which one of them is another.
        """
        self._path = path
        self._key = key
        self._commit = dict(header["machine"]).get("commit") if isinstance(header.get("machine"), dict) else None
        self.content: dict[str, Any] = {**header, "cases": []}
        if path is not None and path.exists():
            before = json.loads(path.read_text())
            for name in fixed_fields:
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
        """Whether there is a measured case of that key; one that could not run does not count."""
        return self.key_of(key) in self._seen

    def add(self, case: Case) -> None:
        """Keep a case, in place of an earlier one of the same key, and write the file."""
        if self._commit is not None:
            case = {**case, "commit": self._commit}
        key = self.key_of(case)
        self.content["cases"] = [c for c in self.cases if self.key_of(c) != key] + [case]
        if "refused" not in case:
            self._seen.add(key)
        print(json.dumps(case), flush=True)
        if self._path is not None:
            write_json(self._path, self.content)


def load_cases(path: Path) -> list[Case]:
    return json.loads(path.read_text())["cases"]


@cache
def measured(name: str) -> list[Case]:
    """The cases of a result file that the repository keeps."""
    return load_cases(RESULTS / name)


def only(name: str, **wanted: Any) -> Case:
    """The one case of a result file that has all these."""
    [found] = [of for of in measured(name) if all(of.get(field) == value for field, value in wanted.items())]
    return found
