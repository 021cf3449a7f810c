"""Arrays are written in pieces of rows, and read back as the same bytes."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from csattn.artifact import tensor_file
from csattn.artifact.tensor_file import TensorSpec, map_file, plan_file, write_file


@pytest.mark.parametrize("piece_bytes", [1, 64, 1000, 2**20])
def test_arrays_read_back_unchanged_for_any_piece_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, piece_bytes: int
) -> None:
    monkeypatch.setattr(tensor_file, "_PIECE_BYTES", piece_bytes)
    wide = rng.standard_normal((13, 7, 6)).astype(np.float32)
    arrays = {
        "whole": wide,
        "turned": wide.transpose(1, 2, 0)[::2],
        "one row": wide[:1],
        "one number": np.arange(37, dtype=np.int32),
        "no rows": np.empty((0, 5), np.float32),
        "empty rows": np.empty((5, 0), np.float32),
        "halves": torch.arange(70).bfloat16().view(7, 10),
    }
    kinds = {"one number": "I32", "halves": "BF16"}
    specs = [TensorSpec(name, kinds.get(name, "F32"), tuple(array.shape)) for name, array in arrays.items()]
    layout, path = plan_file(specs, {}), tmp_path / "arrays"
    record = write_file(path, layout, arrays)
    assert record.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    found = map_file(path, layout)
    for name, array in arrays.items():
        expected = array.view(torch.uint16).numpy() if isinstance(array, torch.Tensor) else array
        np.testing.assert_array_equal(found[name], expected, err_msg=name)
