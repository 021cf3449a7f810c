"""The search over sketches on the device, and attention to the rest, agree with their definitions."""

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch

from csattn.attention.device_blocks import num_shares
from csattn.batch import DeviceSelection, make_device_selection
from csattn.config import SearchConfig
from csattn.cuda import limits
from csattn.errors import ConfigError
from csattn.search import reference
from csattn.search.device import DeviceIndexes, DeviceSearch, SketchPass, SketchShape, compiling, sketch_pass, to_device
from csattn.search.workspace import empty_token_selections
from csattn.selection import Selection
from csattn.sketch import SketchIndex
from csattn.sketch.reference import attend_rest, score_group
from tests.cuda_on_cpu import emulated
from tests.cuda_on_cpu.emulated import DEVICE
from tests.search.shapes import shape_of
from tests.selections import check_selection
from tests.sketch.synthetic import make_heads, make_sketch

SCALE = 0.1  # softmax scale
CONFIG = SearchConfig(keep=0.05, sink_len=4, window_len=16)
ON_DEVICE = pytest.mark.gpu  # too slow under emulation on the CPU
REST_PARTS = 3


@pytest.fixture(autouse=True)
def kernels(emulator: emulated.Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.stand_in(monkeypatch, compiling, multiprocessors=3)


@lru_cache(maxsize=4)
def make_index(
    num_rows: int, num_heads: int = 2, group_size: int = 4, head_dim: int = 32, seed: int = 0, **sizes: Any
) -> tuple[SketchIndex, np.ndarray]:
    """Return a sketch of a few segments, and queries [64, num_q_heads, head_dim], which must not be written to."""
    rng = np.random.default_rng(seed)
    q, k, v = make_heads(rng, num_heads, group_size, max(num_rows, 64), head_dim)
    starts = tuple(start for start in (0, 1024, 3072) if start < num_rows)
    index = make_sketch(q, k[:, :num_rows], v[:, :num_rows], segment_starts=starts, **sizes)
    queries = np.ascontiguousarray(q[:, :64].swapaxes(0, 1))
    queries.flags.writeable = False
    return index, queries


class Searched:
    """A search of one layer, followed by attention to the rest."""

    def __init__(
        self,
        indexes: list[SketchIndex],
        q: np.ndarray,  # [batch_size, num_q_heads, head_dim]
        context_ids: list[int],
        config: SearchConfig = CONFIG,
        scale: float = SCALE,
        dtype: torch.dtype = torch.float32,
        top_ks: list[int] | None = None,  # of each row of the batch
    ) -> None:
        self.shape = shape_of(indexes[0], q.shape[1])
        longest = max(index.context_len for index in indexes)
        most_segments = max(index.num_segments for index in indexes)
        self.loaded = loaded = DeviceIndexes(1, len(indexes), config, DEVICE, most_segments)
        for number, index in enumerate(indexes):
            loaded.load(number, index.context_len, [to_device(index, DEVICE)])
        self.search = search = DeviceSearch(
            self.shape,
            batch_size=len(q),
            max_context_len=longest,
            softmax_scale=scale,
            query_dtype=dtype,
            device=DEVICE,
            max_segments=most_segments,
            sums_rest=True,
        )
        assert isinstance(search.scores, SketchPass)
        self.pass_over = search.scores
        self.out = make_device_selection(len(q), self.shape.num_index_heads, config.top_k(longest), DEVICE)
        self.out.kv_indices.fill_(-(2**30))
        ids = torch.tensor(context_ids, dtype=torch.int32, device=DEVICE)
        of_rows = None if top_ks is None else torch.tensor(top_ks, dtype=torch.int32, device=DEVICE)
        search.search(torch.tensor(q, dtype=dtype, device=DEVICE), loaded, 0, ids, self.out, of_rows)
        shares = self.num_shares
        num_units, heads = len(q) * self.shape.num_index_heads * shares, self.shape.group_size // shares
        self.posted = torch.full((num_units, REST_PARTS + 2, heads, self.shape.head_dim + 4), torch.nan, device=DEVICE)
        search.scores.attend_rest(loaded, 0, ids, self.out, self.posted, REST_PARTS)

    @property
    def num_shares(self) -> int:
        return num_shares(self.shape.group_size, self.shape.head_dim, torch.bfloat16, "sketch")

    def scores(self, row: int, q_head: int, num_keys: int) -> np.ndarray:
        query = row * self.shape.num_index_heads * self.shape.group_size + q_head
        of_query = self.pass_over._scores.view(-1, self.pass_over.max_keys)[query, :num_keys]
        return of_query.cpu().numpy().view(np.uint16).astype(np.int32) - 32768

    def selection(self, row: int) -> Selection:
        return Selection(self.out.kv_indices[row].cpu().numpy(), self.out.valid_len[row].cpu().numpy())

    def rest(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the rest's out [num_q_heads, head_dim] and lse [num_q_heads]: its parts, merged as by attend_step."""
        parts = self.posted.cpu().double().numpy()
        assert np.isnan(parts[:, :2]).all(), "parts of attention to other rows were written"
        units = self.shape.num_index_heads * self.num_shares
        of_row = parts[row * units : (row + 1) * units, 2:].swapaxes(1, 2)  # [units, heads, parts, head_dim + 4]
        values, tops, sums = (of_row[..., : self.shape.head_dim], of_row[..., -4], of_row[..., -3])
        top = tops.max(-1, keepdims=True)
        weights = np.where(tops == -np.inf, 0.0, np.exp2(tops - np.where(top == -np.inf, 0.0, top)))
        total = (weights * sums).sum(-1)
        with np.errstate(divide="ignore", invalid="ignore"):
            out = np.where(total[..., None] > 0, (weights[..., None] * values).sum(-2) / total[..., None], 0.0)
            lse = (np.log2(total) + top[..., 0]) * np.log(2)
        return out.reshape(-1, out.shape[-1]), np.where(total > 0, lse, -np.inf).reshape(-1)


def wanted(q: np.ndarray, index: SketchIndex, config: SearchConfig = CONFIG, scale: float = SCALE) -> Selection:
    want = empty_token_selections(1, index.num_heads, config.top_k(index.context_len))[0]
    reference.search(q, index, None, want.kv_indices.shape[1], config.sink_len, config.window_len, scale, want)
    return want


def assert_right(
    got: Selection, q: np.ndarray, index: SketchIndex, config: SearchConfig = CONFIG, scale: float = SCALE
) -> None:
    """Require the definition's choice, bit for bit on every device."""
    want = wanted(q, index, config, scale)
    np.testing.assert_array_equal(got.valid_len, want.valid_len)
    check_selection(got, index.context_len)
    most = want.kv_indices.shape[1]
    np.testing.assert_array_equal(got.kv_indices[:, :most], want.kv_indices)
    assert (got.kv_indices[:, most:] == -1).all()


def assert_scores_are_right(searched: "Searched", q: np.ndarray, index: SketchIndex, scale: float = SCALE) -> None:
    """Compare the scores of the batch's first row with the definition's."""
    group_size = len(q) // index.num_heads
    for head in range(index.num_heads):
        of_head = range(head * group_size, (head + 1) * group_size)
        want = score_group(q[of_head], index, head, scale)[2]
        got = np.stack([searched.scores(0, q_head, index.context_len) for q_head in of_head])
        np.testing.assert_array_equal(got, want)


def assert_rest_is_right(
    searched: Searched,
    row: int,
    q: np.ndarray,
    index: SketchIndex,
    config: SearchConfig = CONFIG,
    scale: float = SCALE,
) -> None:
    """Compare attention to the rows that the device left unchosen.

    Weights are rounded to bfloat16. The chosen rows are subtracted from sums over all rows, so the tolerance is
    relative to these sums.
    """
    may_be_chosen = np.zeros((index.num_heads, index.context_len), bool)
    may_be_chosen[:, min(config.sink_len, index.context_len) : max(0, index.context_len - config.window_len)] = True
    is_rest, chosen = may_be_chosen.copy(), searched.selection(row)
    for head in range(index.num_heads):
        is_rest[head, chosen.kv_indices[head, : chosen.valid_len[head]]] = False
    want_out, want_lse = attend_rest(q, index, is_rest, scale)
    _, of_all = attend_rest(q, index, may_be_chosen, scale)
    out, lse = searched.rest(row)
    some = of_all > -np.inf
    shares, want_shares = np.exp(lse[some] - of_all[some]), np.exp(want_lse[some] - of_all[some])
    np.testing.assert_allclose(shares, want_shares, rtol=4e-3, atol=1e-5)
    assert (lse[~some] == -np.inf).all()
    error = np.abs(out[some] - want_out[some]).max(1, initial=0) * want_shares
    assert (error < 5e-3 * max(np.abs(want_out).max(), 1e-9)).all(), f"attention to the rest is off by {error}"


@pytest.mark.parametrize("num_rows", [1, 21, 511, 513, 1000, 1024, 1025, 4097])
def test_search_and_rest_agree_with_their_definitions(num_rows: int) -> None:
    index, q = make_index(num_rows)
    searched = Searched([index], q[:1], [0])
    assert_scores_are_right(searched, q[0], index)
    assert_right(searched.selection(0), q[0], index)
    assert_rest_is_right(searched, 0, q[0], index)


SHAPES = [(1, 64, 2, 2), (3, 96, 3, 3), (4, 128, 4, 4), (5, 24, 1, 0), (7, 80, 2, 1), (16, 256, 8, 8), (8, 512, 16, 16)]


@pytest.mark.parametrize(("group_size", "head_dim", "num_fine", "num_coarse"), SHAPES)
def test_all_head_and_group_sizes_agree_with_the_definitions(
    group_size: int, head_dim: int, num_fine: int, num_coarse: int
) -> None:
    index, q = make_index(1200, 2, group_size, head_dim, num_fine=num_fine, num_coarse=num_coarse)
    searched = Searched([index], q[:1], [0])
    assert_scores_are_right(searched, q[0], index)
    assert_right(searched.selection(0), q[0], index)
    assert_rest_is_right(searched, 0, q[0], index)


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 20.0])
@pytest.mark.parametrize("keep", [0.001, 0.3, 1.0])
def test_flat_and_peaked_softmaxes_agree_with_the_definitions(scale: float, keep: float) -> None:
    index, q = make_index(2100, 1)
    config = SearchConfig(keep=keep, sink_len=0, window_len=1)
    searched = Searched([index], q[:1], [0], config, scale)
    assert_right(searched.selection(0), q[0], index, config, scale)
    assert_rest_is_right(searched, 0, q[0], index, config, scale)


