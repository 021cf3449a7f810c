"""Own rows of a request, copied into another one with the same first tokens; and requests without a context."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from csattn.artifact import Artifact, open_artifact
from csattn.config import SearchConfig, preset
from csattn.errors import ConfigError, ContextError
from index_build.pipeline import build_artifact
from tests.tiny import loaded, token_ids
from tests.workers.engine.talks import Talk, alone
from workers.engine.cpu.engine import CpuEngine
from workers.serving.step_engine import NO_CONTEXT, StepRow

TOKENS = token_ids(100, seed=3).tolist()


@pytest.fixture(scope="module", params=["default", "lists"])
def artifact(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Artifact]:
    path = build_artifact(loaded(), token_ids(500), preset(request.param), tmp_path_factory.mktemp("store")).path
    with open_artifact(path) as opened:
        yield opened


def make_engine(artifact: Artifact | None, family: str = "llama") -> CpuEngine:
    engine = CpuEngine(loaded(family), max_requests=3, tail_capacity=120, num_threads=1)
    if artifact is not None:
        engine.add_context(0, artifact)
    return engine


def feed(engine: CpuEngine, request_slot: int, token_ids: list[int], at_a_time: int = 7) -> np.ndarray:
    """Feed these tokens and return the logits after the last one."""
    for start in range(0, len(token_ids), at_a_time):
        logits = engine.step(
            [StepRow(request_slot, i) for i in token_ids[start : start + at_a_time]], want_logits=True
        ).logits
    return logits[-1].copy()


@pytest.mark.parametrize("selector", ["csattn", "full"])
@pytest.mark.parametrize("context_id", [0, NO_CONTEXT])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_request_continues_bitwise_from_rows_copied_from_another(artifact, selector, context_id, lookahead) -> None:
    """Also if rows have left the window and joined the lists."""
    config = SearchConfig(keep=0.05, window_len=16, lookahead=lookahead)
    with make_engine(artifact) as engine:
        engine.open(0, context_id, config, selector)
        want = feed(engine, 0, TOKENS)
        first, second = (engine.read_rows(0, start, stop) for start, stop in ((0, 40), (40, 77)))
        more = feed(engine, 0, [5, 6])  # the first request continues before the copies are collected
        engine.close_request(0)
        engine.open(2, context_id, config, selector)
        engine.write_rows(2, first())
        engine.write_rows(2, second())
        np.testing.assert_array_equal(feed(engine, 2, TOKENS[77:], 3), want)
        np.testing.assert_array_equal(feed(engine, 2, [5, 6]), more)


def test_read_rows_are_copies_and_writing_them_changes_no_other_slot(artifact) -> None:
    with make_engine(artifact) as engine:
        for request_slot in (0, 1):
            engine.open(request_slot, 0, SearchConfig(), "csattn")
            feed(engine, request_slot, TOKENS[request_slot:][:10])
        [rows], [beside] = ([engine.read_rows(request_slot, 2, 9)()] for request_slot in (0, 1))
        kept = rows.clone()
        engine.open(2, 0, SearchConfig(), "csattn")
        engine.write_rows(2, rows)
        rows.fill_(torch.nan)
        assert torch.equal(engine.read_rows(0, 2, 9)(), kept) and torch.equal(engine.read_rows(1, 2, 9)(), beside)
        assert torch.equal(engine.read_rows(2, 0, 7)(), kept)


def test_reading_counts_only_computed_tokens_not_written_rows(artifact) -> None:
    with make_engine(artifact) as engine:
        engine.open(0, 0, SearchConfig(), "full")
        feed(engine, 0, TOKENS)
        rows = engine.read_rows(0, 0, 100)()
        engine.open(1, 0, SearchConfig(), "full")
        engine.write_rows(1, rows)
        feed(engine, 1, [5])
        assert [engine.reading(request_slot).rows for request_slot in (0, 1)] == [500 + 50.5, 500 + 101]


def test_rows_beyond_the_tail_capacity_are_refused(artifact) -> None:
    with make_engine(artifact) as engine:
        engine.open(0, 0, SearchConfig(), "csattn")
        feed(engine, 0, TOKENS)
        rows = engine.read_rows(0, 0, 100)()
        engine.open(1, 0, SearchConfig(), "csattn")
        engine.write_rows(1, rows)
        with pytest.raises(ContextError, match="120"):
            engine.write_rows(1, rows)
        assert torch.equal(engine.read_rows(1, 0, 100)(), rows)


def test_rows_for_a_request_that_reuses_choices_are_refused(artifact) -> None:
    with make_engine(artifact) as engine:
        engine.open(0, 0, SearchConfig(), "csattn")
        feed(engine, 0, TOKENS)
        engine.open(1, 0, SearchConfig(search_period=3), "csattn")
        with pytest.raises(ConfigError, match="search_period is 3"):
            engine.write_rows(1, engine.read_rows(0, 0, 100)())


@pytest.mark.parametrize("family", ["llama", "gemma4_text"])
def test_logits_without_a_context_equal_transformers(family: str) -> None:
    with make_engine(None, family) as engine:
        got = alone(engine, Talk(NO_CONTEXT, SearchConfig(keep=0.02), "csattn", TOKENS[:60], 5))
        with pytest.raises(ConfigError, match="no context 0"):
            engine.open(0, 0, SearchConfig(), "csattn")
    whole = torch.tensor(TOKENS[:60] + got.tokens)
    with torch.inference_mode():
        want = loaded(family).model(whole[None]).logits[0, 59:-1]
    np.testing.assert_allclose(np.stack(got.logits), want.numpy(), rtol=1e-3, atol=1e-4)
    assert got.tokens == want.argmax(-1).tolist()


def test_requests_with_and_without_a_context_in_one_step_get_the_bits_they_get_alone(artifact) -> None:
    config = SearchConfig(keep=0.05, window_len=16)
    with make_engine(artifact) as engine:
        want = [alone(engine, Talk(context_id, config, "csattn", TOKENS[:20], 6)) for context_id in (NO_CONTEXT, 0)]
        for request_slot, context_id in enumerate((NO_CONTEXT, 0)):
            engine.open(request_slot, context_id, config, "csattn")
        for start in range(0, 20, 5):
            rows = [StepRow(request_slot, token) for token in TOKENS[start : start + 5] for request_slot in (1, 0)]
            result = engine.step(rows, want_logits=True)
        for request_slot in (0, 1):
            np.testing.assert_array_equal(result.logits[-1 - request_slot], want[request_slot].logits[0])
