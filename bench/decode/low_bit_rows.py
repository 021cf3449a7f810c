"""Full attention on a device over KV in few bits, all of which it reads: KIVI, TurboQuant and q4_0.

`bench.accuracy.attending.low_bit` defines the codes; low_bit_rows.cu attends to them. Left out, to the methods'
advantage: TurboQuant's rotation of queries and outputs, the coding of new rows, and attention to new rows in full
precision. Scales and zero points are bfloat16 here, not float16: as many bytes, and only the time is measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log2
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.accuracy.attending.low_bit import (
    coded_by_range,
    coded_q4_0,
    encode_rotated,
    largest_channels,
    normal_levels,
)
from bench.decode.options import Options
from bench.decode.prepared import Prepared, make_tails, require_memory
from bench.decode.widened import NUM_WIDE_LAYERS, Heads
from bench.decode.workload import Workload
from csattn.batch import StepRows
from csattn.cuda import cuda_kernel, limits, num_multiprocessors
from csattn.errors import ConfigError
from workers.model.attention import StepAttention

SOURCE = Path(__file__).with_name("low_bit_rows.cu")
TILE_LEN = 32  # rows
HEAD_DIM = 128  # the only one for which the kernel was tried
NUM_WARPS, MAX_STAGES = 8, 4
OTHER_BYTES = 2 << 10  # shared memory of a block besides tiles
ROTATED_BITS = 4, 3  # of codes in the first and second half of the channels: TurboQuant


@dataclass(frozen=True, slots=True)
class LowBitFormat:
    """How rows are coded. bits: of a code; None: ROTATED_BITS."""

    bits: int | None
    block: int  # dimensions of a row that share a scale
    by_channel: bool = False  # keys have scales by dimension; keys and values have zero points
    middle: int = 0  # the code of zero
    num_blocks: int = 2  # of a multiprocessor: the fastest number

    def tile_bytes(self, head_dim: int) -> int:
        code_bits = sum(ROTATED_BITS) / len(ROTATED_BITS) if self.bits is None else self.bits
        scales = 4 * TILE_LEN * head_dim // self.block  # of keys and values, two bytes each
        return round(TILE_LEN * head_dim * code_bits / 4) + scales * (2 if self.by_channel else 1)


FORMATS: Mapping[str, LowBitFormat] = {
    "kivi-2": LowBitFormat(2, 32, by_channel=True),
    "kivi-4": LowBitFormat(4, 32, by_channel=True),
    "turboquant-3.5": LowBitFormat(None, 64),
    "q4_0": LowBitFormat(4, 32, middle=8, num_blocks=1),
}


def coded_tiles(rows: Tensor, of: LowBitFormat) -> Tensor:
    """Code rows into tiles [num_kv_heads, num_tiles, tile_bytes] uint8, as the kernel reads them.

    rows: [num_kv_heads, context_len, 2, head_dim]; raises ConfigError if they do not fill whole tiles. TurboQuant's
    channels are in its own order, rotated.
    """
    if rows.shape[1] % TILE_LEN:
        raise ConfigError(f"rows in few bits are measured in whole tiles of {TILE_LEN}, not {rows.shape[1]} rows")
    parts = list[Tensor]()
    for which, part in enumerate(rows.float().unbind(2)):
        by_channel = of.by_channel and which == 0
        codes, scales, zeros = _coded(part, of, by_channel)
        tiles = codes.unflatten(1, (-1, TILE_LEN))
        parts.append(_packed(tiles if which == 0 else tiles.mT, of, is_transposed=which == 1))
        place = _by_dimension if by_channel else _key_fragment if which == 0 else _value_fragment
        parts += [place(numbers) for numbers in (scales, zeros) if numbers is not None]
    return torch.cat(parts, dim=2)


def _coded(rows: Tensor, of: LowBitFormat, by_channel: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return codes like rows, int32, and their scales and zero points, [num_kv_heads, num_rows, num_blocks] each.

    by_channel: scales and zero points are [num_kv_heads, num_tiles, head_dim].
    """
    if of.bits is None:
        halves = encode_rotated(rows, largest_channels(rows), ROTATED_BITS)
        codes = torch.cat([numbers for numbers, _, _ in halves], dim=2).int()
        return codes, torch.cat([norm / len(rotation) ** 0.5 for _, norm, rotation in halves], dim=2), None
    if not of.by_channel:
        codes, scale = coded_q4_0(rows)
        return codes.flatten(2).int(), scale[..., 0], None
    codes, low, scale = coded_by_range(rows.mT if by_channel else rows, of.bits)
    if by_channel:
        return codes.flatten(2).mT.int(), scale[..., 0].mT, low[..., 0].mT
    return codes.flatten(2).int(), scale[..., 0], low[..., 0]


