"""How kernels are launched one after another, and launches of the kernels for rows of the residual stream."""

from typing import Any

import torch
import triton
from torch import Tensor

from csattn.batch import StepRows
from csattn.cuda import limits
from workers.model.gpu.token_kernels import add_normed_kernel, begin_kernel, norm_kernel
from workers.model.ops import SQUARES_BLOCK, Exchange, Readers, Stream

_ADDED_COLUMNS = 1024  # that a program adds to a row of the stream, if it need not know the whole row


class Launches:
    """The base of all parts of `TritonOps`: programmatic dependent launch, on Hopper and later.

    Each kernel starts while the one before it is ending, if that one is ours too: it waits on the device before it
    reads what that one writes, and lets the next one start only after it has waited itself.
    """

    def __init__(self, device: torch.device, eps: float) -> None:
        """eps: of all norms of the model."""
        self._eps = eps
        self._on_gpu = device.type == "cuda"  # else Triton's interpreter runs the kernels
        self._starts_early = self._on_gpu and limits().is_hopper
        self._chained = False

    def break_chain(self) -> None:
        self._chained = False

    def _launch(self) -> dict[str, Any]:
        """Return the launch options of the next Triton kernel, and record its launch."""
        chained = self._chain()
        return {"PDL": True, "launch_pdl": chained} if self._starts_early else {"PDL": False}

    def _chain(self) -> bool:
        """Return whether the next kernel follows one of ours, and record its launch: the one after it does."""
        chained, self._chained = self._chained, True
        return chained


class TritonStreamOps(Launches):
    """The part of `TritonOps` for the residual stream."""

    def norm(self, x: Tensor, norm: Tensor, out: Tensor, adds: bool = False) -> None:
        num_rows, width = out.shape
        block = triton.next_power_of_2(width)
        norm_kernel[(num_rows,)](x, norm, out, width, self._eps, adds, BLOCK=block, num_warps=8, **self._launch())

    def begin(
        self,
        rows: StepRows,
        embedding: Tensor,
        multiplier: float,
        stream: Stream,
        readers: Readers,
    ) -> None:
        batch_size, hidden_size = stream.hidden.shape
        begin_kernel[(batch_size,)](
            rows.token_ids,
            embedding,
            *stream_arguments(stream, readers),
            stream.squares.shape[0],
            hidden_size,
            multiplier,
            CENTRED=stream.centred,
            **row_constants(stream, readers),
        )

    def add_normed(
        self,
        x: Tensor,
        norm: Tensor | None,
        multiplier: float,
        scale: float,
        stream: Stream,
        readers: Readers,
    ) -> None:
        self._add_parts(x, 1, norm, multiplier, scale, stream, readers)

    def _add_parts(
        self,
        x: Tensor,  # [batch_size, num_parts, hidden_size]; [batch_size, hidden_size] for one part
        num_parts: int,
        norm: Tensor | None,
        multiplier: float,
        scale: float,
        stream: Stream,
        readers: Readers,
    ) -> None:
        batch_size, hidden_size = stream.hidden.shape
        memory, exchange_constants = exchange_arguments(stream.row_sums, x)
        constants = row_constants(stream, readers)
        if norm is None:
            constants |= {"BLOCK": _ADDED_COLUMNS, "num_warps": 4}
        add_normed_kernel[(batch_size, triton.cdiv(hidden_size, constants["BLOCK"]))](
            x,
            x if norm is None else norm,
            *stream_arguments(stream, readers),
            stream.squares.shape[0],
            hidden_size,
            self._eps,
            multiplier,
            scale,
            *memory,
            NUM_PARTS=num_parts,
            IS_NORMED=norm is not None,
            **exchange_constants,
            **constants,
            **self._launch(),
        )


def stream_arguments(stream: Stream, readers: Readers) -> tuple[Tensor, ...]:
    """Return the stream's arguments of a kernel that writes it; in place of a norm that is None, any tensor."""
    norm, ahead = (stream.hidden if norm is None else norm for norm in (readers.norm, readers.ahead))
    return stream.hidden, norm, stream.scaled, ahead, stream.scaled_ahead, stream.squares


def exchange_arguments(exchange: Exchange | None, anything: Tensor) -> tuple[tuple[Any, Any], dict[str, int]]:
    """Return a kernel's arguments and constants for `sum_over_devices`; without an exchange, of one device."""
    if exchange is None:
        return (anything, (0,)), {"RANK": 0, "NUM_DEVICES": 1}
    return (exchange.counts, exchange.inboxes), {"RANK": exchange.rank, "NUM_DEVICES": len(exchange.inboxes)}


def row_constants(stream: Stream, readers: Readers) -> dict[str, Any]:
    """Return the constants of kernels in which a program owns a row of the stream."""
    return {
        "HAS_NORM": readers.norm is not None,
        "AHEAD": readers.ahead is not None,
        "BLOCK": max(SQUARES_BLOCK, triton.next_power_of_2(stream.hidden.shape[1])),
        "SQUARES_BLOCK": SQUARES_BLOCK,
        "num_warps": 8,
    }
