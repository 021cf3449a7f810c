"""The build of a sketch agrees with its definition: codes bit for bit, transforms by the logits that they give."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from csattn.artifact.layout import index_fault, index_from_arrays
from csattn.config import SketchConfig
from csattn.sketch import SketchIndex, reference
from csattn.sketch import build as sketch
from csattn.sketch.codes import coord_bits, pack_codes, pack_marks, unpack_codes, unpack_marks
from csattn.sketch.index import num_marked
from index_build.layer import index_arrays
from tests.sketch.synthetic import Floats, make_heads, make_sketch

SCALE = 0.1
ARRAYS = "codes", "marks", "key_mean", "query_transform", "value_mean", "value_transform"


def build(
    q: Floats,
    k: Floats,
    v: Floats,
    config: SketchConfig,
    num_threads: int = 2,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> SketchIndex:
    """Build the index of these heads on `device`. Arrays are as `make_heads` returns them."""
    kv = torch.from_numpy(np.stack([k, v], axis=2)).to(device, dtype)
    with ThreadPoolExecutor(num_threads) as threads:
        arrays = index_arrays(torch.from_numpy(q).to(device, dtype), kv, config, threads)
    host = {name: array.cpu().numpy() for name, array in arrays.items()}
    index = index_from_arrays(config, k.shape[1], host)
    assert isinstance(index, SketchIndex)
    return index


def assert_sketches_agree(got: SketchIndex, want: SketchIndex, queries: Floats) -> None:
    """Require nearly the same logits and the same attention to the rest. queries: [num_q_heads, head_dim]."""
    np.testing.assert_array_equal(got.segment_starts, want.segment_starts)
    for name in ARRAYS:
        array, wanted = getattr(got, name), getattr(want, name)
        assert (array.shape, array.dtype) == (wanted.shape, wanted.dtype), name
        assert array.flags.c_contiguous, name
    for row, q in enumerate(queries):
        logits = [logits_of(q, index, row * index.num_heads // len(queries)) for index in (got, want)]
        assert np.abs(logits[0] - logits[1]).mean() <= 1e-2 * logits[1].std() + 1e-5 * np.abs(logits[1]).max()
    is_rest = np.ones((got.num_heads, got.context_len), bool)
    for mine, wanted in zip(*(reference.attend_rest(queries, i, is_rest, SCALE) for i in (got, want)), strict=True):
        np.testing.assert_allclose(mine, wanted, atol=2e-2 * np.abs(wanted).max())
    count = num_marked(got.context_len, got.segment_starts.tolist())
    for head in range(got.num_heads):
        marks = got.marked_rows(head), want.marked_rows(head)
        assert marks[0].sum() == count and (marks[0] & marks[1]).sum() >= 0.9 * count  # the other marks nearly tie


def logits_of(q: Floats, index: SketchIndex, head: int) -> NDArray[np.float64]:
    """Return a query's logits [context_len] in octaves. q: [head_dim]."""
    bases, exponent, scores = reference.score_group(q[None], index, head, SCALE)
    return bases[0] + 2.0**exponent * scores[0]


def test_a_sketch_of_no_rows_is_refused() -> None:
    with pytest.raises(AssertionError, match="a sketch has rows"):
        sketch.sketch_arrays(torch.zeros(2, 0, 64), torch.zeros(1, 0, 2, 64), SketchConfig(), map)


@pytest.mark.parametrize(
    ("head_dim", "group_size", "num_rows", "segment_len"),
    [
        (8, 1, 65, 8192),
        (16, 16, 60, 8192),
        (64, 3, 1300, 8192),
        (64, 1, 2100, 1024),
        (80, 2, 1025, 1024),
        (96, 7, 300, 8192),
        (128, 4, 1500, 8192),
        (128, 4, 2049, 8192),
        (256, 1, 1100, 8192),
        (512, 2, 1600, 8192),
    ],
)
def test_a_built_sketch_agrees_with_the_definition(head_dim, group_size, num_rows, segment_len, rng) -> None:
    q, k, v = make_heads(rng, 2, group_size, num_rows, head_dim)
    config = SketchConfig(segment_len=segment_len)
    want = make_sketch(q, k, v, *config.words(head_dim), tuple(config.segment_starts(num_rows)))
    assert_sketches_agree(build(q, k, v, config), want, q[:, -1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "num_rows"), [(8, 1), (64, 63), (80, 1023), (128, 1024), (512, 1025)])
