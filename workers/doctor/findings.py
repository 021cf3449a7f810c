"""A finding of the doctor, and how it is worded."""

from dataclasses import dataclass
from typing import Literal

GIB = 1 << 30

Status = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence about one thing, and what to do about it."""

    check: str
    status: Status
    text: str
    remedy: str = ""


def sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."


def gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
