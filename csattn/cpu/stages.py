"""Functions that a tape calls by address, compiled when they are first wanted."""

from collections.abc import Callable

from csattn.search.calls import compiled_address

Stage = Callable[[int, int, int, int], int]  # address of its int64 arguments, piece, thread, 0 -> 0

__all__ = ["Stage", "compiled_address"]