def test_codes_equal_the_definitions_bit_for_bit(head_dim, num_rows, dtype, rng) -> None:
    q, k, _ = make_heads(rng, 2, 1, num_rows, head_dim)
    bits = coord_bits(*SketchConfig().words(head_dim))
    keys = torch.from_numpy(k).to(dtype)
    made = sketch.fit_keys(keys, (0,), sketch.fit_queries(torch.from_numpy(q)), torch.from_numpy(bits))
    keys = torch.cat([keys, 100 * keys[:, :3]], dim=1)  # the last ones are out of the transform's range
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        here = sketch.KeyTransforms(**{f.name: getattr(made, f.name).to(device) for f in fields(made)})
        codes, _ = sketch.encode(keys.to(device), (0,), here, torch.from_numpy(bits).to(device))
        for head in range(2):
            mean, exponent, columns = made.key_mean, made.key_exponent, made.key_transform
            transform = mean[head, 0].numpy(), int(exponent[head, 0]), columns[head, 0].numpy()
            want = reference.encode(keys[head].float().numpy(), *transform, bits)
            np.testing.assert_array_equal(codes[head].cpu(), want)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_coordinate_just_below_an_integer_is_not_rounded_up(device: str) -> None:
    """Its product is exact in float64, but adding the half of a code would lose its lowest bits."""
    bits = torch.from_numpy(coord_bits(*SketchConfig().words(128)))
    columns = torch.zeros(1, 1, 128, len(bits))
    columns[:, :, :64], columns[:, :, 64] = 2.0**-6, 2.0**-30
    keys = torch.zeros(1, 1, 128)
    keys[..., :64], keys[..., 64] = 1.0, -(2.0**-20)
    made = sketch.KeyTransforms(
        torch.zeros(1, 1, 128), torch.zeros(1, 1, dtype=torch.int64), columns, torch.zeros_like(columns).half()
    )
    here = sketch.KeyTransforms(**{field.name: getattr(made, field.name).to(device) for field in fields(made)})
    codes, _ = sketch.encode(keys.to(device), (0,), here, bits.to(device))
    np.testing.assert_array_equal(codes[0, 0].cpu(), 1 << bits - 1)
    want = reference.encode(keys[0].numpy(), made.key_mean[0, 0].numpy(), 0, columns[0, 0].numpy(), bits.numpy())
    np.testing.assert_array_equal(codes[0].cpu(), want)


@pytest.mark.parametrize(
    ("head_dim", "num_rows", "starts"), [(8, 900, (0,)), (64, 5000, (0, 1024, 3072, 4096)), (96, 65, (0,))]
)
def test_reported_errors_equal_the_reconstruction_errors_of_keys(head_dim, num_rows, starts, rng) -> None:
    q, k, _ = (torch.from_numpy(rows) for rows in make_heads(rng, 1, 2, num_rows, head_dim))
    queries, bits = q.reshape(1, -1, head_dim), torch.from_numpy(coord_bits(*SketchConfig().words(head_dim)))
    made = sketch.fit_keys(k, starts, sketch.fit_queries(queries), bits)
    codes, errors = sketch.encode(k, starts, made, bits)
    steps = codes[0] - ((1 << bits) - 1) / 2
    for number, (start, stop) in enumerate(pairwise((*starts, num_rows))):
        reconstructed = made.key_mean[0, number] + steps[start:stop] @ made.query_transform[0, number].float().mT
        wanted = (k[0, start:stop] - reconstructed).square().sum(1)
        torch.testing.assert_close(errors[0, start:stop], wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("num_rows", "starts"), [(1, (0,)), (399, (0,)), (400, (0,)), (4500, (0, 1024, 2048, 3072))])
