"""Each part of a search agrees with its definition in a line or two of numpy."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from csattn.cpu.jit import exact_kernel, readonly
from csattn.cpu.simd import F32x16, fill, load, store
from csattn.index import ListIndex
from csattn.search import group_scores, lists, match, reference, sketch, sketch_group_scores
from csattn.search.sketch_group_scores import BIAS
from csattn.search.sketch_scores import score_range
from csattn.sketch import SketchIndex
from csattn.sketch import reference as sketch_reference
from csattn.sketch.codes import coord_bits
from csattn.table.lists import CHUNK_KEYS, SCORE_UNIT, ListTable, lists_of
from tests.search.synthetic import IndexSpec, make_index, make_queries

SCALE = 0.2  # softmax scale


@pytest.mark.parametrize("group_size", [1, 3, 4, 6])
@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e20, 0.0, np.inf, np.nan])
@pytest.mark.parametrize("head_dim, num_fine, num_coarse", [(8, 1, 0), (24, 1, 1), (80, 3, 2), (512, 16, 16)])
def test_projected_and_quantized_queries_equal_the_definition_bitwise(
    group_size, scale, head_dim, num_fine, num_coarse
) -> None:
    spec = IndexSpec(context_len=2100, head_dim=head_dim, num_fine=num_fine, num_coarse=num_coarse, segment_len=1024)
    index = make_index(spec)
    assert isinstance(index, SketchIndex)
    q = make_queries(spec, group_size)
    q[1] *= np.float32(scale)
    bits, segments = coord_bits(num_fine, num_coarse), index.num_segments
    record = sketch.describe_sketch(index)
    for head in range(spec.num_heads):
        group = q[head * group_size : (head + 1) * group_size]
        memory = np.full(sketch.query_bytes(index, group_size), 0xFF, np.uint8)
        _weigh(record.ctypes.data, head, group.reshape(-1), memory)
        fields = _fields(memory, group_size, segments, len(bits))
        with np.errstate(invalid="ignore", over="ignore"):
            means, coordinates = sketch_reference.project(group, index, head, SCALE)
            exponent, multipliers, offsets = sketch_reference.integer_queries(means, coordinates, bits)
        np.testing.assert_array_equal(fields["means"], means)
        np.testing.assert_array_equal(fields["coordinates"], coordinates)
        assert memory[:8].view(np.int64) == exponent
        np.testing.assert_array_equal(fields["multipliers"], multipliers)
        np.testing.assert_array_equal(fields["offsets"], offsets)


@exact_kernel
def _weigh(address, head, q, memory):  # type: ignore[no-untyped-def]
    of_sketch = sketch.sketch_at(address)
    wide = match.widen(q)
    for segment in range(of_sketch.num_segments):
        sketch.project_queries(of_sketch, head, wide, segment, segment + 1, SCALE, memory.ctypes.data)
    sketch.quantise_queries(of_sketch, len(q) // of_sketch.head_dim, memory.ctypes.data)


def _fields(memory: NDArray[np.uint8], group_size: int, segments: int, coords: int) -> dict[str, NDArray[Any]]:
    """Return views of the arrays that `query_places` lays out in `memory`."""
    fields, at = {}, 8
    for name, kind, shape in (
        ("bounds", np.float64, (segments, 2)),
        ("means", np.float32, (segments,)),
        ("coordinates", np.float32, (segments, coords)),
        ("offsets", np.int32, (segments,)),
        ("multipliers", np.int8, (segments, coords)),
    ):
        end = at + group_size * int(np.prod(shape)) * np.dtype(kind).itemsize
        fields[name] = memory[at:end].view(kind).reshape(group_size, *shape)
        at = end
    assert at == len(memory)
    return fields


@pytest.mark.parametrize("context_len", [1, 63, 64, 65, 1025, 2500])
@pytest.mark.parametrize("group_size", [1, 2, 4, 5, 8, 15])
@pytest.mark.parametrize("num_fine, num_coarse", [(1, 0), (2, 1), (1, 3)])
def test_sketch_scores_equal_the_definition(context_len, group_size, num_fine, num_coarse) -> None:
    spec = IndexSpec(context_len=context_len, num_fine=num_fine, num_coarse=num_coarse, segment_len=1024)
    index, q = make_index(spec), make_queries(spec, group_size)
    assert isinstance(index, SketchIndex)
    memory, nothing = np.full(sketch.query_bytes(index, group_size), 0xFF, np.uint8), np.empty(0, np.uint16)
    poison = 777
    record, stride = sketch.describe_sketch(index), context_len + 70
    for head in range(spec.num_heads):
        group = q[head * group_size : (head + 1) * group_size]
        _weigh(record.ctypes.data, head, group.reshape(-1), memory)
        found = np.full((group_size, stride), poison, np.uint16)
        for first in range(0, context_len, 2048):
            last = min(first + 2048, context_len)
            sizes = group_size, first, last
            _score(record.ctypes.data, head, memory, *sizes, found.reshape(-1), stride, first + 3, nothing)
        want = sketch_reference.score_group(group, index, head, SCALE)[2].astype(np.int64) + BIAS
        np.testing.assert_array_equal(found[:, 3 : 3 + context_len], want)
        assert (found[:, :3] == poison).all() and (found[:, 66 + context_len :] == poison).all()


@exact_kernel
def _score(address, head, memory, group_size, first, last, scores, stride, at, greatest):  # type: ignore[no-untyped-def]
    of_sketch, queries = sketch.sketch_at(address), memory.ctypes.data
    score_range(of_sketch, head, queries, group_size, first, last, scores, stride, at, greatest)


@exact_kernel
def _group_scores(scores, stride, num_keys, exponent, greatest, shifts, out):  # type: ignore[no-untyped-def]
    normalisers, per_row = np.empty(len(shifts), np.int64), stride // 8
    for row in range(len(shifts)):
        for at in range(0, num_keys, 1024):
            count, place = min(num_keys - at, 1024), row * stride + at
            sketch_group_scores.write_maxima_of_eights(scores, place, count, greatest, place // 8)
        normalisers[row] = sketch_group_scores.normaliser(greatest, row * per_row, -(-num_keys // 8), exponent)
    for row in range(len(shifts)):
        shifts[row] = min(normalisers[row] - normalisers.min(), 2**16 - 1)
    for at in range(0, num_keys, 32):
        store(out, at, sketch_group_scores.best_share(scores, stride, at, shifts))
    return normalisers


@pytest.mark.parametrize("num_keys", [1, 7, 8, 9, 33, 1000, 5003, 20_000])
@pytest.mark.parametrize("exponent", [-15, -9, -1, 0, 1, 4, 5, 8, 15])
@pytest.mark.parametrize("group_size", [1, 4, 7])
def test_group_scores_over_sketches_equal_the_definition(
    num_keys: int, exponent: int, group_size: int, rng: np.random.Generator
) -> None:
    """This holds for widely spread scores, for equal scores and for the most extreme ones."""
    scores = rng.normal(0, 4000, (group_size, num_keys)).clip(-32767, 32767).astype(np.int16)
    scores[group_size // 2] = rng.choice([-32767, 32767], num_keys)
    scores[-1] = 5
    stride = -(-num_keys // 8) * 8 + 128
    padded = np.full((group_size, stride), 2**16 - 1, np.uint16)  # high scores past the end, which must not be chosen
    padded[:, :num_keys] = scores.astype(np.int64) + BIAS
    greatest = np.full(padded.size // 8 + 16, 2**16 - 2, np.uint16)
    out, shifts = np.zeros(num_keys + 64, np.uint16), np.zeros(group_size, np.uint16)
    found = _group_scores(padded.reshape(-1), stride, num_keys, exponent, greatest, shifts, out)
    behind = greatest[: padded.size // 8].reshape(group_size, -1)[:, -(-num_keys // 8) :]
    assert (behind == 2**16 - 2).all(), "there, another thread may have written"
    assert found.tolist() == [sketch_reference.normaliser(row, exponent) for row in scores]
    all_group_scores = out[:num_keys] - np.int64(BIAS)
    np.testing.assert_array_equal(all_group_scores, sketch_reference.group_scores(scores, exponent))


@pytest.mark.parametrize("num_subspaces, num_centroids, subspace_dim", [(1, 1, 1), (5, 17, 3), (4, 64, 8), (3, 16, 32)])
@pytest.mark.parametrize("group_size", [1, 3])
def test_centroid_matches_equal_the_definition_bitwise(
    num_subspaces, num_centroids, subspace_dim, group_size, rng
) -> None:
    head_dim = num_subspaces * subspace_dim
    q = rng.standard_normal((group_size, head_dim), dtype=np.float32)
    codebooks = rng.standard_normal((1, num_subspaces, num_centroids, subspace_dim), dtype=np.float32)
    codebooks[..., num_centroids // 2, :] = codebooks[..., 0, :]  # a tie: the lowest id wins
    nothing = np.zeros((1, num_subspaces, num_centroids, 0))
    table = lists_of(nothing.astype(np.bool_), nothing.astype(np.float16))
    index = ListIndex(codebooks, np.zeros((1, head_dim), np.float32), table, True)
    ids, weights = np.full((2, group_size, num_subspaces + 2), -777)
    weights = weights.astype(np.float64)
    for first in range(0, num_subspaces, 2):
        last = min(first + 2, num_subspaces)
        columns = index.codebook_columns[0, first:last].reshape(-1)
        sizes = first, last, group_size, num_centroids, subspace_dim, True
        match.match_centroids(
            match.widen(q.reshape(-1)), columns, *sizes, ids.reshape(-1), weights.reshape(-1), num_subspaces + 2
        )
    for row in range(group_size):
        want_ids, want_weights = reference.match_centroids(q[row], index, 0)
        np.testing.assert_array_equal(ids[row, :-2], want_ids)
        np.testing.assert_array_equal(weights[row, :-2], want_weights)
    assert (ids[:, -2:] == -777).all()


@exact_kernel
def _exp2(x, slope, rounder, out):  # type: ignore[no-untyped-def]
    for i in range(0, len(x), 16):
        store(out, i, group_scores.exp2_lanes(load(F32x16, x, i), fill(F32x16, slope), fill(F32x16, rounder)))


@pytest.mark.parametrize("offset", [-20, 0, 94])
@pytest.mark.parametrize("slope", [1.0, 0.25])
def test_exp2_is_accurate(offset: int, slope: float) -> None:
    x = (np.linspace(-126 - offset, 94 - offset, 16 * 5000) / slope).astype(np.float32)
    out = np.empty_like(x)
    _exp2(x, np.float32(slope), group_scores.ROUNDER + offset, out)
    np.testing.assert_allclose(out, np.exp2(slope * x.astype(np.float64) + offset), rtol=4.2e-6)


def scores_of(num_keys: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """Return scores of keys, some of which are not scored."""
    scores = np.rint(rng.normal(0, 3000, num_keys)).astype(np.float32)
    scores[rng.random(num_keys) < 0.3] = -0.0
    scores[0] = 0.0  # this key is scored
    return scores


@pytest.mark.parametrize("num_keys", [1, 15, 16, 33, 1000, 40_000])
@pytest.mark.parametrize("slope", [0.0, 0.001, 0.02, 3.0])
def test_sum_powers_equals_the_sum_over_scored_keys(num_keys: int, slope: float, rng: np.random.Generator) -> None:
    padded = np.full(num_keys + 32, 32_000, np.float32)  # high scores past the end, which must not be summed
    padded[5 : 5 + num_keys] = scores = scores_of(num_keys, rng)
    shift, total = group_scores.sum_powers(padded, 5, num_keys, np.float32(slope))
    scored = scores.view(np.int32) != group_scores.NOT_SCORED
    exponents = np.float64(np.float32(slope)) * scores[scored].astype(np.float64)
    assert shift % 2 == 0 and abs(shift - exponents.max()) <= 1
    assert total == pytest.approx(np.exp2(np.maximum(exponents - shift, -140)).sum(), rel=5e-6)


def test_sum_powers_of_a_range_without_scored_keys_is_zero() -> None:
    scores = np.full(64, -0.0, np.float32)
    assert group_scores.sum_powers(scores, 0, 48, np.float32(1)) == (group_scores.NO_SHIFT, 0.0)


@exact_kernel
def _store_shares(scores, stride, terms, out):  # type: ignore[no-untyped-def]
    for at in range(0, len(out), 16):
        store(out, at, group_scores.group_scores_of_shares(scores, stride, at, terms))


def test_group_scores_over_lists_equal_the_sum_of_softmax_shares(rng: np.random.Generator) -> None:
    """Their bits do not depend on the power of two that the sum is scaled by."""
    slopes, num_keys = (0.003, 0.0011, 0.0047), 800
    scores = np.stack([scores_of(num_keys, rng) for _ in slopes])
    terms, got = np.empty((3, 4), np.float32), np.full((3, num_keys), -777, np.int32)
    for out, shifted in zip(got, (0, -38, 22), strict=True):
        for row, slope in enumerate(slopes):
            shift, total = group_scores.sum_powers(scores[row], 0, num_keys, np.float32(slope))
            terms[row] = group_scores.share_terms(np.float64(np.float32(slope)), shift + shifted, total * 2.0**-shifted)
        _store_shares(scores.reshape(-1), num_keys, terms.reshape(-1), out)
    np.testing.assert_array_equal(got[1:], got[:1].repeat(2, axis=0))
    scored = scores.view(np.int32) != group_scores.NOT_SCORED
    exponents = np.array(slopes)[:, None] * scores.astype(np.float64)
    shares = np.where(scored, np.exp2(exponents - exponents.max(axis=1, keepdims=True)), 0)
    want = (shares / shares.sum(axis=1, keepdims=True)).sum(axis=0)
    np.testing.assert_allclose(got[0].view(np.float32), want * 2.0**group_scores.HEADROOM, rtol=1e-4)


def add_list(
    scores: NDArray[np.float32], table: ListTable, weight: float, least: float = -np.inf, place: int = 2**31
) -> None:
    """Add the table's first list to scores [num_chunks * CHUNK_KEYS], chunk by chunk. Unlisted places are poisoned."""
    halves = np.full(table.scores.size + 2 * SCORE_UNIT, 0x7E00, np.int16)  # NaN
    halves[SCORE_UNIT:][: table.list_len] = table.scores.reshape(-1)[: table.list_len].view(np.int16)
    ends = SCORE_UNIT + np.append(table.starts.reshape(-1), table.list_len)
    for chunk, (first, last) in enumerate(pairwise(ends.tolist())):
        weighted = np.full(lists.WEIGHTED_ROOM, np.nan, np.float32)
        begin = lists.write_weighted_scores(halves, first, last, weight, weighted)
        if least > -np.inf:
            lists.exclude_lower_scores(halves, first, last, np.float32(least), SCORE_UNIT + place, weighted, begin)
        words = readonly(table.listed.reshape(-1).view(np.uint64))
        lists.add_chunk(scores, chunk * CHUNK_KEYS, words, chunk * lists.WORDS, weighted, begin)


