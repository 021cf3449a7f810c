"""Streaming top-k (StreamIndex): the best keys of every query without all scores in memory at once.

Queries and keys are scored in tiles; the k best of each tile are merged with those kept so far. Since keys have one
total order and a score has the same bits in every tile, the result, its order included, does not depend on the tiles.

Where the workspace holds all scores of some queries, their keys are not cut and nothing is merged: on a GPU, 256 MiB
hold those of 256 queries of 256K keys. Then scoring is one launch and `topk` another. For many queries of many keys, a
GPU does not even write all scores: see `contenders`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from csattn.errors import ConfigError
from csattn.lightning.checks import require_array, require_at_least
from csattn.lightning.operands.indexer import Operands
from csattn.lightning.prefill.contenders import Contenders, Sampling, queries_at_a_time
from csattn.lightning.score import cpu, hopper
from csattn.lightning.topk.device import MAX_K
from csattn.lightning.topk.reference import SENTINEL, indices_of, order_keys
from csattn.lightning.topk.select import top_k

WORKSPACE_BYTES = 256 << 20
_QUERIES = 64  # scored together at least: they fill a GPU, since their keys are divided among programs
_MANY_QUERIES = 4096  # which fill a GPU a few times, though a program goes through all keys of its queries
_MOST_KEYS = 1 << 21  # for `contenders.cu`, where an index has 21 bits
_CPU_KEYS = 16384  # scored together at most on the CPU, which converts them to float32 first
_COLUMNS = 128  # rows of scores are padded to a multiple of this: score kernels write whole tiles
_NOTHING = torch.iinfo(torch.int64).min


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries that are scored together, and how many keys at a time."""

    queries: slice
    num_keys: int  # the most that any of them may see
    key_chunk: int

    @property
    def key_ranges(self) -> list[range]:
        starts = range(0, self.num_keys, self.key_chunk)
        return [range(start, min(start + self.key_chunk, self.num_keys)) for start in starts]

    @property
    def num_scores(self) -> int:
        """How many scores are in memory at the same time."""
        num_queries: int = self.queries.stop - self.queries.start
        return num_queries * _padded(min(self.key_chunk, self.num_keys))


def choose_keys(
    operands: Operands,
    k: int,
    legal_len: Tensor,  # [num_queries] int32, see `operands.indexer.causal_lens`
    *,
    workspace_bytes: int = WORKSPACE_BYTES,  # for scores; where they all fit, keys are not cut
    tile: tuple[int, int] | None = None,  # numbers of queries and keys that are scored together, instead
) -> Tensor:
    """Return each query's k best legal keys, best first: indices [num_queries, k] int32, -1 padded.

    Definition: `topk.reference.top_k_reference` of all scores. Each kernel sums scores in an order of its own, which is
    the same in every tile. Raises ArrayError or ConfigError for arguments that do not fit.
    """
    _require(operands, legal_len)
    require_at_least("k", k, 1)
    require_at_least("workspace_bytes", workspace_bytes, 1)
    if tile is not None:
        if not isinstance(tile, tuple | list) or len(tile) != 2:
            raise ConfigError(f"tile is {tile!r}; wanted two numbers, of queries and keys that are scored together")
        for name, size in zip(("tile's queries", "tile's keys"), tile, strict=True):
            require_at_least(name, size, 1)
    lens = legal_len.cpu().clamp(min=0, max=len(operands.k))
    if tile is None and _contenders_are_faster(operands, k):
        return choose_by_contenders(operands, k, lens, workspace_bytes)
    return choose_scored(operands, k, lens, workspace_bytes, tile)


def _contenders_are_faster(operands: Operands, k: int) -> bool:
    """Whether contenders are faster: fewer queries do not fill a GPU, and of fewer keys most would be contenders."""
    if not operands.q.is_cuda or k > MAX_K or len(operands.k) > _MOST_KEYS or not hopper.supports(operands):
        return False
    return len(operands.q) >= _MANY_QUERIES and len(operands.k) >= 8 * k


