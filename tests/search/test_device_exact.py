"""Exact Top-K on the device chooses what the selector `exact` does, for every row of a batch.

Without a device the same kernel runs on the CPU, compiled by a C++ compiler: see `tests/cuda_on_cpu`.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from csattn.attention.device import make_row_source
from csattn.batch import DeviceSelection, make_device_selection
from csattn.config import SearchConfig
from csattn.search.device import DeviceIndexes, ExactSearch, RowsShape, compiling
from csattn.selection import Selection
from csattn.selectors.base import ContextLayer, ContextView
from csattn.selectors.exact import PreparedExact
from tests.cuda_on_cpu import emulated
from tests.cuda_on_cpu.emulated import DEVICE

SCALE = 0.3
CONFIG = SearchConfig(keep=0.05, sink_len=4, window_len=16)
NUM_HEADS, HEAD_DIM = 2, 24


@pytest.fixture(autouse=True)
def kernels(emulator: emulated.Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.stand_in(monkeypatch, compiling, multiprocessors=6)


def make_rows(context_len: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return random keys with values of NaN, which nothing may read."""
    generator = torch.Generator().manual_seed(context_len)
    rows = torch.randn(NUM_HEADS, context_len, 2, HEAD_DIM, generator=generator)
    rows[:, :, 1] = torch.nan
    return rows.to(dtype)


def make_queries(batch_size: int, group_size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(batch_size, NUM_HEADS * group_size, HEAD_DIM, generator=generator).to(dtype)


def choose(
    contexts: list[Tensor], q: Tensor, context_ids: list[int], config: SearchConfig, top_ks: list[int] | None = None
) -> DeviceSelection:
    longest = max(rows.shape[1] for rows in contexts)
    indexes = DeviceIndexes(0, len(contexts), config, DEVICE)  # exact Top-K needs no layer of an index
    for number, rows in enumerate(contexts):
        indexes.context_lens[number], indexes.top_ks[number] = rows.shape[1], config.top_k(rows.shape[1])
    rows_there = [rows.to(DEVICE) for rows in contexts]
    search = ExactSearch(
        RowsShape(num_index_heads=NUM_HEADS, group_size=q.shape[1] // NUM_HEADS, head_dim=HEAD_DIM),
        [make_row_source(rows_there, DEVICE)],
        batch_size=len(q),
        max_context_len=longest,
        softmax_scale=SCALE,
        query_dtype=q.dtype,
        device=DEVICE,
    )
    out = make_device_selection(len(q), NUM_HEADS, config.top_k(longest), DEVICE)
    out.kv_indices.fill_(-(2**30))
    ids = torch.tensor(context_ids, dtype=torch.int32, device=DEVICE)
    of_rows = None if top_ks is None else torch.tensor(top_ks, dtype=torch.int32, device=DEVICE)
    search.search(q.to(DEVICE), indexes, 0, ids, out, of_rows)
    return out


def wanted(rows: Tensor, q: Tensor, config: SearchConfig) -> Selection:
    layer = ContextLayer(rows[:, :, 0], rows[:, :, 1], q.shape[0], lambda: torch.empty(0))
    selector = PreparedExact(layer).selector(ContextView(rows.shape[1], SCALE, config))
    return selector.select(q.float().numpy(), torch.empty(0))


def assert_row(out: DeviceSelection, row: int, want: Selection) -> None:
    num_wanted = want.kv_indices.shape[1]
    np.testing.assert_array_equal(out.valid_len[row].cpu().numpy(), want.valid_len)
    np.testing.assert_array_equal(out.kv_indices[row, :, :num_wanted].cpu().numpy(), want.kv_indices)
    assert (out.kv_indices[row, :, num_wanted:] == -1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group_size", [1, 3])
def test_each_row_of_a_batch_chooses_what_the_selector_exact_chooses(dtype: torch.dtype, group_size: int) -> None:
    contexts = [make_rows(n, dtype) for n in (1, 20, 21, 257, 1031)]
    ids = [3, 4, 0, 1, 2, 4]
    q = make_queries(len(ids), group_size, dtype)
    out = choose(contexts, q, ids, CONFIG)
    for row, context_id in enumerate(ids):
        assert_row(out, row, wanted(contexts[context_id], q[row], CONFIG))


def test_rows_choose_at_most_their_own_top_k_and_idle_rows_choose_nothing() -> None:
    rows, q = make_rows(600), make_queries(3, 2)
    out = choose([rows], q, [0, -1, 0], CONFIG, [7, 7, 2**31 - 1])
    best = wanted(rows, q[0], SearchConfig(keep=7 / 600, sink_len=4, window_len=16))
    assert best.kv_indices.shape[1] == 7
    assert_row(out, 0, best)
    assert_row(out, 1, Selection(np.empty((NUM_HEADS, 0), np.int32), np.zeros(NUM_HEADS, np.int32)))
    assert_row(out, 2, wanted(rows, q[2], CONFIG))


def test_equal_rows_are_chosen_in_order_and_all_of_them_with_keep_1() -> None:
    rows, q = make_rows(300), make_queries(1, 2)
    rows[:, :, 0] = rows[:, :1, 0]
    out = choose([rows], q, [0], CONFIG)
    assert out.kv_indices[0, 0].tolist() == list(range(4, 4 + CONFIG.top_k(300)))
    everything = SearchConfig(keep=1.0, sink_len=4, window_len=16)
    assert choose([rows], q, [0], everything).kv_indices[0, 1, :280].tolist() == list(range(4, 284))


def test_a_nan_query_chooses_what_the_selector_exact_chooses() -> None:
    rows, q = make_rows(300), make_queries(1, 2)
    q[0, 0, 3] = torch.nan
    assert_row(choose([rows], q, [0], CONFIG), 0, wanted(rows, q[0], CONFIG))
