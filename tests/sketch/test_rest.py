"""Attention to the rest by its codes agrees with the definition, and reads no codes outside of it."""

import numpy as np
import pytest
from numpy.typing import NDArray

from csattn.cpu.jit import exact_kernel
from csattn.search import code_sums
from csattn.search.code_sums import CHUNK_KEYS
from csattn.search.sketch_group_scores import BIAS, NOT_COUNTED
from csattn.sketch import SketchIndex, reference
from csattn.sketch.codes import pack_codes
from csattn.sketch.rest import attend_rest
from tests.sketch.synthetic import make_heads, make_sketch

NUM_HEADS = 2
Rows = tuple[NDArray[np.int32], NDArray[np.int32]]


def choose(rng: np.random.Generator, num_tokens: int, first: int, stop: int, share: float) -> Rows:
    """Return kv_indices and valid_len [num_tokens, NUM_HEADS, ...]. The second head chooses fewer rows."""
    top_k = round(share * (stop - first))
    kv_indices = np.full((num_tokens, NUM_HEADS, top_k), -1, np.int32)
    valid_len = np.tile(np.array([top_k, top_k // 2], np.int32), (num_tokens, 1))
    for token, head in np.ndindex(*valid_len.shape):
        valid = valid_len[token, head]
        kv_indices[token, head, :valid] = np.sort(rng.choice(np.arange(first, stop), valid, replace=False))
    return kv_indices, valid_len


def want_rest(q: NDArray[np.float32], index: SketchIndex, chosen: Rows, first: int, stop: int, scale: float):
    outs = []
    for of_token, kv_indices, valid_len in zip(q, *chosen, strict=True):
        is_rest = np.zeros((NUM_HEADS, index.context_len), np.bool_)
        is_rest[:, first:stop] = True
        for head in range(NUM_HEADS):
            is_rest[head, kv_indices[head, : valid_len[head]]] = False
        outs.append(reference.attend_rest(of_token, index, is_rest, scale))
    return tuple(np.stack(arrays) for arrays in zip(*outs, strict=True))


@pytest.mark.parametrize(
    "head_dim, num_fine, num_coarse, group_size",
    [(8, 1, 0, 1), (24, 1, 1, 4), (64, 2, 2, 7), (80, 2, 2, 2), (96, 3, 3, 16), (256, 8, 8, 4), (512, 16, 16, 8)],
)
def test_attend_rest_agrees_with_the_definition(head_dim, num_fine, num_coarse, group_size, rng) -> None:
    heads = make_heads(rng, NUM_HEADS, group_size, 1300, head_dim)
    index = make_sketch(*heads, num_fine, num_coarse, (0, 1024))
    q = np.ascontiguousarray(heads[0][:, :2].swapaxes(0, 1))
    chosen = choose(rng, 2, 5, 1200, 0.1)
    for scale in (0.02, 0.3, 5.0):
        out, lse = attend_rest(q, index, *chosen, 5, 1200, scale)
        want_out, want_lse = want_rest(q, index, chosen, 5, 1200, scale)
        np.testing.assert_allclose(out, want_out, rtol=1e-4, atol=1e-4 * np.abs(want_out).max())
        np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=3e-4)


@pytest.mark.parametrize(
    "context_len, first, stop",
    [(1, 0, 1), (63, 3, 60), (64, 0, 64), (65, 4, 65), (CHUNK_KEYS + 1, 4, CHUNK_KEYS + 1), (1500, 1023, 1025)],
)
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_attend_rest_agrees_with_the_definition_for_any_range_of_rows(
    context_len: int, first: int, stop: int, share: float, rng: np.random.Generator
) -> None:
    """Codes after the last row have no effect."""
    heads = make_heads(rng, NUM_HEADS, 3, context_len, 32)
    index = make_sketch(*heads, 1, 1, tuple(range(0, context_len, 1024)))
    index.codes.reshape(NUM_HEADS, -1, 2, 64)[:, context_len // 64 :, :, context_len % 64 :] = 0xFFFFFFFF
    q = np.ascontiguousarray(heads[0][:, :1].swapaxes(0, 1))
    chosen = choose(rng, 1, first, stop, share)
    out, lse = attend_rest(q, index, *chosen, first, stop, 0.3)
    want_out, want_lse = want_rest(q, index, chosen, first, stop, 0.3)
    np.testing.assert_allclose(out, want_out, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-3)


def test_arguments_of_a_wrong_dtype_or_length_are_refused(rng: np.random.Generator) -> None:
    index = make_sketch(*make_heads(rng, NUM_HEADS, 1, 200, 16), 1, 0)
    q, (kv_indices, valid_len) = np.zeros((1, NUM_HEADS, 16), np.float32), choose(rng, 1, 0, 200, 0.1)
    for of_token in (
        (q.astype(np.float64), kv_indices, valid_len),
        (q, kv_indices.astype(np.int64), valid_len),
        (q, kv_indices, valid_len + 1),
    ):
        with pytest.raises(AssertionError, match=r"got|are chosen"):
            attend_rest(of_token[0], index, *of_token[1:], 0, 200, 0.25)


def test_an_empty_range_of_rows_has_no_weight(rng: np.random.Generator) -> None:
    heads = make_heads(rng, NUM_HEADS, 2, 100, 32)
    q = np.ascontiguousarray(heads[0][:, :1].swapaxes(0, 1))
    out, lse = attend_rest(q, make_sketch(*heads), *choose(rng, 1, 50, 50, 0), 50, 50, 0.3)
    assert not out.any() and (lse == -np.inf).all()


@pytest.mark.parametrize("fault", [np.nan, np.inf, 1e30])
def test_a_faulty_query_does_not_affect_other_queries(fault: float, rng: np.random.Generator) -> None:
    heads = make_heads(rng, NUM_HEADS, 4, 300, 32)
    index, chosen = make_sketch(*heads), choose(rng, 2, 4, 290, 0.1)
    q = np.ascontiguousarray(heads[0][:, :2].swapaxes(0, 1))
    want, want_lse = attend_rest(q, index, *chosen, 4, 290, 0.3)
    q[0, 1, 7] = fault
    out, lse = attend_rest(q, index, *chosen, 4, 290, 0.3)
    others = np.ones((2, 8), bool)
    others[0, 1] = False
    np.testing.assert_array_equal(out[others], want[others])
    np.testing.assert_array_equal(lse[others], want_lse[others])
    assert fault == 1e30 or not np.isfinite(lse[0, 1])


@exact_kernel
def _sums(scores, exponent, codes, num_fine, num_words, weights, sums):  # type: ignore[no-untyped-def]
    group_size, row_weights = len(scores) // CHUNK_KEYS, 2 * CHUNK_KEYS
    tops, totals = np.empty(group_size, np.int64), np.empty(group_size, np.int64)
    for g in range(group_size):
        of_row = g * CHUNK_KEYS, CHUNK_KEYS, exponent, weights, g * row_weights
        tops[g], totals[g] = code_sums.compute_weights(scores, *of_row, codes, 0, 0)
    scales = np.ones(group_size, np.float32)
    code_sums.add_code_sums(
        codes, num_fine, num_words, 0, CHUNK_KEYS // 64, weights, row_weights, scales, sums, 32 * num_fine
    )
    return tops, totals


@pytest.mark.parametrize("exponent", [-15, -11, -9, -4, 0, 3, 7, 15])
@pytest.mark.parametrize("group_size", [1, 2, 4, 6, 8, 15])
def test_sums_of_codes_agree_with_those_of_float_weights(
    exponent: int, group_size: int, rng: np.random.Generator
) -> None:
    """This holds for any spread of weights. The sums of a chunk with all rows left out are 0."""
    codes = rng.integers(0, 16, (CHUNK_KEYS, 16), dtype=np.uint8)
    packed = pack_codes(np.concatenate([codes, codes & 3], axis=1), 2, 1)
    scores = (BIAS + rng.normal(0, 3000, (group_size, CHUNK_KEYS))).astype(np.uint16)
    scores[rng.random(scores.shape) < 0.3] = NOT_COUNTED
    scores[-1] = NOT_COUNTED
    weights = np.full(group_size * 2 * CHUNK_KEYS, -1, np.int32)
    sums = np.zeros(group_size * 64, np.float32)
    tops, totals = _sums(scores.reshape(-1), exponent, packed.reshape(-1), 2, 3, weights, sums)
    assert tops[-1] == NOT_COUNTED and totals[-1] == 0 and not sums[-64:].any()
    for g in range(group_size - 1):
        counted = scores[g] != NOT_COUNTED
        exponents = np.where(counted, 2.0**exponent * scores[g], -np.inf)
        assert tops[g] == scores[g].max()
        exact = np.exp2(exponents - exponents.max()) * 2**15
        np.testing.assert_allclose(totals[g], exact.sum(), rtol=1e-3)
        found = sums.reshape(group_size, 4, 4, 4)[g].sum(axis=1).reshape(-1)
        np.testing.assert_allclose(found, exact @ codes, rtol=1e-3, atol=1e-3 * exact.sum())