def _packed(tiles: Tensor, of: LowBitFormat, is_transposed: bool) -> Tensor:
    """Pack codes in pairs, as a lane holds operand `a` of mma.m16n8k16: [num_kv_heads, num_tiles, bytes].

    tiles: [num_kv_heads, num_tiles, TILE_LEN, head_dim]; is_transposed: the last two axes are swapped.
    """
    if is_transposed:  # 16 dimensions by 16 rows of half a tile
        steps = tiles.unflatten(2, (-1, 16)).unflatten(4, (2, 16)).permute(0, 1, 4, 2, 3, 5)
    else:
        steps = tiles.unflatten(2, (2, 16)).unflatten(4, (-1, 16)).permute(0, 1, 2, 4, 3, 5)
    # [heads, tiles, halves, steps, 16, 16]; a lane: row lane / 4 (+ 8), columns 2 (lane % 4) and the next (+ 8)
    parts = steps.unflatten(4, (2, 8)).unflatten(6, (2, 4, 2))
    pairs = parts.permute(0, 1, 2, 5, 7, 3, 6, 4, 8).flatten(3, 4).flatten(4, 6)  # [..., 32 lanes, pairs, 2]
    words = _level_words(pairs) if of.bits is None else [_number_words(pairs, of.bits)]
    by_four = [part for word in words for part in word.split(4, dim=-1)]
    whole = [part if part.shape[-1] == 4 else part.mT for part in by_four]  # a lane's words: in fours, then singly
    return torch.cat([part.flatten(3) for part in whole], dim=3).flatten(2).contiguous().view(torch.uint8)


