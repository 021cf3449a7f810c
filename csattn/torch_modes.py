"""Artifacts and requests are computed in their own dtypes and places, whatever modes of torch the caller is in."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_AUTOCAST = ("cpu", "cuda")  # devices that may have it


@contextmanager
def without_modes() -> Iterator[None]:
    """Undo `torch.autocast` and `torch.set_default_device` in the block, in this thread."""
    with ExitStack() as stack:
        for device_type in _AUTOCAST:
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield
