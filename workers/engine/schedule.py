"""Which rows of a step on a GPU are searched for, and what the others read: `search_period`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from csattn.batch import DeviceSelection, StepRows
from workers.engine.shape import EngineShape


@dataclass(frozen=True, slots=True)
class _Turn:
    """What a step of one batch size does, at addresses that a captured graph reads. All of [batch_size]."""

    search_ids: Tensor  # int32: the rows' contexts; -1: nothing is searched for
    sources: Tensor  # int64: the row whose choice each reads
    from_kept: Tensor  # bool: or its request's last one
    keep_at: Tensor  # int64: the tail whose next tokens read this row's choice; num_tails: nobody's


class Schedule:
    """Token t of a request is searched for where t is a multiple of the period; else it reads the last one's choice.

    With a period of 1 nothing is kept, and nothing is done.
    """

    def __init__(self, shape: EngineShape, device: torch.device) -> None:
        self._period, self._num_tails = shape.search.search_period, shape.num_tails
        self._turns: dict[int, _Turn] = {}
        if not self.reuses:
            return
        sizes = shape.num_layers, shape.num_tails + 1, shape.num_index_heads
        self._kv_indices = torch.full((*sizes, shape.max_top_k), -1, dtype=torch.int32, device=device)
        self._valid_len = torch.zeros(sizes, dtype=torch.int32, device=device)
        for size in shape.batch_sizes:
            self._turns[size] = _Turn(
                search_ids=torch.full((size,), -1, dtype=torch.int32, device=device),
                sources=torch.arange(size, device=device),
                from_kept=torch.zeros(size, dtype=torch.bool, device=device),
                keep_at=torch.full((size,), shape.num_tails, dtype=torch.int64, device=device),
            )

    @property
    def reuses(self) -> bool:
        """Whether some rows read what others' queries have chosen."""
        return self._period > 1

    def begin_step(self, rows: StepRows) -> None:
        """Look at the rows: outside of the graph, at every step."""
        if not self.reuses:
            return
        turn, size = self._turns[rows.batch_size], rows.batch_size
        in_use, tokens, tails = rows.context_ids >= 0, rows.tail_lens - 1, rows.tail_ids.long()
        searched = in_use & (tokens % self._period == 0)
        # row b reads row j's choice if that is searched for, of the same request and not later than b: the latest such
        alike = (tails[:, None] == tails) & in_use[:, None] & searched
        latest = torch.where(alike & (tokens <= tokens[:, None]), tokens, -1).max(dim=1)
        is_last = searched & (torch.where(alike, tokens, -1).max(dim=1).values == tokens)
        numbers = torch.arange(size, device=tokens.device)
        turn.search_ids.copy_(torch.where(searched, rows.context_ids, -1))
        turn.sources.copy_(torch.where(latest.values >= 0, latest.indices, numbers))
        turn.from_kept.copy_(in_use & (latest.values < 0))
        turn.keep_at.copy_(torch.where(is_last, tails, self._num_tails))

    def search_ids(self, rows: StepRows) -> Tensor:
        """[batch_size] int32: the contexts to search, -1 where a row is not searched for."""
        return self._turns[rows.batch_size].search_ids if self.reuses else rows.context_ids

    def share_out(self, layer_idx: int, selection: DeviceSelection, rows: StepRows) -> None:
        """Enqueue what gives every row the choice that it reads. selection: of the rows that were searched for."""
        if not self.reuses:
            return
        turn, tails = self._turns[rows.batch_size], rows.tail_ids.long()
        both = (self._kv_indices, selection.kv_indices), (self._valid_len, selection.valid_len)
        for kept, chosen in both:
            from_kept = turn.from_kept.view(-1, *[1] * (chosen.ndim - 1))
            chosen.copy_(torch.where(from_kept, kept[layer_idx, tails], chosen[turn.sources]))
            kept[layer_idx, turn.keep_at] = chosen


def schedule_bytes(shape: EngineShape) -> int:
    """Device memory of `Schedule`."""
    if shape.search.search_period == 1:
        return 0
    return shape.num_layers * (shape.num_tails + 1) * shape.num_index_heads * (shape.max_top_k + 1) * 4
