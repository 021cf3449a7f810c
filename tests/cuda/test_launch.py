"""A launch passes the right arguments to the driver, for which a fake stands in."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from csattn import cuda
from csattn.cuda import CudaKernel


class Driver:
    """A fake driver that records each launch when its call ends.

    During the first call it launches the kernel again, as another thread might.
    """

    def __init__(self, kernel: CudaKernel) -> None:
        self.kernel, self.calls, self.launched, self.error = kernel, 0, list[tuple[int, ...]](), 0

    def cuLaunchKernelEx(self, config: Any, *_: object) -> int:  # noqa: N802
        self.calls += 1
        if self.calls == 1:
            self.kernel.launch((7, 8, 9), 32)
        self.launched.append((*config._obj.grid, *config._obj.block, config._obj.shared_bytes))
        return self.error

    def cuGetErrorString(self, error: int, says: Any) -> int:  # noqa: N802
        says._obj.value = b"out of memory" if error == 2 else None
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver(CudaKernel("choose", SimpleNamespace(ptr=1), 1000, early_start=True))
    monkeypatch.setattr(cuda, "_driver", lambda: made)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=5))
    return made


def test_overlapping_launches_of_a_kernel_keep_their_own_arguments(driver: Driver) -> None:
    """The driver is called without the GIL, so launches may overlap."""
    driver.kernel.launch((1, 2, 3), 64, 5, None)
    assert driver.launched == [(7, 8, 9, 32, 1, 1, 1000), (1, 2, 3, 64, 1, 1, 1000)]


@pytest.mark.parametrize(("error", "says"), [(2, "choose with error 2: out of memory"), (9999, "9999: unknown")])
def test_a_refused_launch_reports_the_error_of_the_driver(error: int, says: str, driver: Driver) -> None:
    driver.error = error
    with pytest.raises(RuntimeError, match=f"CUDA refused .*{says}"):
        driver.kernel.launch((1, 1, 1), 32)
