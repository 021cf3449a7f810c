"""The workers' shares cover a layer's searches exactly once, and evenly."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workers.searchers.shares import shares_of


@given(num_workers=st.integers(1, 9), num_rows=st.integers(0, 20), num_heads=st.integers(1, 9))
def test_shares_cover_every_row_and_head_once_and_evenly(num_workers: int, num_rows: int, num_heads: int) -> None:
    times = np.zeros((num_rows, num_heads), int)
    for worker in range(num_workers):
        shares = shares_of(worker, num_workers, num_rows, num_heads)
        assert len(shares) <= 3
        jobs = 0
        for share in shares:
            assert share.num_rows > 0 and share.num_heads > 0
            rows = slice(share.first_row, share.first_row + share.num_rows)
            times[rows, share.first_head : share.first_head + share.num_heads] += 1
            jobs += share.num_rows * share.num_heads
        assert abs(jobs - num_rows * num_heads / num_workers) < 1
    assert (times == 1).all()


@given(num_workers=st.integers(1, 4), heads_each=st.integers(1, 4), num_rows=st.integers(1, 20))
def test_a_worker_searches_only_its_own_heads_if_they_divide_evenly(
    num_workers: int, heads_each: int, num_rows: int
) -> None:
    """If heads can be divided evenly, a worker only ever searches its own."""
    for worker in range(num_workers):
        (share,) = shares_of(worker, num_workers, num_rows, num_workers * heads_each)
        assert (share.first_head, share.num_heads, share.num_rows) == (worker * heads_each, heads_each, num_rows)
