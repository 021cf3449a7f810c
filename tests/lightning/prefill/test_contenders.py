"""A choice from contenders equals the choice from all scores; queries whose choice may be wrong are marked.

Without a GPU, CUDA C is compiled for the CPU, so sizes and lists are tiny.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bench.lightning.awkward import KINDS, make_operands
from csattn.lightning import Operands, causal_lens, score_keys, top_k_reference
from csattn.lightning.prefill import contenders, stream
from csattn.lightning.prefill.contenders import MAX_CAPACITY, Contenders, Sampling
from csattn.lightning.score import hopper
from tests.cuda_on_cpu import emulated
from tests.cuda_on_cpu.emulated import DEVICE

HEADS, HEAD_DIM, NUM_KEYS = 64, 64, 600
NO_THRESHOLD = 2**31 - 1  # a threshold index that means: all keys reach it
SAMPLING = Sampling(step=2, wanted=9, capacity=160)


@pytest.fixture(autouse=True)
def kernels(emulator: emulated.Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("this device has not what these kernels are written in")
    monkeypatch.setattr(contenders, "THREADS", 64)
    monkeypatch.setattr(contenders, "MIN_THRESHOLD_THREADS", 64)
    emulator.stand_in(monkeypatch, contenders, hopper, multiprocessors=2)


def made_operands(kind: str, num_queries: int, num_keys: int = NUM_KEYS, key_scale: bool = False) -> Operands:
    return make_operands(kind, num_queries, num_keys, HEADS, HEAD_DIM, torch.float16, key_scale)


def to_device(operands: Operands) -> Operands:
    arrays = operands.q, operands.k, operands.weights, operands.key_scale
    return Operands(*(None if array is None else array.to(DEVICE) for array in arrays))  # type: ignore[arg-type]


def choose(operands: Operands, k: int, lens: Tensor, sampling: Sampling = SAMPLING) -> tuple[Tensor, Tensor]:
    """Return the chosen indices, and which queries are marked."""
    num_queries = len(operands.q)
    indices = torch.full((num_queries, k), -7, dtype=torch.int32, device=DEVICE)
    overflowed = torch.full((num_queries,), -1, dtype=torch.int32, device=DEVICE)
    lens = lens.to(DEVICE)
    made = Contenders(num_queries, len(operands.k), sampling, DEVICE)
    made.choose(to_device(operands), lens, hopper.tile_max_lens(lens, HEADS), indices, overflowed)
    return indices.cpu(), overflowed.cpu() > 0


def all_scores(operands: Operands, lens: Tensor) -> Tensor:
    num_keys = len(operands.k)
    out = torch.zeros(len(operands.q), -(-num_keys // 64) * 64, device=DEVICE)
    hopper.write_scores(to_device(operands), range(num_keys), hopper.tile_max_lens(lens.to(DEVICE), HEADS), out)
    return out[:, :num_keys].cpu()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # from Triton's interpreter (numpy)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", [2, 4])
def test_choices_from_contenders_equal_those_from_all_scores(kind: str, step: int) -> None:
    operands = made_operands(kind, 4, key_scale=kind == "random")
    lens = torch.tensor([0, 139, 430, 600], dtype=torch.int32)
    indices, marked = choose(operands, 10, lens, Sampling(step, 6 if step == 4 else 9, 240))
    scores = all_scores(operands, lens) if kind == "random" else score_keys(operands)
    want = top_k_reference(scores, 10, lens)
    assert torch.equal(indices[~marked], want[~marked])
    assert not marked[:2].any(), "lists hold all that these queries may see"
    assert not marked.any() or kind in ("random", "one bin", "nan and inf")


def test_an_overflowing_list_marks_only_its_query() -> None:
    """The keys outside the sample score above those in it, and they exceed the lists' capacity."""
    operands = made_operands("equal", 3)
    operands.k[1::2, 0] = 2
    lens = torch.tensor([600, 160, 600], dtype=torch.int32)
    indices, marked = choose(operands, 10, lens)
    assert marked.tolist() == [True, False, True]
    assert torch.equal(indices[1:2], top_k_reference(score_keys(operands), 10, lens)[1:2])


def test_a_threshold_that_too_few_keys_reach_marks_its_query() -> None:
    """The sample scores above all other keys, and the threshold is its fourth best score, but ten keys are wanted."""
    operands = made_operands("equal", 1)
    operands.k[::2, 0] = 2
    _, marked = choose(operands, 10, torch.tensor([600], dtype=torch.int32), Sampling(step=2, wanted=4, capacity=160))
    assert marked.all()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # from Triton's interpreter (numpy)
def test_nan_scores_do_not_reach_a_threshold() -> None:
    operands = made_operands("ascending", 1)
    operands.k[1:100:2, 0] = torch.nan
    lens = torch.tensor([600], dtype=torch.int32)
    indices, marked = choose(operands, 10, lens)
    assert not marked.any()
    assert torch.equal(indices, top_k_reference(score_keys(operands), 10, lens))


