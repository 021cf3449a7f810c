"""Rows between two searches of a request read the choice of the last search, from this step or an earlier one."""

import numpy as np
import pytest
import torch

from csattn.batch import make_device_selection, make_step_rows
from csattn.config import SearchConfig
from tests.cuda_on_cpu.emulated import DEVICE
from tests.workers.engine.test_placements import make_shape
from workers.engine.gpu.schedule import Schedule, schedule_bytes

SIZES = (1, 8)
NUM_TAILS = 3


@pytest.mark.parametrize("period", [2, 3, 5])
def test_every_row_reads_the_last_search_of_its_request(period: int, rng: np.random.Generator) -> None:
    shape = make_shape(SearchConfig(keep=0.1, search_period=period), batch_sizes=SIZES, num_tails=NUM_TAILS)
    schedule, lens = Schedule(shape, DEVICE), [0] * NUM_TAILS
    chosen: dict[tuple[int, int, int], int] = {}  # (layer, request, searched token) -> a mark
    marks = iter(range(1, 1 << 30))
    for _ in range(40):
        size = int(rng.choice(SIZES))
        rows, places = make_step_rows(size, DEVICE), []
        for row in np.flatnonzero(rng.random(size) < 0.8).tolist():
            tail = int(rng.integers(NUM_TAILS))
            if lens[tail] > 12 and not any(tail == other for _, other, _ in places):
                lens[tail] = 0  # another request
            lens[tail] += 1
            places.append((row, tail, lens[tail] - 1))
            rows.context_ids[row], rows.tail_ids[row], rows.tail_lens[row] = tail, tail, lens[tail]
        schedule.begin_step(rows)
        searched = {row for row, _, token in places if token % period == 0}
        assert set(torch.nonzero(schedule.search_ids(rows) >= 0).flatten().tolist()) == searched
        for layer_idx in range(shape.num_layers):
            selection = make_device_selection(size, shape.num_index_heads, shape.max_top_k, DEVICE)
            for row, tail, token in places:
                if row in searched:
                    mark = chosen[layer_idx, tail, token] = next(marks)
                    selection.kv_indices[row], selection.valid_len[row] = mark, mark
            schedule.distribute_choices(layer_idx, selection, rows)
            for row, tail, token in places:
                mark = chosen[layer_idx, tail, token - token % period]
                assert (selection.kv_indices[row] == mark).all() and (selection.valid_len[row] == mark).all()


def test_a_search_period_of_one_stores_no_choices() -> None:
    shape = make_shape(SearchConfig(keep=0.1))
    schedule, rows = Schedule(shape, DEVICE), make_step_rows(1, DEVICE)
    schedule.begin_step(rows)
    assert schedule.search_ids(rows) is rows.context_ids
    assert schedule_bytes(shape) == 0
