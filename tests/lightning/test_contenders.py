"""What is chosen from contenders is what is chosen from all scores; what cannot be trusted is marked.

Without a GPU, Triton's kernel runs as Python and CUDA C is compiled for the CPU: sizes are tiny, and so are lists.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton, whose interpreter runs these kernels on a CPU, is not installed")

from hypothesis import given
from hypothesis import strategies as st

from bench.lightning.awkward import KINDS, make_operands
from csattn.errors import ConfigError
from csattn.lightning import contenders, stream
from csattn.lightning.contenders import Contenders, Lists
from csattn.lightning.order import top_k_reference
from csattn.lightning.score import Operands, causal_lens, score_keys
from csattn.lightning.score_kernels import KeyTiles, TileShape, append_contenders, score_tile
from csattn.lightning.stream import choose_keys
from tests.cuda_on_cpu import emulated
from tests.cuda_on_cpu.emulated import DEVICE

SMALL = TileShape(columns=8, keys=16, num_warps=4, num_stages=2)
LISTS = Lists(lanes=16, depth=5, growth=2)


@pytest.fixture(autouse=True)
def kernels(emulator: emulated.Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "THREADS", 64)
    emulator.stand_in(monkeypatch, contenders)


def to_device(operands: Operands) -> Operands:
    arrays = operands.q, operands.k, operands.weights, operands.key_scale
    return Operands(*(None if array is None else array.to(DEVICE) for array in arrays))  # type: ignore[arg-type]


def choose(operands: Operands, k: int, lens: Tensor, lists: Lists) -> tuple[Tensor, Tensor]:
    """Indices, and which queries are marked."""
    num_queries = len(operands.q)
    indices = torch.full((num_queries, k), -7, dtype=torch.int32, device=DEVICE)
    overflowed = torch.zeros(num_queries, dtype=torch.int32, device=DEVICE)
    made = Contenders(num_queries, k, lists, DEVICE)
    made.choose(to_device(operands), lens.to(DEVICE), int(lens.max()), indices, overflowed, SMALL)
    return indices.cpu(), overflowed.cpu() > 0


def all_scores(operands: Operands, lens: Tensor) -> Tensor:
    num_keys = len(operands.k)
    out = torch.zeros(len(operands.q), -(-num_keys // 16) * 16, device=DEVICE)
    score_tile(to_device(operands), range(num_keys), lens.to(DEVICE), out, SMALL)
    return out[:, :num_keys].cpu()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of numpy, which is the interpreter
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("growth", [2, 4])
def test_choices_are_those_of_all_scores(kind: str, growth: int) -> None:
    operands = make_operands(kind, 4, 130, 2, 32, torch.float16, key_scale=kind == "random")
    lens = torch.tensor([0, 5, 63, 130], dtype=torch.int32)
    indices, marked = choose(operands, 10, lens, replace(LISTS, growth=growth))
    scores = all_scores(operands, lens) if kind == "random" else score_keys(operands)
    want = top_k_reference(scores, 10, lens)
    assert torch.equal(indices[~marked], want[~marked])
    # contenders are few where scores are, whatever their order; NaN are contenders in every round
    assert not marked.any() or kind == "nan and inf"


def test_lists_that_overflow_mark_their_query_and_no_other() -> None:
    """Keys of the last round, every other tile, are all better than those before: more of them than lists hold."""
    operands = make_operands("equal", 3, 208, 2, 32, torch.float16)
    operands.k[16 * torch.arange(1, 13, 2)[:, None] + torch.arange(16), 0] = 2 + torch.rand(6, 16).half()
    lens = torch.tensor([208, 40, 208], dtype=torch.int32)
    indices, marked = choose(operands, 10, lens, LISTS)
    assert marked.tolist() == [True, False, True]
    assert torch.equal(indices[1:2], top_k_reference(score_keys(operands), 10, lens)[1:2])


@pytest.mark.parametrize("k", [10, 100])
def test_numbers_of_keys_around_k(k: int) -> None:
    operands = make_operands("few values", 4, 70, 2, 32, torch.float16)
    lens = torch.tensor([1, 10, 11, 70], dtype=torch.int32)
    indices, marked = choose(operands, k, lens, LISTS)
    assert not marked.any()
    assert torch.equal(indices, top_k_reference(score_keys(operands), k, lens))


def test_memory_of_earlier_queries_is_not_read() -> None:
    made = Contenders(3, 10, LISTS, DEVICE)
    out, overflowed = torch.empty(3, 10, dtype=torch.int32, device=DEVICE), torch.zeros(3, dtype=torch.int32)
    for seed, num_queries in enumerate((3, 2)):
        torch.manual_seed(seed)
        operands = make_operands("one bin", num_queries, 100, 2, 32, torch.float16)
        lens = causal_lens(num_queries, 100, first_position=70)
        rows = slice(0, num_queries)
        made.choose(to_device(operands), lens.to(DEVICE), 100, out[rows], overflowed[rows].to(DEVICE), SMALL)
        assert torch.equal(out[rows].cpu(), top_k_reference(score_keys(operands), 10, lens))


def test_keys_below_the_bar_are_not_written() -> None:
    """Of equal scores those after the bar's index are below it."""
    operands = make_operands("few values", 2, 64, 1, 32, torch.float16)
    scores, lens = score_keys(operands), torch.tensor([64, 50], dtype=torch.int32)
    bar_scores, bar_indices = torch.tensor([2.0, 1.0]), torch.tensor([30, 20], dtype=torch.int32)
    lists = torch.full((2, 4, 16), -1, dtype=torch.int64, device=DEVICE)
    counts = torch.full((2, 16), -1, dtype=torch.int32, device=DEVICE)
    bar = bar_scores.to(DEVICE), bar_indices.to(DEVICE)
    append_contenders(to_device(operands), lens.to(DEVICE), KeyTiles(1), *bar, lists, counts, SMALL)
    index = torch.arange(64)
    for row in range(2):
        tied = (scores[row] == bar_scores[row]) & (index <= bar_indices[row])
        want = index[((scores[row] > bar_scores[row]) | tied) & (index < lens[row])]
        entries = lists[row].cpu()[torch.arange(4)[:, None] < counts[row].cpu()]
        assert sorted((entries & 0xFFFFFFFF).tolist()) == want.tolist()
        found = (entries >> 32).to(torch.int32).view(torch.float32)
        assert torch.equal(found, scores[row][entries & 0xFFFFFFFF])


