"""Memory from `sparse_zeros` costs only the pages that are written."""

from pathlib import Path

import numpy as np
import pytest

from offload.host_memory import sparse_zeros

STATM = Path("/proc/self/statm")


@pytest.mark.skipif(not STATM.exists(), reason="memory that is in use is read from /proc")
def test_writing_scattered_bytes_costs_one_small_page_each() -> None:
    places = 64
    memory = sparse_zeros(places << 21)
    before = int(STATM.read_text().split()[1])
    memory[:: 1 << 21] = 1
    assert int(STATM.read_text().split()[1]) - before < 8 * places  # huge pages of 2 MiB would be 512 times as many
    assert memory[0] == 1 and not memory[1:4096].any()


@pytest.mark.parametrize("num_bytes", [0, 1, 4097])
def test_sparse_zeros_has_the_requested_length(num_bytes: int) -> None:
    assert np.array_equal(sparse_zeros(num_bytes), np.zeros(num_bytes, np.uint8))
