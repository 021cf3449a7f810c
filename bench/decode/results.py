"""The figures of the decode benchmark, in files."""

import json
from pathlib import Path
from typing import Any

from bench.records import Records

# what tells one case from another; whatever else a case holds was measured
KEY = (
    *("kind", "shape", "context_len", "batch_size", "variant", "placement", "schedule"),
    *("weights", "keep", "slots", "kv_codec", "as_ampere"),
)


class Results(Records):
    """The cases of one file."""

    def __init__(self, path: Path | None, header: dict[str, Any], alike: tuple[str, ...] = ()) -> None:
        super().__init__(path, {"bench": "decode", **header}, KEY, alike)


def merge_files(paths: list[Path]) -> dict[str, Any]:
    """The content of several files as one: the first one's header, of equal cases the last."""
    contents = [json.loads(path.read_text()) for path in paths]
    cases = {tuple(case.get(name) for name in KEY): case for content in contents for case in content["cases"]}
    return {**contents[0], "cases": list(cases.values())}
