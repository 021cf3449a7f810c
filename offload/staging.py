"""Copies to a device out of host memory that is not page-locked, beside other work with the device."""

import torch
from torch import Tensor

PIECE_BYTES = 8 << 20


def copy_to_device(rows: Tensor, place: Tensor) -> None:
    """Enqueue it on the current stream; `rows` may change once the call returns.

    rows: in host memory; place: as large, of the same dtype; both contiguous. It goes by way of two page-locked pieces:
    given to the driver as it is, it would hold all other calls of the driver up until the whole of it is copied.
    """
    assert rows.dtype == place.dtype, f"{rows.dtype} for {place.dtype}"
    source, target = _bytes_of(rows), _bytes_of(place)
    assert len(source) == len(target), f"{len(source)} bytes for {len(target)}"
    if not place.is_cuda:
        target.copy_(source)
        return
    pieces = [torch.empty(min(PIECE_BYTES, len(source)), dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    left = [torch.cuda.Event(blocking=True) for _ in pieces]  # type: ignore[no-untyped-call]
    parts = zip(torch.split(source, PIECE_BYTES), torch.split(target, PIECE_BYTES), strict=True)
    for number, (part, to) in enumerate(parts):
        piece, has_left = pieces[number % 2][: len(part)], left[number % 2]
        has_left.synchronize()
        piece.copy_(part)
        to.copy_(piece, non_blocking=True)
        has_left.record()


def _bytes_of(tensor: Tensor) -> Tensor:
    assert tensor.is_contiguous(), "only what is contiguous is copied in pieces"
    return tensor.view(-1).view(torch.uint8)
