"""How attention of a step on the GPU is divided among thread blocks, by the size of their shared memory."""

from dataclasses import dataclass

import torch

from csattn.config import RestKind
from csattn.cuda import limits
from csattn.errors import ConfigError

MAX_HEADS = 8  # of a unit: the columns of one tensor-core product; a larger group is several units with one selection
PART_ENDS = 4  # floats after a part's output

TILE_ROWS = 16  # as in the kernel
# (warps of a block, tiles that each warp has in flight): the first that fits is used
BLOCK_SHAPES = ((8, 2), (8, 1), (4, 1), (2, 2), (2, 1))
UNIT_BYTES, ARRIVALS_BYTES = 72, 8  # sizes of the kernel's `Unit` and of its mbarrier
MAX_UNITS_PER_BLOCK = 64
MOST_REST_PARTS = 32
ENOUGH_PARTS = 24  # of a unit: for more parts than these, allocating more shared memory than tiles need does not pay


@dataclass(frozen=True, slots=True)
class Blocks:
    """How the work is divided among thread blocks, one on each SM."""

    num_sms: int
    num_splits: int  # of a unit (split-K)
    rest_parts: int  # of a unit, for the rows that are not selected
    num_items: int  # splits of all units
    num_warps: int
    num_stages: int
    shared_bytes: int


def plan_blocks(
    num_sms: int,
    num_units: int,  # a unit is a row of the batch with query heads that share a selection
    row_units: int,  # units of a row
    heads: int,  # query heads of a unit
    head_dim: int,
    dtype: torch.dtype,
    rest: RestKind,
    max_segments: int,
) -> Blocks:
    """Plan splits so that one row of the batch fills the GPU; numbers of parts do not depend on the batch size.

    Raises ConfigError if there are more units than blocks can take.
    """
    unit = _Unit.of(heads, head_dim, dtype, rest)
    assert unit.block_shape is not None, "see `num_shares`"
    num_warps, num_stages = unit.block_shape
    # parts that a block collects: in the memory of its tiles, or in memory that is allocated for them
    collectable = min(ENOUGH_PARTS, unit.room // unit.part_bytes)
    most_parts = max(num_warps * num_stages * unit.tile_bytes // unit.part_bytes, collectable)
    # a power of two, as numbers of segments often are: then each part has equally many segments
    most_rest_parts = 1 << (2 * most_parts // 3).bit_length() - 1
    of_segments = min(MOST_REST_PARTS, max(1, max_segments), most_rest_parts)
    rest_parts = {"none": 0, "moments": 1, "sketch": of_segments}[rest]
    # moments need three splits
    num_splits = max(3 if rest == "moments" else 1, min(num_sms // row_units, most_parts - rest_parts))
    num_items, collected_bytes = num_units * num_splits, (num_splits + rest_parts) * unit.part_bytes
    shared_bytes = max(unit.tiles_bytes(num_warps, num_stages), collected_bytes) + unit.other_bytes
    if -(-num_items // num_sms) > (MAX_UNITS_PER_BLOCK - 2) * num_splits:
        raise ConfigError(
            f"{num_units} pairs of a row and a group of heads in one step are more than attention on the device takes; "
            "decode fewer rows in a step"
        )
    return Blocks(num_sms, num_splits, rest_parts, num_items, num_warps, num_stages, shared_bytes)


@dataclass(frozen=True, slots=True)
class _Unit:
    """The shared memory that a unit of so many heads takes in a block."""

    tile_bytes: int
    part_bytes: int
    other_bytes: int

    @classmethod
    def of(cls, heads: int, head_dim: int, dtype: torch.dtype, rest: RestKind) -> "_Unit":
        products_bytes = heads * 2 * head_dim * 4 * (rest == "moments")
        return cls(
            tile_bytes=TILE_ROWS * (2 * head_dim * dtype.itemsize + 16),
            part_bytes=heads * (head_dim + PART_ENDS) * 4,
            other_bytes=products_bytes + MAX_UNITS_PER_BLOCK * UNIT_BYTES + ARRIVALS_BYTES,
        )

    @property
    def room(self) -> int:
        """Bytes for tiles and parts."""
        return limits().block_bytes - self.other_bytes

    @property
    def block_shape(self) -> tuple[int, int] | None:
        """The first of BLOCK_SHAPES that fits; None if none does."""
        return next((shape for shape in BLOCK_SHAPES if self.tiles_bytes(*shape) <= self.room), None)

    def tiles_bytes(self, num_warps: int, num_stages: int) -> int:
        """Bytes of the tiles in flight and of the warps' parts of two items."""
        return num_warps * (num_stages * self.tile_bytes + 2 * self.part_bytes)


def num_shares(group_size: int, head_dim: int, dtype: torch.dtype, rest: RestKind) -> int:
    """The number of units that the query heads of a selection are divided among evenly.

    It is the smallest with which a block has enough memory. Raises ConfigError if there is none.
    """
    for shares in range(-(-group_size // MAX_HEADS), group_size + 1):
        if group_size % shares == 0 and _Unit.of(group_size // shares, head_dim, dtype, rest).block_shape:
            return shares
    raise ConfigError(
        f"a thread block on this GPU has too little shared memory for a head of {head_dim} dimensions in {dtype} and "
        "the estimate of the rest; choose bfloat16, or decode on the CPU"
    )
