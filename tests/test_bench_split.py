"""The benchmark of several GPUs: their shares of a workload and of random weights are together the whole."""

from dataclasses import replace

import pytest
import torch

from bench.decode.variants import INDEXES
from bench.decode.widened import Heads
from bench.decode.workload import Workload
from bench.random_weights import random_weights
from bench.shapes import shape_named
from bench.split import CLOSE, ShareOfWorkload, compare, share_of
from bench.timing import GateError
from csattn.share import Share
from tests.test_bench_decode import built_once, recording  # noqa: F401 (fixtures)

CPU = torch.device("cpu")
HEADS = Heads.of(shape_named("llama-3.1-8b"))


def test_shares_of_a_workload_have_its_heads_each_once(recording) -> None:  # noqa: F811
    whole = Workload(recording, HEADS, 192, 2, CPU)
    parts = [ShareOfWorkload(recording, HEADS, 192, 2, CPU, share=Share(rank, 2)) for rank in range(2)]
    for layer_idx in range(2):
        assert torch.equal(torch.cat([part.rows(layer_idx) for part in parts]), whole.rows(layer_idx))
        queries = torch.cat([part.queries(layer_idx) for part in parts], dim=2)
        assert torch.equal(queries, whole.queries(layer_idx))
        index = whole.index(layer_idx, INDEXES["default"])
        of_parts = [part.index(layer_idx, INDEXES["default"]) for part in parts]
        for name in ("codes", "marks", "key_mean", "query_transform", "value_mean", "value_transform"):
            assert torch.equal(torch.cat([getattr(part, name) for part in of_parts]), getattr(index, name))


def test_shares_of_random_weights_compute_what_the_whole_computes() -> None:
    shape = shape_named("llama-3.2-1b")
    weights = random_weights(replace(shape, layers=shape.layers[:1], vocab_size=130), CPU, torch.float32)
    parts = [share_of(weights, Share(rank, 2)) for rank in range(2)]
    x = torch.randn(3, weights.layers[0].down.weight.shape[1])
    added = [half @ part.layers[0].down.weight.T for part, half in zip(parts, x.chunk(2, dim=1), strict=True)]
    torch.testing.assert_close(sum(added), x @ weights.layers[0].down.weight.T, rtol=1e-4, atol=1e-4)
    assert [len(part.layers[0].qkv) for part in parts] == [1, 1]
    assert all(part.layers[0].qkv[0].weight.shape[0] == part.spec.heads.qkv_width for part in parts)


def test_logits_that_are_others_are_not_timed() -> None:
    logits = torch.randn(2, 1000)
    assert compare(logits + 0.1 * CLOSE, logits)["same_tokens"] == 1.0
    with pytest.raises(GateError, match="of their spread apart"):
        compare(logits.roll(1, dims=1), logits)