def test_rows_with_the_greatest_errors_are_marked_and_ties_go_to_the_first(num_rows, starts, rng) -> None:
    errors = rng.integers(0, 9, (3, num_rows)).astype(np.float32)
    marked = np.zeros(errors.shape, bool)
    for start, stop in pairwise((*starts, num_rows)):
        worst = np.argsort(-errors[:, start:stop], axis=1, kind="stable")[:, : (stop - start) // 400]
        np.put_along_axis(marked[:, start:stop], worst, True, axis=1)
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        got = sketch.mark(torch.from_numpy(errors).to(device), starts).cpu().numpy()
        assert got.dtype == np.uint32
        np.testing.assert_array_equal(got, pack_marks(marked))
        np.testing.assert_array_equal(unpack_marks(got, num_rows), marked)


@pytest.mark.parametrize("num_marked_rows", [1, 7])
def test_outlier_rows_are_marked(num_marked_rows, rng) -> None:
    q, k, v = make_heads(rng, 2, 2, 400 * num_marked_rows, 64)
    unlike = rng.permutation(k.shape[1])[:num_marked_rows]
    k[:, unlike] *= 20.0
    index = build(q, k, v, SketchConfig())
    for head in range(2):
        np.testing.assert_array_equal(np.flatnonzero(index.marked_rows(head)), np.sort(unlike))


@pytest.mark.parametrize("num_rows", [1, 63, 64, 65, 1023, 1024, 1025, 2049])
@pytest.mark.parametrize("words", [(1, 0), (2, 2), (1, 3)])
def test_packed_words_equal_the_definitions(num_rows, words, rng) -> None:
    codes = rng.integers(0, 1 << coord_bits(*words), (2, num_rows, len(coord_bits(*words)))).astype(np.uint8)
    got = sketch.pack(torch.from_numpy(codes), *words).numpy()
    assert got.dtype == np.uint32
    np.testing.assert_array_equal(got, pack_codes(codes, *words))


@pytest.mark.parametrize("num_rows", [1, 2, 20])
def test_a_sketch_of_fewer_rows_than_dimensions_agrees_with_the_definition(num_rows, rng) -> None:
    q, k, v = make_heads(rng, 2, 2, num_rows, 64)
    assert_sketches_agree(build(q, k, v, SketchConfig()), make_sketch(q, k, v, 2, 2), q[:, 0])


def test_solve_definite_solves_systems_of_equations(rng) -> None:
    a, x = rng.standard_normal((2, 5, 5)), rng.standard_normal((2, 5, 3))
    gram = a @ a.swapaxes(1, 2) + np.eye(5)
    solved = sketch.solve_definite(torch.from_numpy(gram), torch.from_numpy(gram @ x))
    np.testing.assert_allclose(solved.numpy(), x, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("zero", ["queries", "keys", "values"])
def test_constant_queries_keys_or_values_agree_with_the_definition(zero, rng) -> None:
    q, k, v = make_heads(rng, 2, 2, 100, 64)
    {"queries": q, "keys": k, "values": v}[zero][:] = 0.0 if zero == "queries" else 0.1
    index = build(q, k, v, SketchConfig())
    queries = rng.standard_normal((4, 64)).astype(np.float32)
    assert_sketches_agree(index, make_sketch(q, k, v, 2, 2), queries)
    if zero == "keys":
        bases, _, scores = reference.score_group(queries[:2], index, 0, SCALE)
        assert not scores.any()
        np.testing.assert_allclose(bases, SCALE * reference.LOG2_E * queries[:2] @ k[0, 0], rtol=1e-5)


@pytest.mark.parametrize("largest", [1e-44, 1e-37, 1e-20, 1e-12, 1e-8, 1e4, reference.LARGEST_NUMBER])
def test_keys_of_any_scale_agree_with_the_definition(largest, rng) -> None:
    q, k, v = make_heads(rng, 2, 2, 900, 64)
    k = (k / np.abs(k).max().astype(np.float64) * largest).astype(np.float32)
    index = build(q, k, v, SketchConfig())
    with np.errstate(all="raise", under="ignore"):
        want = make_sketch(q, k, v, 2, 2)
    assert index_fault(index) is None and index_fault(want) is None
    if largest < 1e-12:  # too small for codes to carry information: all are empty
        np.testing.assert_array_equal(index.codes, want.codes)
        np.testing.assert_array_equal(index.marks, want.marks)
        assert not index.query_transform.any() and not want.query_transform.any()
    else:
        assert_sketches_agree(index, want, q[:, -1] / max(1.0, largest))


@pytest.mark.parametrize("largest", [1e-44, 1e-37, reference.LARGEST_NUMBER])
def test_rows_of_any_scale_have_a_finite_sketch(largest, rng) -> None:
    rows = (rows.astype(np.float64) for rows in make_heads(rng, 2, 2, 9000, 64))
    q, k, v = ((x / np.abs(x).max() * largest).astype(np.float32) for x in rows)
    assert index_fault(build(q, k, v, SketchConfig())) is None
    assert index_fault(make_sketch(q, k, v, 2, 2)) is None


@pytest.mark.parametrize("fault", [np.nan, np.inf, 1e18])
def test_the_definition_refuses_nan_and_too_large_numbers(fault, rng) -> None:
    for which in range(3):
        rows = make_heads(rng, 1, 2, 100, 64)
        rows[which][0, 3, 5] = fault
        with pytest.raises(AssertionError, match="NaN or too large"):
            make_sketch(*rows, 2, 2)


def test_heads_are_independent_of_each_other_and_of_the_number_of_threads(rng) -> None:
    q, k, v = make_heads(rng, 3, 2, 2500, 64)
    config = SketchConfig(segment_len=1024)
    together = build(q, k, v, config, num_threads=3)
    before = torch.get_num_threads()
    for head in range(3):
        heads, group = slice(head, head + 1), slice(2 * head, 2 * head + 2)
        alone = build(q[group], k[heads], v[heads], config, num_threads=1)
        for name in ARRAYS:
            np.testing.assert_array_equal(getattr(alone, name)[0], getattr(together, name)[head])
    assert torch.get_num_threads() == before


def test_a_sample_of_the_queries_fits_nearly_as_well_as_all(rng, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = make_heads(rng, 1, 4, 2000, 64)
    exact = SCALE * reference.LOG2_E * k[0] @ q[0, -1]
    errors = []
    for per_dim in (1000, 16):
        monkeypatch.setattr(reference, "QUERIES_PER_DIM", per_dim)
        logits = logits_of(q[0, -1], build(q, k, v, SketchConfig()), 0)
        errors.append(np.square(logits - exact).mean() / exact.var())
    assert errors[1] < 1.2 * errors[0] < 0.05


@pytest.mark.parametrize(
    ("head_dim", "num_queries", "step"),
    [(128, 1, 1), (128, 8192, 1), (128, 8193, 2), (64, 8193, 3), (64, 3 * 131072, 96)],
)
def test_the_query_sample_takes_every_nth_query(head_dim, num_queries, step) -> None:
    assert reference.sample_of_queries(num_queries, head_dim) == slice(None, None, step)


def test_the_definition_is_fitted_to_the_same_sample_of_queries(rng) -> None:
    """Every other one of 8196 queries is in the sample. The others span few directions and change nothing."""
    q, k, v = make_heads(rng, 1, 4, 2049, 128)
    mixed = q.copy()
    mixed.reshape(-1, 128)[1::2, 1:] *= 0.01
    config, queries = SketchConfig(), q[:, 0]
    want = make_sketch(mixed, k, v, *config.words(128))
    assert_sketches_agree(build(mixed, k, v, config), want, queries)
    sampled = make_sketch(q, k, v, *config.words(128))
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(sampled, name), getattr(want, name))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("head_dim", "num_rows", "segment_len"), [(64, 3000, 1024), (128, 20_000, 8192)])
def test_a_gpu_sketch_agrees_with_a_cpu_sketch(head_dim, num_rows, segment_len, dtype, rng) -> None:
    q, k, v = make_heads(rng, 3, 2, num_rows, head_dim)
    config = SketchConfig(segment_len=segment_len)
    got = build(q, k, v, config, device="cuda", dtype=dtype)
    assert_sketches_agree(got, build(q, k, v, config, dtype=dtype), q[:, -1])
    again = build(q, k, v, config, device="cuda", dtype=dtype)
    np.testing.assert_array_equal(got.codes, again.codes)
    np.testing.assert_array_equal(got.marks, again.marks)
    assert unpack_codes(got.codes, num_rows, got.num_fine).any()
