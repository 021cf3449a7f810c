"""Context KV in page-locked (pinned) host memory, mapped for the device at the same address."""

import mmap
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from torch import Tensor

from offload.budget import GIB, host_memory_bytes, locked_limit_bytes
from offload.cuda import host_register, host_unregister
from offload.errors import PinningError
from offload.host_memory import copy_rows
from offload.host_store import distinct

MAX_CHUNK_BYTES = 16 << 30  # of one registration: 512 GiB fail, up to 64 GiB are known to work
_PAGE = mmap.PAGESIZE

Progress = Callable[[int, int], None]  # bytes done, bytes in total


# makes host memory readable for the device, by address, bytes, and whether it is read-only: see `host_register`
Register = Callable[[int, int, bool], None]


class PinnedRows:
    """Owns the context KV of all layers, and its page locks until `close`. Read-only, shared by all requests.

    CUDA cannot copy memory that is only partly registered, so a layer's registration covers whole pages that it shares
    with nothing else. If the memory cannot be pinned, `pinned` is False, `how` says why, and only the host can read it.
    """

    def __init__(
        self,
        layers: Sequence[Tensor],  # per layer [num_kv_heads, context_len, 2, head_dim], contiguous; may be memory maps
        *,
        chunk_bytes: int = MAX_CHUNK_BYTES,  # of one registration; progress is reported after each
        progress: Progress | None = None,
        register: Register = host_register,
        unregister: Callable[[int], None] = host_unregister,
    ) -> None:
        assert all(layer.is_contiguous() for layer in layers), "rows of a layer have to be contiguous"
        assert 0 < chunk_bytes <= MAX_CHUNK_BYTES and chunk_bytes % _PAGE == 0
        self.layers = list(layers)
        self._chunks: list[tuple[int, int]] = []
        report_progress = progress or (lambda done, total: None)
        self.how = self._pin(partial(_register_all, chunk_bytes, report_progress, register, unregister))
        # releases the locks before the memory is freed, even if `close` is never called
        self._release = weakref.finalize(self, _release, self._chunks, unregister, self.layers)

    def __repr__(self) -> str:
        state = "closed" if not self._release.alive else "pinned" if self.pinned else "not pinned"
        return f"<PinnedRows {len(self.layers)} layers, {_num_bytes(self.layers) / GIB:.2f} GiB, {state}: {self.how}>"

    @property
    def pinned(self) -> bool:
        """Whether the device can read the rows."""
        return bool(self._chunks)

    @property
    def addresses(self) -> list[int]:
        """The device address of row 0 of each layer. Raises PinningError if the rows are not pinned."""
        if not self.pinned:
            raise PinningError(
                f"the device cannot read {self!r}; raise the limit of locked memory (`ulimit -l`), or choose the "
                "placement device"
            )
        return [layer.data_ptr() for layer in self.layers]

    def close(self) -> None:
        """Release the page locks. No device work that reads the rows may be in progress."""
        self._release()

    def _pin(self, register_all: Callable[[Sequence[Tensor], bool], list[tuple[int, int]]]) -> str:
        """Pin the rows in place if possible, else a copy of them; return how it was done, or why it failed."""
        refusals = []
        for how, read_only in (("in place", False), ("in place, read only", True)):
            try:
                if any(layer.data_ptr() % _PAGE for layer in self.layers):
                    raise PinningError("they share a page with other data, which could then no longer be copied")
                self._chunks = register_all(self.layers, read_only)
                return how
            except PinningError as error:
                refusals.append(error)
        needed, available = _num_bytes(self.layers), host_memory_bytes()
        if needed > available:
            return f"{refusals[0]}; a copy needs {needed:,} bytes and {available:,} are available"
        sources = distinct(self.layers)
        copies = dict(zip((layer.data_ptr() for layer in sources), copy_rows(sources), strict=True))
        try:
            self._chunks = register_all(list(copies.values()), False)
        except PinningError as error:
            limit = locked_limit_bytes()
            return str(error) + (f"; `ulimit -l` allows {limit:,} bytes" if limit < needed else "")
        self.layers = [copies[layer.data_ptr()] for layer in self.layers]
        return "a copy, because the rows themselves could not be pinned"


def _register_all(
    chunk_bytes: int,
    progress: Progress,
    register: Register,
    unregister: Callable[[int], None],
    layers: Sequence[Tensor],
    read_only: bool,
) -> list[tuple[int, int]]:
    """Register all pages of the layers, or none and raise PinningError. Returns chunks as half-open address ranges."""
    ranges = _merge(_span(layer) for layer in layers)  # a layer may occur twice, but its pages are registered once
    total = sum(end - begin for begin, end in ranges)
    chunks: list[tuple[int, int]] = []
    try:
        for begin, end in ranges:
            for at in range(begin, end, chunk_bytes):
                chunk = (at, min(at + chunk_bytes, end))
                register(at, chunk[1] - at, read_only)
                chunks.append(chunk)
                progress(sum(end - begin for begin, end in chunks), total)
    except BaseException:
        _release(chunks, unregister)
        raise
    return chunks


def _release(chunks: list[tuple[int, int]], unregister: Callable[[int], None], *_memory: object) -> None:
    while chunks:
        unregister(chunks.pop()[0])


def _span(layer: Tensor) -> tuple[int, int]:
    """Return the address range of the pages that a layer lies in."""
    begin, end = layer.data_ptr(), layer.data_ptr() + layer.nbytes
    return begin // _PAGE * _PAGE, -(-end // _PAGE) * _PAGE


def _merge(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if merged and begin < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _num_bytes(layers: Sequence[Tensor]) -> int:
    return sum(layer.nbytes for layer in distinct(layers))
