"""The arguments of sparse MLA attention: queries, latent rows, and which of these each query attends to."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from csattn.errors import ArrayError, ConfigError
from csattn.lightning.checks import require_array

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class SelectedRows:
    """Arguments of `attend.sparse_mla`."""

    q_nope: Tensor
    q_pe: Tensor | None
    ckv: Tensor
    kpe: Tensor | None
    indices: Tensor
    softmax_scale: float
    attn_sink: Tensor | None = None

    @property
    def rope_dim(self) -> int:
        return 0 if self.q_pe is None else int(self.q_pe.shape[2])

    @property
    def arrays(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q_nope, q_pe, ckv, kpe and indices, as kernels take them: instead of None, an array that they do not read."""
        q_pe, kpe = self.q_nope if self.q_pe is None else self.q_pe, self.ckv if self.kpe is None else self.kpe
        return self.q_nope, q_pe, self.ckv, kpe, self.indices

    def of_queries(self, some: slice) -> "SelectedRows":
        """Return the arguments of some queries only."""
        q_pe = None if self.q_pe is None else self.q_pe[some]
        return replace(self, q_nope=self.q_nope[some], q_pe=q_pe, indices=self.indices[some])

    def check(self) -> None:
        """Raise ArrayError or ConfigError unless the arguments fit together."""
        q_nope, ckv = self.q_nope, self.ckv
        require_array("q_nope", q_nope, ("num_queries", "num_heads", "latent_dim"), *DTYPES)
        num_queries, num_heads, latent_dim = q_nope.shape
        require_array("ckv", ckv, ("num_rows", latent_dim), q_nope.dtype, like=q_nope, any_row_stride=True)
        if (self.q_pe is None) != (self.kpe is None):
            raise ArrayError("one of q_pe and kpe is missing; give both, or neither if rows have no other channels")
        if self.q_pe is not None and self.kpe is not None:
            require_array("q_pe", self.q_pe, (num_queries, num_heads, "rope_dim"), q_nope.dtype, like=q_nope)
            require_array("kpe", self.kpe, (len(ckv), self.rope_dim), q_nope.dtype, like=q_nope, any_row_stride=True)
        require_array("indices", self.indices, (num_queries, "top_k"), torch.int32, like=q_nope)
        if self.attn_sink is not None:
            require_array("attn_sink", self.attn_sink, (num_heads,), torch.float32, like=q_nope)
        if not isinstance(self.softmax_scale, int | float) or not 0 < self.softmax_scale < float("inf"):
            raise ConfigError(f"softmax_scale is {self.softmax_scale!r}; wanted a positive number, as a float")
