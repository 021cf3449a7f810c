"""Checks of arguments that the tests of their callers do not cover."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from csattn.errors import ArrayError
from csattn.lightning.checks import require_array


def test_arrays_on_another_device_than_the_current_one_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels would read them on a stream that does not wait for the writes to them."""
    with FakeTensorMode():  # needs no device
        array = torch.empty(2, 3, device="cuda:0")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    require_array("q", array, (2, 3))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    says = r'q is on cuda:0, and torch\'s current device is cuda:1; call this within torch.cuda.device\("cuda:0"\)'
    with pytest.raises(ArrayError, match=says):
        require_array("q", array, (2, 3))