def choose_by_contenders(operands: Operands, k: int, lens: Tensor, workspace_bytes: int) -> Tensor:
    """`choose_keys` by `contenders`; for queries where these fail, from all scores. lens: as in `choose_scored`."""
    indices, overflowed_queries = choose_from_contenders(operands, k, lens, workspace_bytes)
    for first in range(0, len(overflowed_queries), _MANY_QUERIES):
        rows = overflowed_queries[first : first + _MANY_QUERIES]
        indices[rows] = choose_scored(operands.of_queries(rows), k, lens[rows.cpu()], workspace_bytes)
    return indices


def choose_from_contenders(operands: Operands, k: int, lens: Tensor, workspace_bytes: int) -> tuple[Tensor, Tensor]:
    """Return the choice from lists of contenders, and the queries for which it is invalid: [n] int64."""
    (num_queries, num_heads, _), num_keys, device = operands.q.shape, len(operands.k), operands.q.device
    sampling, query_tile = Sampling.of(num_keys, k), hopper.queries_of_tile(num_heads)
    filling, room = queries_at_a_time(operands, sampling, workspace_bytes)
    tiles = _cut_queries(num_queries, query_tile, filling, room)
    contenders = Contenders(max(map(len, tiles), default=0), num_keys, sampling, device)
    on_device = lens.to(device, non_blocking=True)
    tile_max_lens = hopper.tile_max_lens(on_device, num_heads)
    overflowed = torch.empty(num_queries, dtype=torch.int32, device=device)
    indices = torch.empty(num_queries, k, dtype=torch.int32, device=device)
    for tile in tiles:
        rows = slice(tile.start, tile.stop)
        of_tiles = tile_max_lens[tile.start // query_tile : -(-tile.stop // query_tile)]
        contenders.choose(operands.of_queries(rows), on_device[rows], of_tiles, indices[rows], overflowed[rows])
    overflowed_queries = overflowed.nonzero()[:, 0] if overflowed.any() else overflowed.new_empty(0, dtype=torch.int64)
    return indices, overflowed_queries


def _cut_queries(num_queries: int, query_tile: int, filling: int, room: int) -> list[range]:
    """Cut queries into tiles of about equal size, the last first, each a whole number of fillings of the device.

    Only the tile of the first queries, the cheapest, may be smaller. While the dearest are scored, the host prepares
    all other launches.
    """
    num_fillings, num_tiles = -(-num_queries // filling), -(-num_queries // room)
    step = max(1, -(-num_fillings // max(1, num_tiles))) * filling
    stops = range(-(-num_queries // query_tile) * query_tile, 0, -step)
    return [range(max(0, stop - step), min(stop, num_queries)) for stop in stops]


def choose_scored(
    operands: Operands, k: int, lens: Tensor, workspace_bytes: int, tile: tuple[int, int] | None = None
) -> Tensor:
    """`choose_keys` from all scores. lens: legal lengths, on the host, within 0..num_keys."""
    device, num_queries = operands.q.device, len(operands.q)
    on_device = lens.to(device)
    indices = torch.full((num_queries, k), SENTINEL, dtype=torch.int32, device=device)
    tiles = list(cut(lens, workspace_bytes, device) if tile is None else cut_evenly(lens, *tile))
    workspace = torch.empty(max((t.num_scores for t in tiles), default=0), dtype=torch.float32, device=device)
    for t in tiles:
        _choose(operands.of_queries(t.queries), on_device[t.queries], t, workspace, indices[t.queries])
    return indices


def score_all(operands: Operands, legal_len: Tensor) -> Tensor:
    """Return every legal score, with the bits that `choose_keys` compares: [num_queries, num_keys] float32.

    Other entries are undefined. Raises ArrayError for arguments that do not fit.
    """
    _require(operands, legal_len)
    num_queries, num_keys = len(operands.q), len(operands.k)
    scores = torch.empty(num_queries, _padded(num_keys), dtype=torch.float32, device=operands.q.device)
    score_into(scores, operands, range(num_keys), legal_len.to(scores.device))
    return scores[:, :num_keys]


def _require(operands: Operands, legal_len: Tensor) -> None:
    operands.check()
    require_array("legal_len", legal_len, (len(operands.q),), torch.int32)


def cut(lens: Tensor, workspace_bytes: int, device: torch.device) -> Iterator[Tile]:
    """Yield tiles whose scores fit the workspace: as many queries as fit; where these are few, fewer keys at a time."""
    least_bytes = workspace_bytes // min(_QUERIES, max(1, len(lens)))
    most_keys = max(_COLUMNS, least_bytes // 4 // _COLUMNS * _COLUMNS)
    if device.type == "cpu":
        most_keys = min(most_keys, _CPU_KEYS)
    first = num_keys = 0
    for start in range(0, len(lens), _QUERIES):
        stop = min(start + _QUERIES, len(lens))
        max_len = int(lens[start:stop].max())
        bytes_each = 4 * _padded(min(max(max_len, num_keys), most_keys))
        if start > first and (stop - first) * bytes_each > workspace_bytes:
            yield Tile(slice(first, start), num_keys, most_keys)
            first, num_keys = start, 0
        num_keys = max(num_keys, max_len)
    if first < len(lens):
        yield Tile(slice(first, len(lens)), num_keys, most_keys)


def cut_evenly(lens: Tensor, num_queries: int, num_keys: int) -> Iterator[Tile]:
    """Yield tiles of a given size, without keys that no query of the tile may see."""
    for first in range(0, len(lens), num_queries):
        queries = slice(first, min(first + num_queries, len(lens)))
        yield Tile(queries, int(lens[queries].max()), num_keys)


def _choose(operands: Operands, lens: Tensor, tile: Tile, workspace: Tensor, out: Tensor) -> None:
    """Choose for the queries of one tile. `out` must be filled with padding before."""
    ranges, k = tile.key_ranges, out.shape[1]
    kept: Tensor | None = None
    for keys in ranges:
        width = _padded(len(keys))
        scores = workspace[: len(lens) * width].view(len(lens), width)
        score_into(scores, operands, keys, lens)
        scores = scores[:, : len(keys)]
        legal = (lens - keys.start).clamp(min=0, max=len(keys))
        if len(ranges) == 1:
            top_k(scores, k, legal, out=out)
            return
        best = top_k(scores, k, legal)
        found = order_keys(scores.gather(1, best.clamp(min=0).long()), best.clamp(min=0) + keys.start)
        found = found.masked_fill_(best < 0, _NOTHING)
        kept = found if kept is None else torch.cat((kept, found), dim=1).topk(k, dim=1).values
    if kept is not None:
        out.copy_(indices_of(kept).masked_fill_(kept == _NOTHING, SENTINEL))


def score_into(
    out: Tensor,  # [num_queries, width] float32, written; width: whole tiles of 128, for all of the keys
    operands: Operands,
    keys: range,
    lens: Tensor,  # [num_queries] int32, on the device; later columns are undefined
) -> None:
    """Write the scores of some keys, with the bits that `choose_keys` compares, on torch's current stream."""
    if not operands.q.is_cuda:
        cpu.score_tile(operands, keys, lens, out)
    elif hopper.supports(operands):
        hopper.write_scores(operands, keys, hopper.tile_max_lens(lens, operands.q.shape[1]), out)
    else:
        from csattn.lightning.paged.triton_kernels import score_contiguous  # needs Triton: GPU only

        score_contiguous(operands, keys, lens, out)


def _padded(num_keys: int) -> int:
    return -(-num_keys // _COLUMNS) * _COLUMNS
