"""The streamed choice is the definition's, order included, however queries and keys are tiled."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench.lightning.awkward import KINDS, make_operands
from csattn.errors import ArrayError, ConfigError
from csattn.lightning import (
    Operands,
    causal_lens,
    choose_keys,
    score_all,
    score_keys,
    top_k_reference,
    v4_operands,
    v32_operands,
)
from csattn.lightning.prefill.stream import cut


def all_scores(operands: Operands) -> Tensor:
    return score_all(operands, torch.full((len(operands.q),), len(operands.k), dtype=torch.int32))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(data=st.data())
def test_choices_for_any_tiling_equal_the_definition(kind: str, data: st.DataObject) -> None:
    num_queries, num_keys = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 300))
    operands = make_operands(kind, num_queries, num_keys, key_scale=data.draw(st.booleans()))
    ratio = data.draw(st.sampled_from([1, 4, 128]))
    lens = causal_lens(num_queries, num_keys, ratio=ratio, first_position=data.draw(st.integers(0, 2 * num_keys)))
    k = data.draw(st.sampled_from([1, 2, 7, 64, 400]))
    scores = all_scores(operands)
    want = top_k_reference(scores, k, lens)
    tile = (data.draw(st.integers(1, num_queries)), data.draw(st.integers(1, num_keys)))
    cut_up = choose_keys(operands, k, lens, tile=tile)
    at_once = choose_keys(operands, k, lens)
    in_little = choose_keys(operands, k, lens, workspace_bytes=data.draw(st.integers(1, 40_000)))
    for choice in (cut_up, at_once, in_little):
        assert torch.equal(choice, want)
        assert choice.dtype == torch.int32


@pytest.mark.parametrize("kind", KINDS)
def test_scores_on_the_cpu_equal_the_definition(kind: str) -> None:
    operands = make_operands(kind, 9, 131, num_heads=3, head_dim=20, key_scale=True)
    torch.testing.assert_close(all_scores(operands), score_keys(operands), rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("version", ["v3.2", "v4"])
def test_choices_for_v32_and_v4_operands_equal_the_definition(version: str) -> None:
    q, k, projected = torch.randn(40, 4, 128), torch.randn(40, 128), torch.randn(40, 4)
    if version == "v4":
        operands, lens = v4_operands(q.bfloat16(), k[:10].bfloat16(), projected), causal_lens(40, 10, ratio=4)
    else:
        operands, lens = v32_operands(q, k, projected), causal_lens(40, 40)
    want = top_k_reference(all_scores(operands), 8, lens)
    assert torch.equal(choose_keys(operands, 8, lens, tile=(7, 3)), want)
    torch.testing.assert_close(all_scores(operands), score_keys(operands), rtol=1e-5, atol=1e-5)


def test_keys_past_the_legal_length_are_not_read() -> None:
    operands = make_operands("random", 5, 200)
    operands.k[100:] = torch.nan
    lens = torch.tensor([100, 0, 63, 64, -5], dtype=torch.int32)
    got = choose_keys(operands, 150, lens, tile=(2, 32))
    assert (got < 100).all()
    assert (got >= 0).sum(1).tolist() == [100, 0, 63, 64, 0]


def test_a_querys_choice_does_not_depend_on_other_queries() -> None:
    operands, lens = make_operands("random", 33, 170), causal_lens(33, 170, first_position=120)
    together = choose_keys(operands, 20, lens)
    for row in range(33):
        alone = choose_keys(operands.of_queries(slice(row, row + 1)), 20, lens[row : row + 1])
        assert torch.equal(alone[0], together[row])


@given(
    st.lists(st.integers(0, 5000), min_size=1, max_size=300),
    st.integers(1, 1 << 22),
    st.sampled_from(["cpu", "cuda"]),
)
def test_tiles_cover_all_queries_and_keys_and_fit_the_workspace(
    lens: list[int], workspace_bytes: int, device: str
) -> None:
    tiles = list(cut(torch.tensor(lens, dtype=torch.int32), workspace_bytes, torch.device(device)))
    assert tiles[0].queries.start == 0 and tiles[-1].queries.stop == len(lens)
    for before, after in pairwise(tiles):
        assert before.queries.stop == after.queries.start
    for tile in tiles:
        queries = range(tile.queries.start, tile.queries.stop)
        assert tile.num_keys == max(lens[tile.queries])
        # 64 queries or 128 keys are never split, even if they exceed the workspace
        assert 4 * tile.num_scores <= max(workspace_bytes, min(len(queries), 64) * 4 * 128)


def test_tiles_of_a_million_queries_fit_a_bounded_workspace() -> None:
    """For a million queries, tiles take at most 256 MiB and hold whole rows of up to 256K keys."""
    lens = causal_lens(1 << 20, 1 << 18, ratio=4)
    tiles = list(cut(lens, 256 << 20, torch.device("cuda")))
    assert max(tile.num_scores for tile in tiles) * 4 <= 256 << 20
    assert all(len(tile.key_ranges) <= 1 for tile in tiles)
    assert len(tiles) < 3000


@pytest.mark.parametrize(
    ("arguments", "error", "complaint"),
    [
        ({"k": 0}, ConfigError, "k is 0; wanted at least 1"),
        ({"k": 2.0}, ConfigError, "k is 2.0; wanted a whole number"),
        ({"workspace_bytes": 0}, ConfigError, "workspace_bytes is 0"),
        ({"tile": (0, 4)}, ConfigError, "tile's queries is 0; wanted at least 1"),
        ({"tile": (1,)}, ConfigError, r"tile is \(1,\); wanted two numbers, of queries and keys"),
        ({"tile": 5}, ConfigError, "tile is 5; wanted two numbers"),
        ({"legal_len": torch.zeros(3, dtype=torch.int64)}, ArrayError, "legal_len is int64; wanted int32"),
        ({"legal_len": torch.zeros(2, dtype=torch.int32)}, ArrayError, r"legal_len has shape \[2\]; wanted \[3\]"),
        ({"operands": Operands(torch.zeros(3, 8), torch.zeros(5, 8), torch.zeros(3, 2))}, ArrayError, "q has shape"),
    ],
)
def test_invalid_arguments_of_choose_keys_are_refused_with_the_reason(
    arguments: dict[str, object], error: type[Exception], complaint: str
) -> None:
    usual = {"operands": make_operands("random", 3, 5), "k": 2, "legal_len": torch.ones(3, dtype=torch.int32)}
    with pytest.raises(error, match=complaint):
        choose_keys(**{**usual, **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"k": torch.zeros(5, 4)}, r"k has shape \[5, 4\]; wanted \[num_keys, 8\]"),
        ({"weights": torch.zeros(2, 2)}, r"weights has shape \[2, 2\]; wanted \[3, 2\]"),
        ({"key_scale": torch.ones(1)}, r"key_scale has shape \[1\]; wanted \[5\]"),
        ({"legal_len": torch.ones(1, dtype=torch.int32)}, r"legal_len has shape \[1\]; wanted \[3\]"),
        ({"legal_len": torch.ones(3, dtype=torch.int64)}, "legal_len is int64; wanted int32"),
    ],
)
def test_operands_of_wrong_shape_or_dtype_are_not_scored(change: dict[str, Tensor], complaint: str) -> None:
    """Otherwise compiled loops would read out of bounds."""
    arrays = {"q": torch.zeros(3, 2, 8), "k": torch.zeros(5, 8), "weights": torch.zeros(3, 2), **change}
    legal_len = arrays.pop("legal_len", torch.full((3,), 5, dtype=torch.int32))
    with pytest.raises(ArrayError, match=complaint):
        score_all(Operands(**arrays), legal_len)


def test_operands_that_require_a_gradient_are_accepted() -> None:
    plain = make_operands("random", 3, 50, key_scale=True)
    arrays = (plain.q, plain.k, plain.weights, plain.key_scale)
    learned = Operands(*(array.clone().requires_grad_() for array in arrays if array is not None))
    lens = torch.full((3,), 50, dtype=torch.int32)
    assert torch.equal(choose_keys(learned, 7, lens), choose_keys(plain, 7, lens))


def test_without_keys_or_queries_the_choice_is_padding_or_empty() -> None:
    operands = make_operands("random", 3, 5)
    none = Operands(operands.q, operands.k[:0], operands.weights)
    for empty in (none, operands):
        choice = choose_keys(empty, 4, torch.zeros(3, dtype=torch.int32))
        assert (choice == -1).all()
    no_queries = Operands(operands.q[:0], operands.k, operands.weights[:0])
    assert choose_keys(no_queries, 4, torch.zeros(0, dtype=torch.int32)).shape == (0, 4)
