"""What rivals keep of keys, beside the selectors that define it; and the tables of the comparison."""

import pytest
import torch

from bench.decode.rivals.keys import attention_received, hash_tables, quantise
from bench.decode.rivals.report import RIVALS, kl_of_selectors, rival_tables, rivals_in
from csattn.selectors import ContextLayer
from csattn.selectors.key_clusters import nearest_centroids
from csattn.selectors.magicpig import PreparedMagicpig

NUM_KV_HEADS, NUM_KEYS, HEAD_DIM = 2, 300, 16


@pytest.fixture
def keys() -> torch.Tensor:
    return torch.randn(NUM_KV_HEADS, NUM_KEYS, HEAD_DIM) + torch.randn(NUM_KV_HEADS, 1, HEAD_DIM)


def test_hash_tables_are_those_of_the_selector(keys):
    prepared = PreparedMagicpig(ContextLayer(keys, keys, 4, lambda: keys), num_bits=5, num_tables=7)
    rows, starts, mean, norms = hash_tables(keys, prepared.projections, 7)
    assert torch.equal(rows, prepared.rows) and torch.equal(starts, prepared.starts)
    torch.testing.assert_close(mean, prepared.key_mean[:, 0])
    torch.testing.assert_close(norms, (keys - prepared.key_mean).norm(dim=-1))


def test_codes_are_those_of_the_nearest_centroids_and_lose_little(keys):
    centroids, codes = quantise(keys, num_subspaces=2, num_centroids=32)
    assert centroids.shape == (NUM_KV_HEADS, 2, 32, 8) and codes.shape == (2, NUM_KV_HEADS, NUM_KEYS)
    for b, part in enumerate(keys.split(8, dim=2)):
        assert torch.equal(codes[b].long(), nearest_centroids(part, centroids[:, b]))
        told = centroids[:, b][torch.arange(NUM_KV_HEADS)[:, None], codes[b].long()]
        at_start = (part - part[:, :: NUM_KEYS // 32][:, :32][:, :1]).square().mean()
        assert (part - told).square().mean() < 0.5 * at_start


def test_attention_received_is_the_sum_of_softmax_weights(keys):
    q = torch.randn(5, 6, HEAD_DIM)
    want = torch.zeros(NUM_KV_HEADS, NUM_KEYS)
    for of_step in q:
        for head, query in enumerate(of_step):
            want[head // 3] += (0.25 * keys[head // 3] @ query).softmax(0)
    torch.testing.assert_close(attention_received(q, keys, 0.25), want)


def make_case(variant: str, placement: str, context_len: int, tokens_per_s: float, **more) -> dict:
    case = {"kind": "e2e", "context_len": context_len, "batch_size": 1, "variant": variant, "placement": placement}
    case |= {"schedule": "one layer ahead" if variant == "default" else "none", "tokens_per_s": tokens_per_s}
    return case | {"p50_us": 1e6 / tokens_per_s, "p99_us": 2e6 / tokens_per_s, "link_bytes": 3_000_000, **more}


def test_tables_set_speed_beside_quality():
    cases = [
        make_case("default", "hybrid", 8192, 150.0, hit_rate=0.9),
        make_case("h2o", "device", 8192, 200.0),
        make_case("sparq", "host", 8192, 30.0, cpu_search_us=700.4),
        {"kind": "e2e", "context_len": 16384, "batch_size": 1, "variant": "sparq", "placement": "host",
         "schedule": "none", "refused": "too large"},
    ]  # fmt: skip
    machine = {"gpu": "G", "driver": "1", "cuda": "2", "cpus": 3, "cpu": "C", "torch": "4", "triton": "5"}
    rates = {"read_gbps": 1.0, "copy_gbps": 1.0, "h2d_gbps": 1.0}
    text = rival_tables({"cases": cases, "keep": 0.05, "machine": machine, "ceilings": rates, "shape": "S"})
    assert "| H2O | 0.75 |" in text and "| SparQ | 5.00 |" in text and "| MagicPIG |  |" in text
    assert f"| 8K | 1 | SparQ | 30 | 33.33 | 66.67 | 3.0 | 700 |  | {kl_of_selectors(0.05)['sparq']:.4f} |" in text
    assert "| 16K | 1 | SparQ | — |" in text and "too large" in text
    fastest_first = [line for line in text.splitlines() if line.startswith("| 8K")]
    assert [("H2O" in line, "SparQ" in line) for line in fastest_first] == [(1, 0), (0, 0), (0, 1)]


def test_quality_is_known_of_every_method():
    assert set(kl_of_selectors(0.05)) == {*RIVALS, "default"}
    assert kl_of_selectors(0.03) == {}


def test_a_run_without_rivals_is_none_of_theirs():
    assert rivals_in([make_case("default", "hybrid", 8192, 150.0), make_case("full", "device", 8192, 150.0)]) == []