def test_equal_scores_in_the_last_bin_are_ordered_by_index() -> None:
    """The bits of the best score are 2047 << 13 above the others': so many bins there are, less one."""
    operands, lens = made_operands("equal", 1), torch.tensor([10], dtype=torch.int32)
    operands.k[4, 0] *= 3.998046875
    distance = score_keys(operands)[0, 4:6].view(torch.int32)
    assert distance[0] - distance[1] == 2047 << 13
    indices, _ = choose(operands, 10, lens)
    assert indices.tolist() == [[4, 0, 1, 2, 3, 5, 6, 7, 8, 9]]


@pytest.mark.parametrize("k", [10, 100])
def test_choices_are_exact_for_numbers_of_keys_around_k(k: int) -> None:
    operands = made_operands("few values", 4, 300)
    lens = torch.tensor([1, k, k + 1, 300], dtype=torch.int32)
    indices, marked = choose(operands, k, lens, Sampling(2, 60, 280))
    assert not marked.any()
    assert torch.equal(indices, top_k_reference(score_keys(operands), k, lens))


def test_memory_of_earlier_queries_is_not_read() -> None:
    made = Contenders(3, 300, SAMPLING, DEVICE)
    out, overflowed = torch.empty(3, 10, dtype=torch.int32, device=DEVICE), torch.zeros(3, dtype=torch.int32)
    for seed, num_queries in enumerate((3, 2)):
        torch.manual_seed(seed)
        operands = made_operands("one bin", num_queries, 300)
        lens = causal_lens(num_queries, 300, first_position=270)
        rows, on_device = slice(0, num_queries), lens.to(DEVICE)
        tile_max_lens = hopper.tile_max_lens(on_device, HEADS)
        made.choose(to_device(operands), on_device, tile_max_lens, out[rows], overflowed[rows].to(DEVICE))
        assert torch.equal(out[rows].cpu(), top_k_reference(score_keys(operands), 10, lens))


@pytest.mark.parametrize("step", [1, 2])
def test_keys_below_the_threshold_are_not_listed(step: int) -> None:
    """Ties after the threshold's index are below it. In whole blocks, every step-th key, the sample, is left out."""
    operands = made_operands("few values", 2, 200)
    scores, lens = score_keys(operands), torch.tensor([200, 150], dtype=torch.int32)
    threshold_scores = torch.tensor([2.0 * HEADS, torch.nan])
    threshold_indices = torch.tensor([30, NO_THRESHOLD], dtype=torch.int32)
    lists = torch.full((2, 200), -1, dtype=torch.int64, device=DEVICE)
    counts = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    threshold, on_device = (threshold_scores.to(DEVICE), threshold_indices.to(DEVICE)), lens.to(DEVICE)
    tile_max_lens = hopper.tile_max_lens(on_device, HEADS)
    hopper.list_contenders(to_device(operands), tile_max_lens, on_device, step, *threshold, lists, counts)
    index = torch.arange(200)
    left_out = (index % 2 == 0) & (index < 128) if step == 2 else index < 0
    for row in range(2):
        tied = (scores[row] == threshold_scores[row]) & (index <= threshold_indices[row])
        reaches = (scores[row] > threshold_scores[row]) | tied | (threshold_indices[row] == NO_THRESHOLD)
        want = index[reaches & (index < lens[row]) & ~left_out]
        entries = lists[row].cpu()[: counts[row]]
        assert sorted((entries & 0xFFFFFFFF).tolist()) == want.tolist()
        found = (entries >> 32).to(torch.int32).view(torch.float32)
        assert torch.equal(found, scores[row][entries & 0xFFFFFFFF])


