"""Check that a selection can be attended to."""

import numpy as np

from csattn.selection import Selection


def check_selection(chosen: Selection, kv_len: int) -> None:
    """Raise AssertionError if a head's rows are unordered, repeated, outside [0, kv_len) or badly padded."""
    for head, valid in enumerate(chosen.valid_len):
        rows, padding = chosen.kv_indices[head, :valid], chosen.kv_indices[head, valid:]
        assert (np.diff(rows) > 0).all(), f"rows of head {head} are not strictly ascending"
        assert valid == 0 or (rows[0] >= 0 and rows[-1] < kv_len), f"head {head} selects outside [0, {kv_len})"
        assert (padding == -1).all(), f"head {head} has rows after its valid_len {valid}"
    if chosen.log_weights is not None:
        assert chosen.log_weights.shape == chosen.kv_indices.shape, "a row has no weight, or a weight no row"
        assert np.isfinite(chosen.log_weights).all(), "a weight is not finite"
        assert not chosen.log_weights[chosen.kv_indices < 0].any(), "padding has weights"
    if chosen.rest is not None:
        assert np.isfinite(chosen.rest.out).all(), "the estimate of the rest is not finite"
        assert ((chosen.rest.share >= 0) & (chosen.rest.share <= 1)).all(), "a share is outside [0, 1]"
