"""Where pages of bytes can lie: the memory of a torch device, and a file. Both are slots that are read and written."""

import zlib
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from offload.disk import BLOCK_BYTES, DiskFile, aligned_bytes
from offload.errors import DiskError


class PagePlace(Protocol):
    """Slots for pages of one size. A page is a uint8 tensor [page_bytes]."""

    num_slots: int
    is_memory: bool  # whether `read` gives the page where it lies

    def read(self, slot: int) -> Tensor:
        """The page: where it lies, or in a buffer that the next `read` of a file uses again."""
        ...

    def write(self, slot: int, page: Tensor) -> None: ...

    def close(self) -> None: ...


class MemoryPlace:
    """Slots in the memory of a device of any kind; the CPU's is page-locked where a GPU is to read it."""

    is_memory = True

    def __init__(self, budget_bytes: int, page_bytes: int, device: torch.device | str = "cpu", pinned: bool = False):
        self.num_slots = budget_bytes // page_bytes
        self.pages = torch.empty(self.num_slots, page_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)

    def __repr__(self) -> str:
        return f"<MemoryPlace {self.num_slots} slots of {self.pages.shape[1]:,} bytes on {self.pages.device}>"

    def read(self, slot: int) -> Tensor:
        return self.pages[slot]

    def write(self, slot: int, page: Tensor) -> None:
        self.pages[slot].copy_(page)

    def close(self) -> None:
        self.pages = self.pages[:0].clone()


class FilePlace:
    """Slots in a file without a name, which goes when this is closed or the process ends, however it does.

    The space is reserved at once. Every page has a checksum in memory: what comes back altered is an error.
    """

    is_memory = False

    def __init__(self, budget_bytes: int, page_bytes: int, directory: Path):
        self._slot_bytes = -(-page_bytes // BLOCK_BYTES) * BLOCK_BYTES
        self._page_bytes = page_bytes
        self.num_slots = budget_bytes // self._slot_bytes
        self._file = DiskFile.scratch(directory, self.num_slots * self._slot_bytes)
        self._read_into, self._write_from = aligned_bytes(self._slot_bytes), aligned_bytes(self._slot_bytes)
        self._checksums = [0] * self.num_slots

    def __repr__(self) -> str:
        return f"<FilePlace {self.num_slots} slots of {self._slot_bytes:,} bytes in {self._file!r}>"

    def read(self, slot: int) -> Tensor:
        self._file.read(self._read_into, slot * self._slot_bytes)
        if zlib.crc32(self._read_into.data) != self._checksums[slot]:
            raise DiskError(
                f"page {slot} of {self._file!r} is not what was written there: its checksum differs; check the disk"
            )
        return torch.from_numpy(self._read_into[: self._page_bytes])

    def write(self, slot: int, page: Tensor) -> None:
        self._write_from[: self._page_bytes] = page.cpu().numpy()
        self._file.write(self._write_from, slot * self._slot_bytes)
        self._checksums[slot] = zlib.crc32(self._write_from.data)

    def close(self) -> None:
        self._file.close()
