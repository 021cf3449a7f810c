"""The benchmark of endless generation agrees with its definition."""

import json

import pytest
import torch

from bench import streaming
from tests.tiny import loaded, token_ids
from workers.streaming.config import StreamConfig


def test_stream_nll_agrees_with_the_definition() -> None:
    model, config = loaded(), StreamConfig(sink_len=4, window_len=12)
    ids = torch.from_numpy(token_ids(61)).long()
    got = streaming.stream_nll(model, config, ids, 7)
    torch.testing.assert_close(got, streaming.definition(model, ids, config), rtol=1e-3, atol=1e-3)
    other = streaming.definition(model, ids, StreamConfig(sink_len=2, window_len=14))
    assert (got - other).abs().max() > 0.01, "which rows are kept should matter"


@pytest.mark.parametrize("policy", streaming.MEMORY_CONFIGS)
def test_memory_is_sampled_while_a_policy_generates(policy) -> None:
    measured = streaming.memory(streaming.MEMORY_CONFIGS[policy], 60)
    assert (measured["config"]["policy"], measured["num_tokens"]) == (policy, 60)
    assert 10 < measured["resident_first_mb"] <= measured["resident_most_mb"]


def test_figures_that_stay_in_a_file_keep_their_own_commit(tmp_path, monkeypatch) -> None:
    path = tmp_path / "streaming.json"
    monkeypatch.setattr(streaming, "memory", lambda *_: {})
    monkeypatch.setattr(streaming, "perplexity", lambda _: {})
    for commit, words in (("one", ["--policy", "h2o"]), ("two", ["--perplexity"])):
        monkeypatch.setattr(streaming, "machine", lambda commit=commit: {"commit": commit, "command": "python"})
        monkeypatch.setattr("sys.argv", ["bench.streaming", "--json", str(path), *words])
        streaming.main()
    kept = json.loads(path.read_text())
    assert (kept["memory, h2o"]["commit"], kept["perplexity"]["commit"]) == ("one", "two")
