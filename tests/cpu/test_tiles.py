"""Kernels with narrower vectors, for machines with narrow registers, give the same results bit for bit."""

import importlib.util
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any

import numba
import numpy as np
import pytest
from numba import types

from csattn.cpu import simd
from csattn.search import code_sums, sketch_scores
from workers.model.cpu import linear


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A function that loads a copy of a module, compiled for registers of four lanes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simd, "TILE_LANES", 4)
        patch.setattr(simd, "I32xTile", simd.Vector(types.int32, 4))
        patch.setattr(simd, "F32xTile", simd.Vector(types.float32, 4))
        # the usual cache would mix them with this machine's
        patch.setattr(numba.config, "CACHE_DIR", str(tmp_path_factory.mktemp("narrow")))

        @cache
        def make(module: ModuleType) -> Any:
            assert module.__file__ is not None
            spec = importlib.util.spec_from_file_location(module.__name__, module.__file__)
            assert spec is not None and spec.loader is not None
            other = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(other)
            return other

        yield make


@pytest.mark.parametrize("group_size", [1, 5])
def test_sketch_scores_have_the_same_bits_with_narrow_tiles(
    group_size: int, narrow: Any, rng: np.random.Generator
) -> None:
    num_fine, num_coarse, num_blocks = 2, 1, 3
    codes = rng.integers(0, 2**32, num_blocks * (num_fine + num_coarse) * 64, np.uint32)
    multipliers = rng.integers(-(2**31), 2**31, group_size * 8).astype(np.int32)
    offsets, stride = rng.integers(-(2**15), 2**15, group_size).astype(np.int32), num_blocks * 64
    found = []
    for module in (sketch_scores, narrow(sketch_scores)):
        scores = np.zeros(group_size * stride, np.uint16)
        of_rows = multipliers, 8, offsets, 1, group_size
        module.score_blocks(codes, num_fine, num_coarse, 1, num_blocks, *of_rows, scores, stride, 0)
        found.append(scores)
    assert found[0].any()
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("group_size", [1, 5])
def test_code_sums_have_the_same_bits_with_narrow_tiles(group_size: int, narrow: Any, rng: np.random.Generator) -> None:
    num_fine, num_words, num_blocks = 2, 3, 3
    codes = rng.integers(0, 2**32, num_blocks * num_words * 64, np.uint32)
    row_weights = num_blocks * 64 * code_sums.WEIGHT_BYTES // 4
    weights = rng.integers(-(2**31), 2**31, group_size * row_weights).astype(np.int32)
    scales = rng.random(group_size, np.float32)
    found = []
    for module in (code_sums, narrow(code_sums)):
        sums = np.ones(group_size * num_fine * 32, np.float32)
        of_rows = weights, row_weights, scales, sums, num_fine * 32
        module.add_code_sums(codes, num_fine, num_words, 0, num_blocks, *of_rows)
        found.append(sums)
    assert (found[0] != 1).all()
    np.testing.assert_array_equal(*found)


def test_linear_products_have_the_same_bits_with_narrow_tiles(narrow: Any, rng: np.random.Generator) -> None:
    num_rows, num_in, num_out = 3, 37, 5
    x, weight = rng.standard_normal((num_rows, num_in), np.float32), rng.standard_normal((num_out, num_in), np.float32)
    found = []
    for module in (linear, narrow(linear)):
        sums = np.zeros((num_rows + linear.TILE, 16), np.float32)
        module.products(x.reshape(-1), num_rows, weight.reshape(-1), num_in, 0, num_out, num_in, sums.reshape(-1))
        found.append(sums[:num_rows, :num_out])
    np.testing.assert_allclose(found[0], x @ weight.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(*found)
