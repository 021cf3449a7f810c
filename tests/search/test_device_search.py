"""The search over lists on the device agrees with the definition, for each row of a batch, whatever the other rows.

Without a device the same kernels run on the CPU, compiled by a C++ compiler: see `tests/cuda_on_cpu`.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from csattn.batch import DeviceSelection, make_device_selection
from csattn.config import SearchConfig
from csattn.errors import ConfigError
from csattn.index import ListIndex
from csattn.search import reference
from csattn.search.device import (
    DeviceIndexes,
    DeviceSearch,
    ListsShape,
    compiling,
    to_device,
)
from csattn.search.workspace import empty_token_selections
from csattn.selection import Selection
from tests.cuda_on_cpu import emulated
from tests.cuda_on_cpu.emulated import DEVICE
from tests.search.shapes import shape_of
from tests.search.synthetic import IndexSpec, make_index, make_queries
from tests.selections import check_selection

SCALE = 0.2  # softmax scale
CONFIG = SearchConfig(keep=0.05, sink_len=4, window_len=16)
ON_DEVICE = pytest.mark.gpu  # too slow under emulation on the CPU


@pytest.fixture(autouse=True)
def kernels(emulator: emulated.Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.stand_in(monkeypatch, compiling, multiprocessors=6)


def search_on_device(
    indexes: list[ListIndex],
    q: np.ndarray,
    context_ids: list[int],
    config: SearchConfig = CONFIG,
    scale: float = SCALE,
    top_ks: list[int] | None = None,  # of each row of the batch
) -> DeviceSelection:
    """Search one layer for a batch. q: [batch_size, num_q_heads, head_dim] float32."""
    device = DEVICE
    shape = shape_of(indexes[0], q.shape[1])
    longest = max(index.context_len for index in indexes)
    loaded = DeviceIndexes(1, len(indexes), config, device)
    for number, index in enumerate(indexes):
        loaded.load(number, index.context_len, [to_device(index, device)])
    search = DeviceSearch(
        shape,
        batch_size=len(q),
        max_context_len=longest,
        softmax_scale=scale,
        query_dtype=torch.float32,
        device=device,
    )
    out = make_device_selection(len(q), shape.num_index_heads, config.top_k(longest), device)
    out.kv_indices.fill_(-(2**30))
    ids = torch.tensor(context_ids, dtype=torch.int32, device=device)
    of_rows = None if top_ks is None else torch.tensor(top_ks, dtype=torch.int32, device=device)
    search.search(torch.from_numpy(q).to(device), loaded, 0, ids, out, of_rows)
    return out


def row_of(out: DeviceSelection, row: int) -> Selection:
    return Selection(out.kv_indices[row].cpu().numpy(), out.valid_len[row].cpu().numpy())


def assert_right(
    got: Selection, q: np.ndarray, index: ListIndex, config: SearchConfig = CONFIG, scale: float = SCALE
) -> None:
    """Compare the group scores of the chosen keys, in order: rounding of exp may swap keys whose scores nearly tie."""
    want = empty_token_selections(1, index.num_heads, config.top_k(index.context_len))[0]
    reference.search(q, index, None, want.kv_indices.shape[1], config.sink_len, config.window_len, scale, want)
    np.testing.assert_array_equal(got.valid_len, want.valid_len)
    check_selection(got, index.context_len)
    group_size = len(q) // index.num_heads
    for head in range(index.num_heads):
        rows = [reference.score_keys(q[head * group_size + g], index, None, head) for g in range(group_size)]
        group_scores, scored = reference.combine_group(rows, scale)
        mine, theirs = got.kv_indices[head, : got.valid_len[head]], want.kv_indices[head, : want.valid_len[head]]
        assert scored[mine].all(), f"head {head} chose a key that no list holds"
        np.testing.assert_allclose(np.sort(group_scores[mine]), np.sort(group_scores[theirs]), rtol=3e-5, atol=0)
        if group_size == 1:
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("group_size", [1, 3, 4, pytest.param(2, marks=ON_DEVICE), pytest.param(7, marks=ON_DEVICE)])
@pytest.mark.parametrize(
    "context_len", [1, 21, 1000, pytest.param(64, marks=ON_DEVICE), pytest.param(70001, marks=ON_DEVICE), 4097]
)
def test_search_over_lists_agrees_with_the_definition(group_size: int, context_len: int) -> None:
    spec = IndexSpec(layout="lists", context_len=context_len, list_len=0.25)
    q = make_queries(spec, group_size)
    index = make_index(spec)
    assert_right(row_of(search_on_device([index], q[None], [0]), 0), q, index)


@pytest.mark.parametrize("scale", [0.0, 0.01, 5.0, 100.0])
@pytest.mark.parametrize("keep", [0.001, 0.3, 1.0])
def test_flat_and_peaked_softmaxes_agree_with_the_definition(scale: float, keep: float) -> None:
    spec = IndexSpec(layout="lists", context_len=5003, num_heads=1, head_dim=64, num_subspaces=16, num_centroids=40)
    q, index = make_queries(spec, 4), make_index(spec)
    config = SearchConfig(keep=keep, sink_len=0, window_len=1)
    got = row_of(search_on_device([index], q[None], [0], config, scale), 0)
    assert_right(got, q, index, config, scale)


@pytest.mark.parametrize("keep", [0.02, 0.4, 1.0])
def test_a_single_query_chooses_keys_however_far_below_the_best_score(keep: float) -> None:
    """This holds for negative scores too."""
    spec = IndexSpec(layout="lists", context_len=4100, num_heads=1, list_len=1.0)
    q, index, config = make_queries(spec, 1), make_index(spec), SearchConfig(keep=keep, sink_len=0, window_len=1)
    assert_right(row_of(search_on_device([index], q[None], [0], config), 0), q, index, config)


def test_each_row_of_a_batch_chooses_with_its_own_top_k() -> None:
    spec = IndexSpec(layout="lists", context_len=3000)
    index, top_ks = make_index(spec), [1, 40, 2**31 - 1]
    q = np.stack([make_queries(spec, 4, seed=row) for row in range(3)])
    together = search_on_device([index], q, [0] * 3, top_ks=top_ks)
    for row, top_k in enumerate(top_ks):
        config = replace(CONFIG, keep=min(top_k / 3000, CONFIG.keep))
        got = row_of(together, row)
        assert_right(got, q[row], index, config)
        assert (got.kv_indices[:, config.top_k(3000) :] == -1).all()


@pytest.mark.parametrize("distinct_keys", [1, 37])
@pytest.mark.parametrize("group_size", [1, 4])
def test_equal_keys_are_chosen_in_order(distinct_keys: int, group_size: int) -> None:
    spec = IndexSpec(layout="lists", context_len=3001, distinct_keys=distinct_keys, list_len=1.0)
    q, index = make_queries(spec, group_size), make_index(spec)
    got = row_of(search_on_device([index], q[None], [0]), 0)
    want = empty_token_selections(1, index.num_heads, got.kv_indices.shape[1])[0]
    reference.search(q, index, None, got.kv_indices.shape[1], CONFIG.sink_len, CONFIG.window_len, SCALE, want)
    np.testing.assert_array_equal(got.kv_indices, want.kv_indices)


def test_a_row_does_not_depend_on_its_batch() -> None:
    specs = [IndexSpec(layout="lists", context_len=n, seed=n) for n in (3000, 129, 5000)]
    indexes = [make_index(spec) for spec in specs]
    context_ids = [2, -1, 0, 1, 0, 2]
    q = np.stack([make_queries(specs[0], 4, seed=row) for row in range(len(context_ids))])
    together = search_on_device(indexes, q, context_ids)
    for row, context_id in enumerate(context_ids):
        got = row_of(together, row)
        if context_id < 0:
            assert (got.valid_len == 0).all()
            assert (got.kv_indices == -1).all()
            continue
        assert_right(got, q[row], indexes[context_id])
        alone = row_of(search_on_device([indexes[context_id]], q[row : row + 1], [0]), 0)
        top_k = alone.kv_indices.shape[1]
        np.testing.assert_array_equal(got.kv_indices[:, :top_k], alone.kv_indices)
        assert (got.kv_indices[:, top_k:] == -1).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_queries_are_searched_without_further_rounding(dtype: torch.dtype) -> None:
    spec = IndexSpec(layout="lists", context_len=2000)
    index = make_index(spec)
    q = torch.from_numpy(make_queries(spec, 4)).to(dtype)
    device = DEVICE
    loaded = DeviceIndexes(1, 1, CONFIG, device)
    loaded.load(0, 2000, [to_device(index, device)])
    shape = shape_of(index, len(q))
    arguments: dict[str, Any] = {"batch_size": 1, "max_context_len": 2000, "softmax_scale": SCALE, "device": device}
    out = make_device_selection(1, shape.num_index_heads, CONFIG.top_k(2000), device)
    search = DeviceSearch(shape, query_dtype=dtype, **arguments)
    search.search(q[None].to(device), loaded, 0, torch.zeros(1, dtype=torch.int32, device=device), out)
    assert_right(row_of(out, 0), q.float().numpy(), index)


def test_queries_of_zeros_or_nan_still_choose_top_k_rows() -> None:
    spec = IndexSpec(layout="lists", context_len=2000)
    index = make_index(spec)
    q = make_queries(spec, 4)
    q[0] = 0.0
    q[5] = np.nan
    got = row_of(search_on_device([index], q[None], [0]), 0)
    check_selection(got, 2000)
    assert (got.valid_len == CONFIG.top_k(2000)).all()


def test_unsupported_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match="do not divide"):
        ListsShape(num_index_heads=2, group_size=4, head_dim=64, num_subspaces=7, num_centroids=8)
    with pytest.raises(ConfigError, match="at most 32"):
        ListsShape(num_index_heads=2, group_size=4, head_dim=128, num_subspaces=2, num_centroids=8)
