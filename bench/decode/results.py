"""Files with the results of the decode benchmark."""

import json
from pathlib import Path
from typing import Any

from bench.records import Records

# the fields that identify a case; all other fields are measurements
KEY = (
    *("kind", "shape", "context_len", "batch_size", "variant", "placement", "schedule"),
    *("weights", "keep", "slots", "kv_codec", "as_ampere"),
)


class Results(Records):
    """The cases of one file."""

    def __init__(self, path: Path | None, header: dict[str, Any], fixed_fields: tuple[str, ...] = ()) -> None:
        super().__init__(path, {"bench": "decode", **header}, KEY, fixed_fields)


def merge_files(paths: list[Path]) -> dict[str, Any]:
    """Merge the content of several files: the header of the first, and the last of cases that have the same key.

    If the files differ in shape, each case gets that of its file.
    """
    contents = [json.loads(path.read_text()) for path in paths]
    if len({content.get("shape") for content in contents}) > 1:
        for content in contents:
            content["cases"] = [{"shape": content.get("shape"), **case} for case in content["cases"]]
    cases = {tuple(case.get(name) for name in KEY): case for content in contents for case in content["cases"]}
    return {**contents[0], "cases": list(cases.values())}