@pytest.mark.parametrize(
    ("keys_of_block", "group_size", "scale", "keep"),
    [(1000, 1, 0.1, 0.02), (1000, 4, 0.1, 0.3), (1000, 4, 20.0, 0.7), (300, 3, 1e-4, 0.05)],
)
def test_a_choice_made_by_several_blocks_agrees_with_the_definition(
    keys_of_block: int, group_size: int, scale: float, keep: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sketch_pass, "LEAST_CHOOSING_KEYS", keys_of_block)
    monkeypatch.setattr(sketch_pass, "multiprocessors", lambda device: 16)
    index, q = make_index(3700, 2, group_size)
    config = SearchConfig(keep=keep, sink_len=4, window_len=16)
    searched = Searched([index], q[:1], [0], config, scale)
    assert searched.pass_over._choosing == min(8, -(-4096 // keys_of_block))
    assert_right(searched.selection(0), q[0], index, config, scale)


def test_choices_by_several_blocks_step_after_step_agree_with_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """More steps than what blocks tell each other has numbers for, with idle ones between."""
    monkeypatch.setattr(sketch_pass, "LEAST_CHOOSING_KEYS", 400)
    monkeypatch.setattr(sketch_pass, "multiprocessors", lambda device: 16)
    index, q = make_index(1100, 1, 2)
    searched = Searched([index], q[:1], [0])
    assert searched.pass_over._choosing > 2
    for step in range(1, 20):
        ids = torch.tensor([-1 if step % 4 == 3 else 0], dtype=torch.int32, device=DEVICE)
        queries = torch.tensor(q[step : step + 1], dtype=torch.float32, device=DEVICE)
        searched.search.search(queries, searched.loaded, 0, ids, searched.out)
        if ids >= 0:
            assert_right(searched.selection(0), q[step], index)


def test_a_search_beside_another_has_no_blocks_that_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketch_pass, "multiprocessors", lambda device: 132)
    sizes: dict[str, Any] = {"batch_size": 1, "max_context_len": 1 << 20, "max_segments": 128, "softmax_scale": SCALE}
    sizes |= {"query_dtype": torch.bfloat16, "device": torch.device("meta"), "keeps_scores": True, "sums_rest": True}
    shape = SketchShape(num_index_heads=8, group_size=4, head_dim=128, num_fine=4, num_coarse=4)
    alone, beside = (SketchPass(shape, **sizes, beside=beside) for beside in (False, True))
    assert alone._choosing > 1 and alone._chooses_alone and alone._choosing_threads == 1024
    assert beside._choosing == 1 and not beside._chooses_alone and beside._choosing_threads == 512


def test_a_choice_by_a_block_with_many_keys_agrees_with_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketch_pass, "MANY_KEYS", 1024)
    index, q = make_index(3700)
    assert_right(Searched([index], q[:1], [0]).selection(0), q[0], index)


