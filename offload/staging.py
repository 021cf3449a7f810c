"""Copies from pageable host memory to a device through page-locked staging buffers (double buffering)."""

import torch
from torch import Tensor

PIECE_BYTES = 8 << 20


def copy_to_device(rows: Tensor, place: Tensor) -> None:
    """Copy `rows` to `place` on the current stream; `rows` may change once the call returns.

    rows: in host memory; place: of the same size and dtype; both contiguous. The copy uses two page-locked staging
    buffers: a direct copy of pageable memory would block all other calls of the driver until it is complete.
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