def list_of(listed: NDArray[np.bool_], scores: NDArray[np.float16]) -> ListTable:
    return lists_of(listed[None, None, None], scores[None, None, None])


@pytest.mark.parametrize("num_keys", [1, 15, 1024, 1025, 5003])
@pytest.mark.parametrize("density", [0.0, 0.02, 0.25, 0.9, 1.0])
def test_list_scores_are_added_to_the_listed_keys_only(num_keys: int, density: float, rng: np.random.Generator) -> None:
    listed = rng.random((3, num_keys)) < density
    halves = (rng.normal(0, 3, (3, num_keys)) * 2.0 ** rng.integers(-9, 9, num_keys)).astype(np.float16)
    scores = np.full(-(-num_keys // CHUNK_KEYS) * CHUNK_KEYS, np.nan, np.float32)
    lists.clear_scores(scores, 0, len(scores))
    want = np.full(num_keys, -0.0, np.float32)
    for own, half, weight in zip(listed, halves + np.float16(0), (0.3, -1.7, 1e-3), strict=True):
        add_list(scores, list_of(own, half), weight)
        want[own] += np.float32(weight) * half[own].astype(np.float32) + np.float32(0)
    np.testing.assert_array_equal(scores[:num_keys].view(np.int32), want.view(np.int32))
    assert (scores[num_keys:].view(np.int32) == group_scores.NOT_SCORED).all()


def test_a_listed_key_whose_scores_sum_to_zero_stays_listed(rng: np.random.Generator) -> None:
    listed, scores = rng.random(2048) < 0.3, np.empty(2048, np.float32)
    table = list_of(listed, rng.normal(0, 3, 2048).astype(np.float16))
    lists.clear_scores(scores, 0, 2048)
    add_list(scores, table, 0.3)
    add_list(scores, table, -0.3)
    assert (scores == 0).all()
    np.testing.assert_array_equal(scores.view(np.int32) != group_scores.NOT_SCORED, listed)


def test_keys_of_a_list_with_weight_zero_are_still_listed() -> None:
    scores = np.empty(CHUNK_KEYS, np.float32)
    lists.clear_scores(scores, 0, CHUNK_KEYS)
    add_list(scores, list_of(np.arange(9) == 3, np.full(9, -1.5, np.float16)), 0.0)
    assert scores[3].view(np.int32) == 0
    assert (scores.view(np.int32) == group_scores.NOT_SCORED).sum() == CHUNK_KEYS - 1


def test_list_entries_below_the_least_score_are_excluded(rng: np.random.Generator) -> None:
    listed, halves = rng.random(3000) < 0.4, rng.normal(0, 3, 3000).astype(np.float16)
    scores = np.empty((2, 3 * CHUNK_KEYS), np.float32)
    lists.clear_scores(scores.reshape(-1), 0, scores.size)
    add_list(scores[0], list_of(listed, halves), 0.7, least=1.5)
    add_list(scores[1], list_of(listed & (halves >= 1.5), halves), 0.7)
    np.testing.assert_array_equal(*scores.view(np.int32))


@pytest.mark.parametrize("place", [0, 15, 16, 700, 1199])
def test_list_entries_equal_to_the_least_score_are_excluded_after_a_given_place(
    place: int, rng: np.random.Generator
) -> None:
    listed, halves = rng.random(3000) < 0.4, rng.integers(0, 3, 3000).astype(np.float16)
    listed[: 1200 - listed[1200:].sum()] = True  # at least 1200 entries
    scores = np.empty((2, 3 * CHUNK_KEYS), np.float32)
    lists.clear_scores(scores.reshape(-1), 0, scores.size)
    add_list(scores[0], list_of(listed, halves), 0.7, least=1.0, place=place)
    places = np.cumsum(listed) - 1
    add_list(scores[1], list_of(listed & ((halves > 1) | (halves == 1) & (places <= place)), halves), 0.7)
    np.testing.assert_array_equal(*scores.view(np.int32))


def test_every_finite_float16_score_is_read_exactly() -> None:
    halves = np.arange(2**16, dtype=np.uint32).astype(np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)]
    scores = np.empty(-(-len(halves) // CHUNK_KEYS) * CHUNK_KEYS, np.float32)
    lists.clear_scores(scores, 0, len(scores))
    add_list(scores, list_of(np.ones(len(halves), np.bool_), halves), 1.0)
    np.testing.assert_array_equal(scores[: len(halves)], halves.astype(np.float32))