@pytest.mark.large_gpu
def test_a_transform_of_256_dimensions_is_staged_whole_in_shared_memory() -> None:
    """On Hopper, the transform of all coordinates of 256 dimensions fits in shared memory."""
    index, q = make_index(100, 1, 1, 256, num_fine=16, num_coarse=8)
    assert Searched([index], q[:1], [0]).pass_over._staged_bytes == 128 << 10


@pytest.mark.parametrize(("group_size", "head_dim"), [(16, 256), (8, 512)])
def test_wide_heads_on_a_small_gpu_agree_with_the_definition(as_ampere, group_size: int, head_dim: int) -> None:
    index, q = make_index(1100, 1, group_size, head_dim, num_fine=8, num_coarse=8)
    searched = Searched([index], q[:1], [0])
    assert_scores_are_right(searched, q[0], index)
    assert_right(searched.selection(0), q[0], index)


def test_a_small_gpu_uses_fewer_warps_and_agrees_with_the_definitions(as_ampere: None) -> None:
    """It runs with fewer warps: each warp's counts for 16 queries take much of a thread block's shared memory."""
    index, q = make_index(4200)
    searched = Searched([index], q[:4], [0] * 4)
    assert searched.pass_over._pass_warps < sketch_pass.PASS_WARPS
    for row in range(4):
        assert_right(searched.selection(row), q[row], index)
        assert_rest_is_right(searched, row, q[row], index)


