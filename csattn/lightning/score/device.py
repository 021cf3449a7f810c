"""Which kernels score on a GPU: Hopper's own (`hopper`) where they suit, else Triton's (`triton_kernels`)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from csattn.lightning.operands.indexer import Operands
from csattn.lightning.score import hopper, triton_kernels
from csattn.lightning.score.triton_kernels import TILE_SHAPES, TileShape, queries_of_program


@dataclass(frozen=True, slots=True)
class Scorer:
    """One of the two, for operands of one shape and dtype. All scores that are compared come from the same."""

    shape: TileShape | None  # of Triton's kernels; None: Hopper's
    query_tile: int  # queries of a program

    @classmethod
    def for_operands(cls, operands: Operands) -> "Scorer":
        num_heads = operands.q.shape[1]
        if hopper.suits(operands):
            return cls(None, hopper.queries_of_tile(num_heads))
        return cls.in_triton(num_heads, TILE_SHAPES[operands.q.dtype])

    @classmethod
    def in_triton(cls, num_heads: int, shape: TileShape) -> "Scorer":
        return cls(shape, queries_of_program(num_heads, shape))

    @property
    def tile_keys(self) -> int:
        """Keys of a program's tile."""
        return hopper.KEYS if self.shape is None else self.shape.keys

    @property
    def programs_per_sm(self) -> int:
        return 1 if self.shape is None else triton_kernels.PROGRAMS_PER_SM

    def longest(self, legal_len: Tensor) -> Tensor:
        """The most keys that one query of a tile may see: [num_queries] int32 -> [query tiles] int32."""
        num_tiles = -(-len(legal_len) // self.query_tile)
        if num_tiles * self.query_tile == len(legal_len) > 0:
            return legal_len.view(num_tiles, self.query_tile).amax(1)
        whole = torch.zeros(num_tiles * self.query_tile, dtype=torch.int32, device=legal_len.device)
        whole[: len(legal_len)] = legal_len
        return whole.view(num_tiles, self.query_tile).amax(1)

    def write_scores(self, operands: Operands, keys: range, legal_len: Tensor, longest: Tensor, out: Tensor) -> None:
        """As `triton_kernels.score_tile`. longest: of legal_len."""
        if self.shape is None:
            hopper.write_scores(operands, keys, longest, out)
        else:
            triton_kernels.score_tile(operands, keys, legal_len, out, self.shape)

    def list_contenders(
        self,
        operands: Operands,
        legal_len: Tensor,
        longest: Tensor,
        step: int,
        bar_scores: Tensor,
        bar_indices: Tensor,
        lists: Tensor,
        counts: Tensor,
    ) -> None:
        """As `triton_kernels.list_contenders`."""
        arrays = bar_scores, bar_indices, lists, counts
        if self.shape is None:
            hopper.list_contenders(operands, longest, legal_len, step, *arrays)
        else:
            triton_kernels.list_contenders(operands, legal_len, step, *arrays, self.shape)
