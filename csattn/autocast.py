"""Artifacts and requests are computed in their own dtypes, also inside a caller's `torch.autocast`."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_DEVICE_TYPES = ("cpu", "cuda")


@contextmanager
def without_autocast() -> Iterator[None]:
    """Turn `torch.autocast` off in the block, in this thread."""
    with ExitStack() as stack:
        for device_type in _DEVICE_TYPES:
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield
