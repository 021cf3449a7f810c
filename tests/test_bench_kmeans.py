"""The benchmark of codebooks measures FAISS on CPUs and the batched program."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from bench.kmeans import measure
from csattn.config import ListConfig, preset


def test_programs_are_measured_beside_each_other() -> None:
    pytest.importorskip("faiss")
    config = preset("lists")
    assert isinstance(config, ListConfig)
    queries = torch.randn(2, 40, 2 * config.num_subspaces, generator=torch.Generator().manual_seed(0))
    with ThreadPoolExecutor(2) as threads:
        cases = measure(queries, replace(config, num_centroids=8), threads)
    assert [case["program"].split(",")[0] for case in cases] == ["FAISS", "torch"]
