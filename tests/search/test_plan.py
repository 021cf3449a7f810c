"""How a search is split into pieces of work."""

import numpy as np
import pytest

from csattn.cpu.jit import exact_kernel
from csattn.search.plan import MAX_PIECES, SEARCH, cut_pieces, search_at
from csattn.table.lists import CHUNK_KEYS


@exact_kernel
def _cut(address):  # type: ignore[no-untyped-def]
    cut_pieces(search_at(address))


@pytest.mark.parametrize("group_size", [1, 3, 5, 7, 16, 24, 33, 64])
@pytest.mark.parametrize("tail_rows", [0, 1, 20_000])
def test_no_piece_of_lists_is_empty(group_size: int, tail_rows: int) -> None:
    """The last piece also scores the tail, which follows the context's last chunk, in one thread."""
    for context_len in (1, 8192, 8193, 40_001, 100_000, 131_072, 507_904, 507_905, 1_000_000):
        search = np.zeros(1, SEARCH)
        search["context_len"], search["tail_rows"], search["group_size"] = context_len, tail_rows, group_size
        search["num_parts"] = 8
        _cut(search.ctypes.data)
        cut = {name: int(search[name][0]) for name in SEARCH.names or ()}
        assert (cut["row_parts"] - 1) * cut["part_ranges"] < cut["context_ranges"]
        assert cut["row_parts"] * cut["part_ranges"] >= cut["context_ranges"]
        assert cut["score_pieces"] == group_size * cut["row_parts"] <= MAX_PIECES
        assert cut["num_ranges"] <= MAX_PIECES and cut["range_keys"] % CHUNK_KEYS == 0
