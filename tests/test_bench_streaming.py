"""The benchmark of endless generation measures what it says."""

import pytest
import torch

from bench import streaming
from tests.tiny import loaded, token_ids
from workers.streaming.config import StreamConfig


def test_the_definition_of_the_benchmark_is_the_stream() -> None:
    model, config = loaded(), StreamConfig(sink_len=4, window_len=12)
    ids = torch.from_numpy(token_ids(61)).long()
    got = streaming.stream_nll(model, config, ids, 7)
    torch.testing.assert_close(got, streaming.definition(model, ids, config), rtol=1e-3, atol=1e-3)
    other = streaming.definition(model, ids, StreamConfig(sink_len=2, window_len=14))
    assert (got - other).abs().max() > 0.01, "which rows are kept should matter"


@pytest.mark.parametrize("policy", streaming.MEMORY_CONFIGS)
def test_memory_is_read_while_a_policy_generates(policy) -> None:
    measured = streaming.memory(streaming.MEMORY_CONFIGS[policy], 60)
    assert (measured["config"]["policy"], measured["num_tokens"]) == (policy, 60)
    assert 10 < measured["resident_first_mb"] <= measured["resident_most_mb"]
