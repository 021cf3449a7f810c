"""What arguments are asked for, besides what the tests of those who ask have."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from csattn.errors import ArrayError
from csattn.lightning.checks import require_array


def test_arrays_on_another_device_than_the_current_one_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels would read them on a stream that does not wait for what writes them."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with FakeTensorMode():  # so that no device is needed
        here, there = (torch.empty(2, 3, device=device) for device in ("cuda:0", "cuda:1"))
    require_array("q", here, (2, 3))
    says = r'q is on cuda:1, and torch\'s current device is cuda:0; call this within torch.cuda.device\("cuda:1"\)'
    with pytest.raises(ArrayError, match=says):
        require_array("q", there, (2, 3))
