"""Batched reads of KV rows from files: neighbouring rows are coalesced into one read, and reads run in parallel."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier

import numpy as np
from numpy.typing import NDArray

from offload.disk import BLOCK_BYTES, DiskFile
from offload.errors import DiskError

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]

_NUM_READERS = 8  # reads in flight: disks complete many in the time of one
_GAP_BYTES = 2 * BLOCK_BYTES  # gaps up to this are read and discarded instead of starting another read


@dataclass(frozen=True, slots=True)
class FileSpan:
    """The place of an array in a file."""

    path: Path
    offset: int  # of its first byte
    num_bytes: int


class RowFiles:
    """Arrays of bytes in files, one per layer. Owns the open files and the reader threads. Thread-safe."""

    def __init__(self, layers: Sequence[FileSpan]):
        """Raises DiskError if a file cannot be read or is too short, or if the reader threads cannot be started."""
        self._layers = list(layers)
        self._files: list[DiskFile] = []
        try:
            self._files.extend(DiskFile(layer.path) for layer in layers)
            for layer in self._layers:
                _require_size(layer)
            self._readers = start_threads(_NUM_READERS, "csattn-disk")
        except BaseException:
            self._close_files()
            raise

    def __repr__(self) -> str:
        how = "past the page cache" if self.direct else "through the page cache"
        return f"<RowFiles {len(self._layers)} layers, {sum(layer.num_bytes for layer in self._layers):,} bytes, {how}>"

    @property
    def direct(self) -> bool:
        return all(file.direct for file in self._files)

    @staticmethod
    def least_scratch_bytes(num_bytes: int) -> int:
        """Return the least scratch memory that `read` needs for pieces of `num_bytes`."""
        return (-(-num_bytes // BLOCK_BYTES) + 4) * BLOCK_BYTES

    def read(self, layer_idx: int, starts: Numbers, out: Bytes, places: Numbers, scratch: Bytes) -> int:
        """Read pieces of a layer's array: out[places[i]] = the bytes from starts[i] on. Returns the bytes read.

        starts: [num_pieces], ascending. out: [..., piece_bytes]; bytes of a piece beyond the end of the array are
        undefined. scratch: from `aligned_bytes`, at least `least_scratch_bytes`, not shared with a concurrent call.
        Raises DiskError, possibly after some pieces have been filled.
        """
        piece_bytes, span, total = out.shape[1], self._layers[layer_idx], 0
        begins = starts + span.offset
        ends = np.minimum(begins + piece_bytes, span.offset + span.num_bytes)
        runs = plan_runs(begins, ends, len(scratch) - self.least_scratch_bytes(piece_bytes) + BLOCK_BYTES)
        for first, last in runs.rounds(len(scratch) - BLOCK_BYTES):  # one block to spare: small pieces may overrun
            chosen = slice(first, last)
            total += self._read_runs(self._files[layer_idx], runs, chosen, scratch)
            pieces = slice(runs.pieces[first], runs.pieces[last])
            shift = np.repeat(runs.places(chosen) - runs.begins[chosen], np.diff(runs.pieces[first : last + 1]))
            _copy(scratch, begins[pieces] + shift, ends[pieces] + shift, out, places[pieces])
        return total

    def close(self) -> None:
        """End the threads and close the files. No read may be in progress."""
        self._readers.shutdown()
        self._close_files()

    def _read_runs(self, file: DiskFile, runs: "Runs", chosen: slice, scratch: Bytes) -> int:
        begins, ends, needed = runs.begins[chosen].tolist(), runs.ends[chosen].tolist(), runs.needed[chosen].tolist()
        places = runs.places(chosen).tolist()
        jobs = list(zip(begins, ends, needed, places, strict=True))

        def read(share: list[tuple[int, int, int, int]]) -> None:
            for begin, end, need, place in share:
                file.read(scratch[place : place + end - begin], begin, at_least=need - begin)

        shares = [jobs[i::_NUM_READERS] for i in range(min(_NUM_READERS, len(jobs)))]
        others = [self._readers.submit(read, share) for share in shares[1:]]
        try:
            read(shares[0])
        finally:
            wait(others)  # the caller reuses scratch when this returns
        for other in others:
            other.result()
        return int(sum(ends) - sum(begins))

    def _close_files(self) -> None:
        for file in self._files:
            file.close()


def start_threads(num_threads: int, name: str) -> ThreadPoolExecutor:
    """Start all threads of a pool now; raise DiskError if the system refuses one.

    If a thread failed to start in the middle of a read, the read would fail while reads submitted before it still wrote
    to scratch memory that others use by then.
    """
    threads, all_there = ThreadPoolExecutor(num_threads, name), Barrier(num_threads)
    try:
        for _ in range(num_threads):
            threads.submit(all_there.wait)
    except BaseException as error:
        all_there.abort()
        threads.shutdown()
        if not isinstance(error, RuntimeError):
            raise
        raise DiskError(
            f"the system cannot start more threads, and reading a context from its files needs {num_threads} more "
            f"({error}); end other programs, or raise the limit of threads (`ulimit -u`, or the container's)"
        ) from error
    return threads


@dataclass(frozen=True, slots=True)
class Runs:
    """Coalesced reads of whole blocks, ascending, each for consecutive pieces."""

    begins: Numbers  # [num_runs] offsets in the file
    ends: Numbers
    needed: Numbers  # the file must reach up to here: the end of the run's last piece
    pieces: Numbers  # [num_runs + 1]: run i is for pieces [pieces[i], pieces[i + 1])

    def rounds(self, scratch_bytes: int) -> list[tuple[int, int]]:
        """Split the runs into half-open ranges that fit into scratch memory together."""
        upto, rounds, first = np.concatenate([[0], np.cumsum(self.ends - self.begins)]), [], 0
        while first < len(self.begins):
            last = int(np.searchsorted(upto, upto[first] + scratch_bytes, side="right")) - 1
            assert last > first, "a run is longer than the scratch memory"
            rounds.append((first, last))
            first = last
        return rounds

    def places(self, chosen: slice) -> Numbers:
        """Return the offset in scratch memory of each run of a round."""
        lengths = self.ends[chosen] - self.begins[chosen]
        return np.asarray(np.cumsum(lengths) - lengths)


def plan_runs(begins: Numbers, ends: Numbers, most_bytes: int) -> Runs:
    """Coalesce pieces whose blocks are the same or near. begins, ends: [num_pieces] offsets in a file, ascending.

    All pieces of a run begin in the same aligned cell of `most_bytes`, rounded down to whole blocks, at least one.
    """
    if not len(begins):
        return Runs(begins, ends, ends, np.zeros(1, np.int64))
    firsts, lasts = begins // BLOCK_BYTES * BLOCK_BYTES, -(-ends // BLOCK_BYTES) * BLOCK_BYTES
    cell = firsts // max(most_bytes // BLOCK_BYTES * BLOCK_BYTES, BLOCK_BYTES)
    starts_run = (firsts[1:] > lasts[:-1] + _GAP_BYTES) | (cell[1:] != cell[:-1])
    heads = np.concatenate([[0], np.flatnonzero(starts_run) + 1])
    pieces = np.append(heads, len(begins))
    tails = pieces[1:] - 1
    return Runs(firsts[heads], lasts[tails], ends[tails], pieces)


def _copy(scratch: Bytes, begins: Numbers, ends: Numbers, out: Bytes, places: Numbers) -> None:
    """Copy pieces out of scratch memory: small ones all at once, through a temporary copy; large ones one by one."""
    if out.shape[1] < BLOCK_BYTES:
        out[places] = np.lib.stride_tricks.sliding_window_view(scratch, out.shape[1])[begins]
        return
    for begin, end, place in zip(begins.tolist(), ends.tolist(), places.tolist(), strict=True):
        out[place, : end - begin] = scratch[begin:end]


def _require_size(layer: FileSpan) -> None:
    size_bytes, wanted = layer.path.stat().st_size, layer.offset + layer.num_bytes
    if size_bytes < wanted:
        raise DiskError(
            f"{layer.path} has {size_bytes:,} bytes and its rows need {wanted:,}: it is truncated; build it again"
        )
