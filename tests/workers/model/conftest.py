"""What several test files of products with weights of few bits share."""

from collections.abc import Iterator

import pytest

from tests.cuda_on_cpu.emulated import Emulator


@pytest.fixture
def two_multiprocessors(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of the device that multiplies with weights of few bits, so that a block has several tiles."""
    from workers.model.gpu import quantized_ops  # Triton may be missing

    emulator.stand_in(monkeypatch, quantized_ops, multiprocessors=2)
    quantized_ops._kernel.cache_clear()
    yield
    quantized_ops._kernel.cache_clear()
