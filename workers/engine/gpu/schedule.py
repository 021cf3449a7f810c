"""`search_period` on a GPU: which rows of a step are searched, and whose choice the others read."""

from dataclasses import dataclass

import torch
from torch import Tensor

from csattn.batch import DeviceSelection, StepRows
from workers.engine.gpu.shape import EngineShape


@dataclass(frozen=True, slots=True)
class _StepSchedule:
    """The schedule of a step of one batch size, at addresses that a captured graph reads. All are [batch_size]."""

    search_ids: Tensor  # int32: the rows' contexts; -1: the row is not searched
    sources: Tensor  # int64: the row whose choice each row reads
    from_kept: Tensor  # bool: instead, the row reads the choice that its request keeps
    keep_at: Tensor  # int64: the tail whose next tokens read this row's choice; num_tails: none


class Schedule:
    """Token t of a request is searched if t is a multiple of the period; others read the last searched token's choice.

    With a period of 1, every row is searched, and this does nothing.
    """

    def __init__(self, shape: EngineShape, device: torch.device) -> None:
        self._period, self._num_tails = shape.search.search_period, shape.num_tails
        self._by_batch_size: dict[int, _StepSchedule] = {}
        if not self.reuses:
            return
        sizes = shape.num_layers, shape.num_tails + 1, shape.num_index_heads
        self._kv_indices = torch.full((*sizes, shape.max_top_k), -1, dtype=torch.int32, device=device)
        self._valid_len = torch.zeros(sizes, dtype=torch.int32, device=device)
        for size in shape.batch_sizes:
            self._by_batch_size[size] = _StepSchedule(
                search_ids=torch.full((size,), -1, dtype=torch.int32, device=device),
                sources=torch.arange(size, device=device),
                from_kept=torch.zeros(size, dtype=torch.bool, device=device),
                keep_at=torch.full((size,), shape.num_tails, dtype=torch.int64, device=device),
            )

    @property
    def reuses(self) -> bool:
        """Whether some rows read what other rows' queries have chosen."""
        return self._period > 1

    def begin_step(self, rows: StepRows) -> None:
        """Compute the schedule of the step's rows: outside of the graph, at every step."""
        if not self.reuses:
            return
        plan, size = self._by_batch_size[rows.batch_size], rows.batch_size
        in_use, tokens, tails = rows.context_ids >= 0, rows.tail_lens - 1, rows.tail_ids.long()
        searched = in_use & (tokens % self._period == 0)
        # row b reads the choice of the latest row that is searched, of the same request and not later than b
        alike = (tails[:, None] == tails) & in_use[:, None] & searched
        latest = torch.where(alike & (tokens <= tokens[:, None]), tokens, -1).max(dim=1)
        is_last = searched & (torch.where(alike, tokens, -1).max(dim=1).values == tokens)
        numbers = torch.arange(size, device=tokens.device)
        plan.search_ids.copy_(torch.where(searched, rows.context_ids, -1))
        plan.sources.copy_(torch.where(latest.values >= 0, latest.indices, numbers))
        plan.from_kept.copy_(in_use & (latest.values < 0))
        plan.keep_at.copy_(torch.where(is_last, tails, self._num_tails))

    def search_ids(self, rows: StepRows) -> Tensor:
        """Return the contexts to search: [batch_size] int32, -1 for rows that are not searched."""
        return self._by_batch_size[rows.batch_size].search_ids if self.reuses else rows.context_ids

    def distribute_choices(self, layer_idx: int, selection: DeviceSelection, rows: StepRows) -> None:
        """Enqueue the copies that give every row the choice that it reads. selection: of the searched rows, changed."""
        if not self.reuses:
            return
        plan, tails = self._by_batch_size[rows.batch_size], rows.tail_ids.long()
        both = (self._kv_indices, selection.kv_indices), (self._valid_len, selection.valid_len)
        for kept, chosen in both:
            from_kept = plan.from_kept.view(-1, *[1] * (chosen.ndim - 1))
            chosen.copy_(torch.where(from_kept, kept[layer_idx, tails], chosen[plan.sources]))
            kept[layer_idx, plan.keep_at] = chosen


def schedule_bytes(shape: EngineShape) -> int:
    """Device memory of `Schedule`."""
    if shape.search.search_period == 1:
        return 0
    return shape.num_layers * (shape.num_tails + 1) * shape.num_index_heads * (shape.max_top_k + 1) * 4
