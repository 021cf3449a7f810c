"""Parse sizes in bytes as people write them."""

import re

from offload.errors import TierError

_UNITS = {"": 1, "b": 1, **{f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)}}
_UNITS |= {f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")


def parse_size(text: str) -> int:
    """Return the bytes of 64MiB, 1.5 GiB, 200MB or 4096. Raises TierError for anything else, and for sizes below 1."""
    found = _SIZE.fullmatch(text.strip().lower())
    num_bytes = float(found[1]) * _UNITS[found[2]] if found and found[2] in _UNITS else 0.0
    if not 1 <= num_bytes < 2**63:
        raise TierError(f"{text!r} is not a size; give a number of bytes, or one with a unit, such as 64MiB or 1.5GB")
    return int(num_bytes)