@pytest.mark.parametrize("keep", [0.004, 0.0051, 0.02])
def test_marked_rows_are_chosen_first_where_they_are_few(keep: float) -> None:
    index, q = make_index(4200)
    config = SearchConfig(keep=keep, sink_len=4, window_len=16)
    searched = Searched([index], q[:1], [0], config)
    assert_right(searched.selection(0), q[0], index, config)
    marked = np.flatnonzero(index.marked_rows(1)[4:-16]) + 4
    assert set(marked) <= set(searched.selection(0).kv_indices[1]) or not index.uses_marks(config.top_k(4200))
    assert_rest_is_right(searched, 0, q[0], index, config)


def test_each_row_of_a_batch_chooses_with_its_own_top_k() -> None:
    """Each row chooses as it would alone: marks count where its own top_k is large enough for them."""
    index, q = make_index(4200)
    num_marked = int(index.marked_rows(0).sum())
    top_ks = [1, 2 * num_marked - 1, 2 * num_marked, 2**31 - 1]
    searched = Searched([index], q[:4], [0] * 4, top_ks=top_ks)
    for row, top_k in enumerate(top_ks):
        want = empty_token_selections(1, index.num_heads, min(top_k, CONFIG.top_k(4200)))[0]
        rules = CONFIG.sink_len, CONFIG.window_len, SCALE
        reference.search(q[row], index, None, want.kv_indices.shape[1], *rules, want)
        got = searched.selection(row)
        np.testing.assert_array_equal(got.valid_len, want.valid_len)
        np.testing.assert_array_equal(got.kv_indices[:, : want.kv_indices.shape[1]], want.kv_indices)
        assert_rest_is_right(searched, row, q[row], index)


def test_group_scores_too_large_for_shared_memory_give_the_defined_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketch_pass, "CHOOSING_BYTES", limits().block_bytes - 1024)
    index, q = make_index(3700)
    searched = Searched([index], q[:2], [0, 0])
    assert_right(searched.selection(0), q[0], index)
    assert_right(searched.selection(1), q[1], index)


def test_attention_to_the_rest_has_the_same_bits_after_a_separate_pass() -> None:
    index, q = make_index(2100)
    searched = Searched([index], q[:3], [0, -1, 0])
    loaded = DeviceIndexes(1, 1, CONFIG, DEVICE, index.num_segments)
    loaded.load(0, 2100, [to_device(index, DEVICE)])
    alone = SketchPass(
        searched.shape,
        batch_size=3,
        max_context_len=2100,
        max_segments=index.num_segments,
        softmax_scale=SCALE,
        query_dtype=torch.float32,
        device=DEVICE,
        keeps_scores=False,
        sums_rest=True,
    )
    ids, posted = (
        torch.tensor([0, -1, 0], dtype=torch.int32, device=DEVICE),
        torch.full_like(searched.posted, torch.nan),
    )
    alone.run(torch.from_numpy(q[:3].copy()).to(DEVICE), loaded, 0, ids)
    alone.attend_rest(loaded, 0, ids, searched.out, posted, REST_PARTS)
    assert torch.equal(posted[:, 2:], searched.posted[:, 2:])


