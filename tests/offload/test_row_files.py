"""Pieces of files are read in runs of whole blocks."""

import gc
import os
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.disk import BLOCK_BYTES, aligned_bytes
from offload.row_files import FileSpan, RowFiles, plan_runs

POISON = 0xFF


@pytest.mark.parametrize("piece_bytes", [1, 100, 4095, 4096, 9000])
@pytest.mark.parametrize("spare_blocks", [0, 1, 40])
def test_pieces_equal_the_files_bytes_even_at_its_end(tmp_path, rng, piece_bytes, spare_blocks) -> None:
    data = rng.integers(256, size=60_000, dtype=np.uint8)
    (tmp_path / "file").write_bytes(data.tobytes())
    offset, num_bytes = 77, 50_000
    scratch = aligned_bytes(RowFiles.least_scratch_bytes(piece_bytes) + spare_blocks * BLOCK_BYTES)
    with closing(RowFiles([FileSpan(tmp_path / "file", offset, num_bytes)])) as files:
        for starts in ([0, 49_999], [49_000, 49_500, 49_998], sorted(rng.integers(50_000, size=60).tolist()), []):
            out = np.full((len(starts), piece_bytes), POISON, np.uint8)
            places = rng.permutation(len(starts))
            assert files.read(0, np.array(starts, np.int64), out, places, scratch) >= len(starts[:1])
            for start, place in zip(starts, places, strict=True):
                there = min(piece_bytes, num_bytes - start)
                assert np.array_equal(out[place, :there], data[offset + start :][:there])


@given(
    st.lists(st.integers(0, 400_000), min_size=1, max_size=40, unique=True),
    st.integers(1, 9000),
    st.integers(1, 99_999),
)
def test_runs_cover_every_piece_once_and_fit(starts, piece_bytes, most_bytes) -> None:
    begins = np.sort(np.array(starts, np.int64))
    runs = plan_runs(begins, begins + piece_bytes, most_bytes)
    assert runs.pieces[0] == 0
    assert runs.pieces[-1] == len(begins)
    whole = np.concatenate([runs.begins, runs.ends])
    assert (whole % BLOCK_BYTES == 0).all()
    longest = max(most_bytes // BLOCK_BYTES, 1) * BLOCK_BYTES + -(-piece_bytes // BLOCK_BYTES) * BLOCK_BYTES
    assert (runs.ends - runs.begins <= longest).all()
    for run, (first, last) in enumerate(zip(runs.pieces, runs.pieces[1:], strict=False)):
        assert last > first
        assert runs.begins[run] <= begins[first] < runs.begins[run] + BLOCK_BYTES
        assert runs.needed[run] == begins[last - 1] + piece_bytes <= runs.ends[run]
    rounds = runs.rounds(int(longest))
    assert [first for first, _ in rounds] == [0, *(last for _, last in rounds[:-1])]
    assert rounds[-1][1] == len(runs.begins)


def test_files_that_are_not_closed_are_closed_with_the_last_reference_to_them(tmp_path) -> None:
    (tmp_path / "rows").write_bytes(bytes(BLOCK_BYTES))
    files = RowFiles([FileSpan(tmp_path / "rows", 0, BLOCK_BYTES)])
    descriptor = files._files[0]._fd
    os.fstat(descriptor)
    del files
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