def _number_words(pairs: Tensor, bits: int) -> Tensor:
    """Pack pairs into words, lowest bits first: a pair's first code in the low half, its second in the high half."""
    places = bits * torch.arange(16 // bits, device=pairs.device)[:, None] + 16 * torch.arange(2, device=pairs.device)
    return _as_words((pairs.unflatten(-2, (-1, 16 // bits)).long() << places).sum((-2, -1)))


def _level_words(pairs: Tensor) -> list[Tensor]:
    """Pack codes of levels: three words of magnitudes and one of signs for the first half of dimensions, then three.

    A code takes three bits of a nibble; the fourth bits of three words' nibbles hold eight more codes.
    """
    first, second = pairs.chunk(2, dim=-2)
    is_positive = first >= 8
    sizes = torch.where(is_positive, first - 8, 7 - first)
    places = torch.arange(16, device=pairs.device)[:, None] + 16 * torch.arange(2, device=pairs.device)
    signs = ((~is_positive).long() << places).sum((-2, -1))
    return [torch.cat([_three_bits(sizes), _as_words(signs)[..., None]], dim=-1), _three_bits(second)]


def _three_bits(pairs: Tensor) -> Tensor:
    nibbles = 4 * torch.arange(8, device=pairs.device)
    *own, more = pairs.flatten(-2).long().unflatten(-1, (4, 8)).unbind(-2)
    words = [(codes << nibbles).sum(-1) + ((more >> i & 1) << nibbles + 3).sum(-1) for i, codes in enumerate(own)]
    return _as_words(torch.stack(words, dim=-1))


def _as_words(numbers: Tensor) -> Tensor:
    """Return numbers below 2**32 as the int32 with the same bits."""
    return torch.where(numbers >= 2**31, numbers - 2**32, numbers).int()


def _by_dimension(numbers: Tensor) -> Tensor:
    """Lay out [num_kv_heads, num_tiles, head_dim] so that a lane's numbers of all steps of 16 lie side by side."""
    return _as_bytes(numbers.unflatten(2, (-1, 2, 4, 2)).permute(0, 1, 4, 2, 3, 5))


def _key_fragment(numbers: Tensor) -> Tensor:
    """Lay out [num_kv_heads, num_rows, num_blocks]: a lane reads those of each eighth row from lane / 4 on."""
    return _as_bytes(numbers.unflatten(1, (-1, 4, 8)).permute(0, 1, 3, 4, 2))


def _value_fragment(numbers: Tensor) -> Tensor:
    """Lay out [num_kv_heads, num_rows, num_blocks]: a lane reads two rows of each eight, from 2 (lane % 4)."""
    return _as_bytes(numbers.unflatten(1, (-1, 4, 4, 2)).permute(0, 1, 3, 5, 2, 4))


def _as_bytes(numbers: Tensor) -> Tensor:
    return numbers.bfloat16().flatten(2).contiguous().view(torch.uint8)


def level_table(device: torch.device) -> Tensor:
    """Return the levels of both halves [2, 4] int32: the low bytes of eight bfloat16 levels, then the high bytes."""
    halves = [normal_levels(bits)[-8:].bfloat16().view(torch.int16).int() & 0xFFFF for bits in ROTATED_BITS]
    table = [torch.stack([half & 0xFF, half >> 8]).to(torch.uint8).flatten().view(torch.int32) for half in halves]
    return torch.stack(table).to(device)


class LowBitAttention:
    """Attention to all rows of each request's context. Launches share a workspace, so they must be ordered."""

    def __init__(self, of: LowBitFormat, heads: Heads, context_len: int, batch_size: int, device: torch.device) -> None:
        self._num_tiles, self._batch_size, self._heads = context_len // TILE_LEN, batch_size, heads
        tile_bytes = of.tile_bytes(heads.head_dim)
        room = limits().block_bytes // of.num_blocks - OTHER_BYTES
        num_stages = max(1, min(MAX_STAGES, room // (NUM_WARPS * tile_bytes)))
        num_blocks = of.num_blocks * num_multiprocessors(device)
        self._num_splits = max(1, num_blocks // (heads.num_kv_heads * batch_size))
        defines = {
            "HEAD_DIM": heads.head_dim,
            "GROUP": heads.group_size,
            "NUM_KV_HEADS": heads.num_kv_heads,
            "THREADS": 32 * NUM_WARPS,
            "STAGES": num_stages,
            "NUM_SPLITS": self._num_splits,
            "BLOCKS_OF_MULTIPROCESSOR": of.num_blocks,
            "LEVELS": int(of.bits is None),
            "BITS": of.bits or 4,
            "BLOCK": of.block,
            "BY_CHANNEL": int(of.by_channel),
            "MIDDLE": of.middle,
        }
        part_len = heads.head_dim + 2
        added_up = NUM_WARPS * heads.group_size * (part_len + heads.head_dim // of.block)  # float32, where tiles were
        shared_bytes = max(NUM_WARPS * num_stages * tile_bytes, 4 * added_up)
        self._attend = cuda_kernel(SOURCE, "attend_low_bit_rows", defines, shared_bytes, early_start=True)
        of_joining = {**defines, "THREADS": heads.head_dim}
        self._join = cuda_kernel(SOURCE, "join_low_bit_parts", of_joining, early_start=True)
        sizes = batch_size, heads.num_kv_heads, self._num_splits, heads.group_size, part_len
        self._parts = torch.empty(sizes, device=device)
        self._levels = level_table(device)

    def attend(self, q: Tensor, tiles: Tensor, out: Tensor) -> None:
        """q, out: [batch_size, num_q_heads, head_dim] bfloat16; tiles: [batch_size, num_kv_heads, num_tiles, bytes]."""
        assert q.is_contiguous() and out.is_contiguous() and tiles.is_contiguous() and q.dtype == torch.bfloat16
        heads, scale = self._heads, np.float32(self._heads.softmax_scale * log2(np.e))
        grid = self._num_splits, heads.num_kv_heads, self._batch_size
        places = q, tiles, self._levels, self._parts
        self._attend.launch(grid, 32 * NUM_WARPS, *places, np.int32(self._num_tiles), scale)
        joining = heads.group_size, heads.num_kv_heads * self._batch_size, 1
        self._join.launch(joining, heads.head_dim, self._parts, out)


class LowBitSteps(StepAttention):
    """Full attention to contexts in few bits. It does not read the tail."""

    def __init__(self, tails: Tensor, tiles: list[Tensor], attention: LowBitAttention) -> None:
        """tiles: for each layer, as `LowBitAttention.attend` takes them."""
        self.tails = tails
        self._tiles = tiles
        self._attention = attention

    def attend(self, layer_idx: int, q: Tensor, rows: StepRows, out: Tensor) -> None:
        self._attention.attend(q, self._tiles[layer_idx], out)


def low_bit_rows(work: Workload, options: Options, name: str) -> Prepared:
    """Load every request's context to the device, in few bits. Raises ConfigError where this is not measured."""
    if work.is_shared:
        raise ConfigError(f"{name} is measured for requests with contexts of their own")
    of, heads = FORMATS[name], work.heads
    if heads.group_size > 8 or heads.head_dim != HEAD_DIM:
        raise ConfigError(
            f"{name} is measured for 8 query heads of a KV head at most, of {HEAD_DIM} dimensions, not "
            f"{heads.group_size} of {heads.head_dim}; leave it out"
        )
    of_layer = work.num_contexts * heads.num_kv_heads * work.context_len * of.tile_bytes(heads.head_dim) // TILE_LEN
    require_memory(options.num_layers * of_layer, "the KV of all contexts in few bits")
    attention = LowBitAttention(of, heads, work.context_len, work.batch_size, work.device)
    first = list[Tensor]()
    for layer_idx in range(min(NUM_WIDE_LAYERS, options.num_layers)):
        tiles = coded_tiles(work.rows(layer_idx), of)
        first.append(tiles[None].expand(work.num_contexts, -1, -1, -1).contiguous())
    layers = first + [first[i % len(first)].clone() for i in range(len(first), options.num_layers)]
    return Prepared(LowBitSteps(make_tails(work, options), layers, attention), options.num_layers * of_layer)
