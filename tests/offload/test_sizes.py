"""Sizes are read as people write them; anything else is refused with a clear message."""

import pytest

from offload.errors import TierError
from offload.sizes import parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1", 1),
        ("4096", 4096),
        ("12 B", 12),
        ("64MiB", 64 << 20),
        (" 64 mib ", 64 << 20),
        ("1.5GiB", 3 << 29),
        ("2kB", 2000),
        ("200MB", 200_000_000),
        ("3TB", 3 * 10**12),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes_with_and_without_units_are_parsed(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", " ", "MiB", "9" * 400, "64 potatoes", "-1", "-1MiB", "1e3", "nan", "0", "0.4B", "64M", "1,5GiB", "\n"]
)
def test_invalid_sizes_are_refused_with_the_reason(text: str) -> None:
    with pytest.raises(TierError, match=r"is not a size; give a number of bytes, or one with a unit"):
        parse_size(text)
