"""The bytes that selectors report, at their papers' settings, are those that the papers' methods must read and hold.

Each value is derived from the method alone, as a share of the KV that full attention reads: S tokens of one KV head,
K and V of d components each. SparQ's is also the authors' own figure.
"""

from fractions import Fraction

import pytest
import torch

from csattn.config import SearchConfig
from csattn.selectors import ContextLayer, ContextView, prepare
from csattn.selectors.base import Prepared
from csattn.selectors.magicpig import PreparedMagicpig
from csattn.selectors.sparq import PreparedSparq

S, D, ITEM = 4096, 128, 2  # tokens, components, bytes per component
KV = S * 2 * D * ITEM  # bytes that full attention reads


def make_layer(num_tokens: int = S) -> ContextLayer:
    """Return a layer of one KV head and four query heads, in half precision."""
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, num_tokens, D, generator=generator).half()
    return ContextLayer(keys, values, 4, lambda: torch.rand(4, num_tokens, generator=generator))


def bytes_of_a_step(prepared: Prepared, keep: float) -> tuple[int, int]:
    """Return the bytes that one step reads to choose rows, and those of the chosen rows. Any row may be chosen."""
    view = ContextView(S, D**-0.5, SearchConfig(keep=keep, sink_len=0, window_len=1))
    selector = prepared.selector(view)
    chosen = selector.select(
        torch.randn(4, D, generator=torch.Generator().manual_seed(1)).numpy(), torch.zeros(1, 0, 2, D)
    )
    return selector.search_bytes, int(chosen.valid_len.sum()) * 2 * D * ITEM


@pytest.mark.parametrize(
    ("name", "keep", "held", "read"),
    [
        # Quest, arXiv:2406.10774: the minimum and maximum of the keys of each page of 16, and the chosen pages' rows
        ("quest", 1 / 16, Fraction(2 * D, 16 * 2 * D), Fraction(1, 16) + Fraction(1, 16)),
        # SparQ, arXiv:2312.04985: r = d / 4 components of all keys; a second copy of the keys
        ("sparq", 1 / 16, Fraction(1, 2), Fraction(1, 8) + Fraction(1, 16)),
        # PQCache, arXiv:2407.12820: m = 2 parts, here of 8 bits: two bytes a key, and 2 x 256 centroids of d / 2
        (
            "pqcache",
            1 / 16,
            Fraction(2 * S + 256 * D * ITEM, KV),
            Fraction(2 * S + 256 * D * ITEM, KV) + Fraction(1, 16),
        ),
        # H2O, arXiv:2306.14048: a float32 score per key, accumulated from attention; it reads the rows that it keeps
        ("h2o", 1 / 16, Fraction(4 * S, KV), Fraction(1, 16)),
        # the true Top-K reads all keys
        ("exact", 1 / 16, Fraction(0), Fraction(1, 2) + Fraction(1, 16)),
    ],
)
def test_reported_bytes_are_within_10_percent_of_the_papers(name, keep, held, read) -> None:
    prepared = prepare(name, make_layer())
    assert prepared.index_bytes / KV == pytest.approx(float(held), rel=0.1)
    assert sum(bytes_of_a_step(prepared, keep)) / KV == pytest.approx(float(read), rel=0.1)


@pytest.mark.parametrize("ratio", [2, 4, 8])
def test_sparq_reads_the_share_of_bytes_that_its_authors_configure(ratio) -> None:
    """The authors' code takes r = d / ratio and k = S / (2 ratio) to move 1 / ratio of the bytes."""
    read = bytes_of_a_step(PreparedSparq(make_layer(), num_components=D // ratio), 1 / (2 * ratio))
    assert sum(read) / KV == pytest.approx(1 / ratio, rel=0.1)


def test_magicpig_index_holds_four_bytes_per_table_and_key() -> None:
    """In arXiv:2410.16179, K = 10 and L = 150: four bytes per table and key, plus bucket starts and norms."""
    num_tokens = 16384
    prepared = PreparedMagicpig(make_layer(num_tokens), num_bits=10, num_tables=150)
    assert prepared.index_bytes / num_tokens == pytest.approx(600, rel=0.1)