def test_attention_to_the_rest_is_empty_if_all_rows_are_chosen() -> None:
    index, q = make_index(1500)
    searched = Searched([index], q[:1], [0], SearchConfig(keep=1.0, window_len=16))
    out, lse = searched.rest(0)
    assert not out.any() and (lse == -np.inf).all()


@pytest.mark.parametrize("group_size", [1, 4])
@pytest.mark.parametrize("distinct_keys", [1, 37])
def test_equal_keys_are_chosen_in_order(distinct_keys: int, group_size: int, rng: np.random.Generator) -> None:
    q, k, v = make_heads(rng, 2, group_size, 1100, 32)
    at = np.arange(1100) % distinct_keys
    index = make_sketch(q, k[:, at], v[:, at])
    got = Searched([index], q[None, :, 0], [0]).selection(0)
    np.testing.assert_array_equal(got.kv_indices, wanted(q[:, 0], index).kv_indices)


def test_a_row_does_not_depend_on_its_batch() -> None:
    made = [make_index(num_rows, seed=num_rows) for num_rows in (2000, 129, 4200)]
    indexes = [index for index, _ in made]
    context_ids = [2, -1, 0, 1, 0, 2, 2, 2, 2, 0]
    q = np.stack([made[max(0, context)][1][row] for row, context in enumerate(context_ids)])
    together = Searched(indexes, q, context_ids)
    for row, context in enumerate(context_ids):
        got = together.selection(row)
        if context < 0:
            assert (got.valid_len == 0).all() and (got.kv_indices == -1).all()
            assert (together.rest(row)[1] == -np.inf).all()
            continue
        assert_right(got, q[row], indexes[context])
        assert_rest_is_right(together, row, q[row], indexes[context])
        alone = Searched([indexes[context]], q[row : row + 1], [0])
        top_k = alone.out.kv_indices.shape[2]
        np.testing.assert_array_equal(got.kv_indices[:, :top_k], alone.selection(0).kv_indices)
        assert (got.kv_indices[:, top_k:] == -1).all()
        heads = slice(row * 2, row * 2 + 2)
        assert torch.equal(together.posted[heads, 2:], alone.posted[:, 2:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_queries_are_searched_without_further_rounding(dtype: torch.dtype) -> None:
    index, q = make_index(1500)
    rounded = torch.tensor(q[:1], dtype=dtype).float().numpy()
    searched = Searched([index], q[:1], [0], dtype=dtype)
    assert_scores_are_right(searched, rounded[0], index)
    assert_right(searched.selection(0), rounded[0], index)


@pytest.mark.parametrize("fault", [0.0, np.nan, np.inf, 1e36, 1e-30])
def test_zero_nan_infinite_and_extreme_queries_give_the_defined_choice(fault: float) -> None:
    index, q = make_index(1500)
    q = q.copy()
    q[0, 0] = fault if np.isfinite(fault) else q[0, 0]
    q[0, 5, 3] = fault
    searched = Searched([index], q[:1], [0])
    got = searched.selection(0)
    check_selection(got, 1500)
    assert (got.valid_len == CONFIG.top_k(1500)).all()
    with np.errstate(all="ignore"):
        assert_scores_are_right(searched, q[0], index)
        assert_right(got, q[0], index)


def test_a_context_of_many_segments_agrees_with_the_definitions() -> None:
    rng = np.random.default_rng(3)
    q, k, v = make_heads(rng, 1, 2, 9000, 16)
    index = make_sketch(q, k, v, 1, 0, tuple(range(0, 9000, 1024)))
    assert index.num_segments == 9
    searched = Searched([index], q[None, :, 0], [0])
    assert_right(searched.selection(0), q[:, 0], index)
    assert_rest_is_right(searched, 0, q[:, 0], index)


def test_unsupported_shapes_and_too_many_segments_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most 16"):
        SketchShape(num_index_heads=2, group_size=17, head_dim=64, num_fine=2, num_coarse=2)
    index, _ = make_index(1500)
    with pytest.raises(ConfigError, match="has 2 segments, the search was planned for 1"):
        DeviceIndexes(1, 1, CONFIG, DEVICE, 1).load(0, 1500, [to_device(index, DEVICE)])


def test_every_entry_of_a_selection_is_written(rng: np.random.Generator) -> None:
    index, q = make_index(700)
    out: DeviceSelection = Searched([index], q[:2], [0, -1]).out
    assert int(out.kv_indices.min()) == -1
