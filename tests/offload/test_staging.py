"""Copies to the device through page-locked pieces."""

import pytest
import torch

from offload.staging import PIECE_BYTES, copy_to_device

ODD_SIZES = (1, 15, PIECE_BYTES // 2 - 1, PIECE_BYTES // 2, PIECE_BYTES // 2 + 1, PIECE_BYTES + 3, 2 * PIECE_BYTES + 5)


def _copied(num_numbers: int, device: str) -> None:
    rows = torch.arange(num_numbers, dtype=torch.int32).to(torch.int16)
    expected = rows.clone()
    place = torch.full((num_numbers,), -1, dtype=torch.int16, device=device)
    copy_to_device(rows, place)
    rows.fill_(0)  # the copy no longer reads it
    assert torch.equal(place.cpu(), expected)


@pytest.mark.parametrize("num_numbers", ODD_SIZES)
def test_tensors_of_any_size_are_copied_whole(num_numbers: int) -> None:
    _copied(num_numbers, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("num_numbers", ODD_SIZES)
def test_tensors_of_any_size_are_copied_whole_to_a_gpu(num_numbers: int) -> None:
    _copied(num_numbers, "cuda")


def test_a_destination_of_another_size_is_refused() -> None:
    with pytest.raises(AssertionError, match="12 bytes for 16"):
        copy_to_device(torch.zeros(3), torch.zeros(4))