@given(st.integers(0, 1 << 19), st.sampled_from([1, 64, 512, 1024, 2048]))
def test_rounds_have_every_tile_once(num_keys: int, k: int) -> None:
    lists = Lists.for_k(k, 64)
    num_tiles = -(-num_keys // 64)
    seen: list[int] = []
    for number, tiles in enumerate(lists.rounds(num_keys)):
        every = range(0, num_tiles, tiles.step)
        mine = [tile for place, tile in enumerate(every) if not tiles.skipped or place % tiles.skipped]
        assert number or len(mine) <= lists.depth
        # as the kernel counts them
        count = len(every) - (-(-len(every) // tiles.skipped) if tiles.skipped else 0)
        numbers = range(count)
        assert mine == [(u + u // (tiles.skipped - 1) + 1 if tiles.skipped else u) * tiles.step for u in numbers]
        seen += mine
    assert sorted(seen) == list(range(num_tiles))


@pytest.mark.parametrize("k", [1, 64, 512, 1024, 2048])
def test_lists_fit_shared_memory_and_hold_twice_what_comes(k: int) -> None:
    lists = Lists.for_k(k, 64)
    assert 8 * (k + lists.lanes * lists.depth) + contenders.OTHER_SHARED_BYTES <= 227 << 10
    assert lists.lanes * lists.depth >= 2 * (lists.growth - 1) * k


@pytest.mark.skipif(DEVICE.type == "cuda", reason="on a GPU, all of it is tested below")
def test_queries_whose_lists_overflow_are_chosen_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at a time; those of many keys have too many contenders in the last round."""
    monkeypatch.setattr(contenders, "lists_for", lambda k, dtype: LISTS)
    monkeypatch.setattr(contenders, "num_multiprocessors", lambda device: 1)
    monkeypatch.setitem(contenders.TILE_SHAPES, torch.float16, replace(SMALL, columns=4))
    operands = make_operands("equal", 5, 208, 2, 32, torch.float16)
    operands.k[16 * torch.arange(1, 13, 2)[:, None] + torch.arange(16), 0] = 2 + torch.rand(6, 16).half()
    lens = torch.tensor([208, 40, 12, 208, 9], dtype=torch.int32)
    workspace_bytes = 3 * LISTS.row_bytes(10)
    _, unsure = stream.choose_listed(operands, 10, lens, workspace_bytes)
    assert unsure.tolist() == [0, 3]
    got = stream.choose_by_contenders(operands, 10, lens, workspace_bytes)
    assert torch.equal(got.indices, top_k_reference(score_keys(operands), 10, lens))


@pytest.mark.parametrize(("workspace_bytes", "fillings"), [(256 << 20, 7), (64 << 20, 1)])
def test_queries_fill_the_device_a_whole_number_of_times(
    workspace_bytes: int, fillings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contenders, "num_multiprocessors", lambda device: 132)
    operands = make_operands("random", 1, 1, 64, 8, torch.float16)
    assert contenders.queries_at_a_time(operands, 512, workspace_bytes) == fillings * 2 * 132 * 4
    assert contenders.queries_at_a_time(operands, 512, 1 << 20) == 28
    assert contenders.queries_at_a_time(operands, 512, 1) == 4


def test_where_contenders_cannot_be_listed_that_is_said() -> None:
    operands = make_operands("random", 3, 5)
    with pytest.raises(ConfigError, match=r"contenders are listed on a GPU.*on cpu, k 2.*leave list_contenders out"):
        choose_keys(operands, 2, torch.ones(3, dtype=torch.int32), list_contenders=True)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 512, 1024, 2048])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_contenders_on_the_gpu(kind: str, k: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "THREADS", 256)
    made = make_operands(kind, 700, 20_001, 64, 128, key_scale=True)
    operands = to_device(Operands(made.q.to(dtype), made.k.to(dtype), made.weights, made.key_scale))
    lens = causal_lens(700, 20_001, ratio=1, first_position=19_500)
    want = choose_keys(operands, k, lens, list_contenders=False).indices
    for workspace_bytes in (1 << 20, 1 << 28):
        got = choose_keys(operands, k, lens, workspace_bytes=workspace_bytes, list_contenders=True)
        assert torch.equal(got.indices, want)
