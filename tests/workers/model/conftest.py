"""Fixtures for tests of products with quantized weights."""

from collections.abc import Iterator

import pytest

from tests.cuda_on_cpu.emulated import Emulator


@pytest.fixture
def two_multiprocessors(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Emulate a GPU of two multiprocessors for quantized products, so that a thread block has several tiles."""
    from workers.model.gpu import quantized_ops  # Triton may be missing

    emulator.stand_in(monkeypatch, quantized_ops, multiprocessors=2)
    quantized_ops._kernel.cache_clear()
    yield
    quantized_ops._kernel.cache_clear()