@pytest.mark.parametrize(("sample_len", "wanted"), [(96, 9), (96, 70), (1500, 100)])
def test_a_threshold_is_reached_by_the_wanted_number_plus_an_eighth_at_most(sample_len: int, wanted: int) -> None:
    """At most an eighth more reach it, and they begin the list. Where the threshold would be NaN, no key reaches it."""
    values = torch.randn(6, sample_len)
    values[1] = values[1].round()
    values[2] = torch.tensor([0.0, -0.0])[torch.arange(sample_len) % 2]
    values[3, : sample_len - wanted + 1] = torch.nan
    values[4, ::3], values[4, 1::3] = torch.inf, -torch.inf
    values[5, sample_len // 2 :] = torch.nan  # past the legal length
    legal = torch.full((6,), 2 * sample_len, dtype=torch.int32)
    legal[5] = sample_len // 2 * 2 - 1
    rows = torch.cat((values, torch.empty_like(values)), dim=1).view(torch.int64).to(DEVICE)
    counts, threshold_indices = (torch.full((6,), -7, dtype=torch.int32, device=DEVICE) for _ in range(2))
    threshold_scores, sizes = torch.empty(6, device=DEVICE), map(np.uint32, (0, 1, 2, 2, wanted))
    kernel, threads = contenders._thresholds_kernel(sample_len)
    on_device = legal.to(DEVICE)
    kernel.launch(
        (6, 1, 1), threads, rows, on_device, on_device, counts, threshold_scores, threshold_indices, sample_len, *sizes
    )
    for row in range(6):
        seen = values[row, : sample_len // 2 if row == 5 else sample_len]
        places = torch.arange(len(seen))
        threshold, last = threshold_scores[row].cpu(), int(threshold_indices[row])
        reach = places[(seen > threshold) | ((seen == threshold) & (2 * places <= last))]
        if int((~seen.isnan()).sum()) < wanted:
            assert counts[row] == 1 and threshold == torch.inf and last == -1
            continue
        assert counts[row] == len(reach) and wanted <= len(reach) <= wanted + wanted // 8
        entries = rows[row, : len(reach)].cpu()
        assert sorted((entries & 0xFFFFFFFF).tolist()) == (2 * reach).tolist()
        assert torch.equal((entries >> 32).to(torch.int32).view(torch.float32), seen[(entries & 0xFFFFFFFF) // 2])


@given(st.integers(1, stream._MOST_KEYS), st.sampled_from([1, 64, 512, 1024, 2048]))
def test_list_capacities_hold_the_expected_number_of_contenders(num_keys: int, k: int) -> None:
    sampling = Sampling.of(num_keys, k)
    assert sampling.wanted >= k / sampling.step + 5 * math.sqrt(k / sampling.step)
    assert sampling.capacity >= 1.125 * sampling.wanted * sampling.step + 64 * sampling.step
    assert sampling.capacity >= 2 * k
    assert sampling.capacity <= MAX_CAPACITY
    assert sampling.sample_len(num_keys) <= MAX_CAPACITY


@pytest.mark.skipif(DEVICE.type == "cuda", reason="on a GPU, all of it is tested below")
def test_marked_queries_are_chosen_again_from_all_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries are processed four at a time, except for the first tile."""
    monkeypatch.setattr(Sampling, "of", lambda *arguments: SAMPLING)
    monkeypatch.setattr(contenders, "num_multiprocessors", lambda device: 1)
    operands = made_operands("equal", 9)
    operands.k[1::2, 0] = 2
    lens = torch.tensor([600, 40, 12, 600, 9, 100, 160, 0, 1], dtype=torch.int32)
    workspace_bytes = 5 * (8 * SAMPLING.capacity + 12)
    _, overflowed_queries = stream.choose_from_contenders(operands, 10, lens, workspace_bytes)
    assert overflowed_queries.tolist() == [0, 3]
    got = stream.choose_by_contenders(operands, 10, lens, workspace_bytes)
    assert torch.equal(got, top_k_reference(score_keys(operands), 10, lens))


@pytest.mark.parametrize(("workspace_bytes", "queries"), [(256 << 20, 16368), (64 << 20, 3696), (1 << 20, 60), (1, 4)])
def test_queries_at_a_time_fill_the_device_in_whole_multiples_or_are_one_tile(
    workspace_bytes: int, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contenders, "num_multiprocessors", lambda device: 132)
    operands = make_operands("random", 1, 16384, 64, 8, torch.float16)
    sampling = Sampling.of(16384, 512)
    assert sampling == Sampling(step=8, wanted=108, capacity=2048)
    filling, room = contenders.queries_at_a_time(operands, sampling, workspace_bytes)
    assert room == queries
    assert room % filling == 0 and filling in (4, 132 * 4)


@given(st.integers(0, 40_000), st.sampled_from([1, 4, 16]), st.integers(1, 140), st.integers(1, 30))
def test_query_tiles_cover_all_queries_and_fit_the_workspace(
    num_queries: int, query_tile: int, tiles: int, fillings: int
) -> None:
    """Every tile but that of the first queries fills the device a whole number of times."""
    filling = tiles * query_tile
    cut = stream._cut_queries(num_queries, query_tile, filling, fillings * filling)
    assert [query for rows in reversed(cut) for query in rows] == list(range(num_queries))
    for rows in cut:
        assert 0 < len(rows) <= fillings * filling and rows.start % query_tile == 0
        assert rows.start == 0 or -(-len(rows) // query_tile) * query_tile % filling == 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 512, 1024, 2048])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_choices_from_contenders_on_the_gpu_equal_those_from_all_scores(
    kind: str, k: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    made = make_operands(kind, 700, 20_001, 64, 128, key_scale=True)
    operands = to_device(Operands(made.q.to(dtype), made.k.to(dtype), made.weights, made.key_scale))
    lens = causal_lens(700, 20_001, ratio=1, first_position=19_500)
    want = stream.choose_scored(operands, k, lens, 1 << 28)
    for workspace_bytes in (1 << 20, 1 << 28):
        assert torch.equal(stream.choose_by_contenders(operands, k, lens, workspace_bytes), want)
