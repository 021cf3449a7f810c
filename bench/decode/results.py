"""Files with the results of the decode benchmark."""

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
