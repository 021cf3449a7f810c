"""Every basis keeps dot products; the whitened one gives keys unit covariance and deals energy out evenly."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from index_build.basis import make_bases as make_bases_on


def make_bases(*given):
    with ThreadPoolExecutor(2) as threads:
        return make_bases_on(*given, threads)


def bases(kind, queries: NDArray[np.float32], keys: NDArray[np.float32], num_subspaces: int):
    """The two bases of one head."""
    both = make_bases(kind, torch.from_numpy(queries)[None], torch.from_numpy(keys)[None], num_subspaces)
    return tuple(basis[0].numpy() for basis in both)


@pytest.mark.parametrize("kind", ["plain", "rope_pairs", "key_whitened"])
@pytest.mark.parametrize(("head_dim", "num_subspaces"), [(16, 4), (64, 16), (64, 64), (80, 20), (16, 1)])
def test_scores_do_not_change(kind, head_dim: int, num_subspaces: int, rng: np.random.Generator) -> None:
    stretch = rng.uniform(0.1, 10, head_dim)
    queries = (rng.standard_normal((300, head_dim)) * stretch + 1).astype(np.float32)
    keys = (rng.standard_normal((200, head_dim)) * stretch[::-1]).astype(np.float32)
    query_basis, key_basis = bases(kind, queries, keys, num_subspaces)
    want = queries @ keys.T
    np.testing.assert_allclose((queries @ query_basis) @ (keys @ key_basis).T, want, atol=1e-3 * np.abs(want).max())


def test_whitened_keys_have_unit_covariance_and_subspaces_like_energy(rng: np.random.Generator) -> None:
    keys = (rng.standard_normal((5000, 32)) @ (rng.standard_normal((32, 32)) + 8 * np.eye(32))).astype(np.float32)
    queries = (rng.standard_normal((5000, 32)) @ (rng.standard_normal((32, 32)) + 8 * np.eye(32))).astype(np.float32)
    query_basis, key_basis = bases("key_whitened", queries, keys, 8)
    white = keys @ key_basis
    np.testing.assert_allclose(white.T @ white / len(white), np.eye(32), atol=0.02)
    energy = ((queries @ query_basis) ** 2).mean(0).reshape(8, 4).sum(1)
    assert energy.max() < 2.5 * energy.min()


@pytest.mark.parametrize("kind", ["plain", "rope_pairs", "key_whitened"])
def test_heads_do_not_see_each_other(kind) -> None:
    queries, keys = torch.randn(3, 500, 16), torch.randn(3, 400, 16)
    for got, want in zip(make_bases(kind, queries, keys, 4), make_bases(kind, queries[1:2], keys[1:2], 4), strict=True):
        torch.testing.assert_close(got[1:2], want)


def test_bits_do_not_depend_on_threads_or_on_the_heads_beside_it() -> None:
    queries, keys = torch.randn(2, 3000, 128), torch.randn(2, 1500, 128)
    num_threads = torch.get_num_threads()
    found = []
    for count in (1, 2, 4):
        torch.set_num_threads(count)
        found.append(make_bases("key_whitened", queries, keys, 16))
        heads = [make_bases("key_whitened", queries[[head]], keys[[head]], 16) for head in (0, 1)]
        found.append(tuple(torch.cat(bases) for bases in zip(*heads, strict=True)))
    torch.set_num_threads(num_threads)
    for other in found[1:]:
        assert all(torch.equal(got, want) for got, want in zip(other, found[0], strict=True))


def test_rope_pairs_stay_in_one_subspace() -> None:
    query_basis, _ = bases("rope_pairs", np.zeros((1, 16), np.float32), np.zeros((1, 16), np.float32), 4)
    order = query_basis.argmax(axis=0).reshape(4, 4)
    for dims in order.tolist():
        assert {d % 8 for d in dims if d < 8} == {d % 8 for d in dims if d >= 8}


def test_keys_that_do_not_vary_give_a_finite_basis() -> None:
    both = bases("key_whitened", np.ones((10, 8), np.float32), np.zeros((10, 8), np.float32), 2)
    assert all(np.isfinite(basis).all() for basis in both)
