"""Requests with the selectors that ours is compared with, on the CPU engine: as in a session, alone and together."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from csattn.artifact import Artifact
from csattn.attention import reference
from csattn.config import SearchConfig
from csattn.selection import Rest, Selection
from csattn.selector_names import SELECTOR_NAMES
from tests.workers.engine.talks import SELECTORS, Talk, alone, assert_same, random_talks, run_together
from tests.workers.engine.test_cpu_engine import _Failing, assert_as_in_a_session, make_engine, opened
from workers.engine.plain_rows import attend_row
from workers.serving.step_engine import StepRow

CONFIG = SearchConfig(keep=0.05, window_len=64)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory) -> Iterator[list[Artifact]]:
    made = [opened(tmp_path_factory.mktemp("store"), "llama", context_id) for context_id in (0, 1)]
    yield made
    for artifact in made:
        artifact.close()


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("selector", [name for name in SELECTOR_NAMES if name not in SELECTORS])
def test_they_say_what_transformers_says_over_the_artifact(artifacts, selector, lookahead) -> None:
    config = SearchConfig(keep=0.05, window_len=64, lookahead=lookahead)
    assert_as_in_a_session(artifacts[:1], "llama", config, selector)


def test_together_they_say_what_each_says_alone(artifacts, rng) -> None:
    with make_engine(artifacts) as engine:
        talks = random_talks(rng, 14, SELECTOR_NAMES)
        want = [alone(engine, talk) for talk in talks]
    with make_engine(artifacts, num_threads=2, max_rows=11) as engine:
        run_together(engine, talks, rng)
    for got, wanted in zip(talks, want, strict=True):
        assert_same(got, wanted)


def test_a_selector_that_remembers_forgets_a_step_that_failed(artifacts) -> None:
    """H2O counts the attention of every query: in the step that is run again, once."""
    with make_engine(artifacts) as engine:
        want = alone(engine, Talk(0, CONFIG, "h2o", [1, 2, 3], 8))
    with make_engine(artifacts, searcher=_Failing(1)) as engine:
        got = Talk(0, CONFIG, "h2o", [1, 2, 3], 8)
        engine.open(0, 0, CONFIG, "h2o")
        engine.open(1, 0, CONFIG, "csattn")  # its search is lost in the last layer
        while not got.done:
            rows = [StepRow(0, token) for token in got.next_rows(3)]
            try:
                result = engine.step([*rows, StepRow(1, 9)], want_logits=True)
            except RuntimeError:
                continue
            got.take(len(rows), result.next_ids[:-1], result.logits[:-1])
        assert not engine._searcher.fail
    assert_same(got, want)


def test_what_a_selector_makes_of_a_context_is_made_once_and_goes_with_the_context(artifacts) -> None:
    with make_engine(artifacts) as engine:
        engine.open(0, 0, CONFIG, "quest")
        engine.open(1, 0, SearchConfig(keep=0.1, window_len=32), "quest")
        engine.open(2, 0, CONFIG, "csattn")
        first, second, ours = (engine.request(slot) for slot in (0, 1, 2))
        assert ours.selectors is None
        assert list(first.context.prepared) == ["quest"]
        for one, other, made in zip(first.selectors, second.selectors, first.context.prepared["quest"], strict=True):
            assert one is not other
            assert one._prepared is other._prepared is made
        for slot in (0, 1, 2):
            engine.close_slot(slot)
        engine.remove_context(0)
        engine.add_context(0, artifacts[0])
        engine.open(0, 0, CONFIG, "csattn")
        assert not engine.request(0).context.prepared


@pytest.mark.parametrize("num_index_heads", [2, 4], ids=["shared by the group", "one per query head"])
def test_a_row_attends_with_weights_and_the_rest(artifacts, num_index_heads, rng) -> None:
    scale, tail = 0.25, torch.randn(2, 5, 2, 16)
    with make_engine(artifacts) as engine:
        engine.open(0, 0, CONFIG, "sparq")
        request = engine.request(0)
        first, second = request.near
        valid_len = rng.integers(0, 6, num_index_heads).astype(np.int32)
        kv_indices = np.full((num_index_heads, 6), -1, np.int32)
        for head, valid in enumerate(valid_len):
            kv_indices[head, :valid] = np.sort(rng.choice(np.arange(first, second), valid, replace=False))
        weights = np.where(kv_indices >= 0, rng.standard_normal(kv_indices.shape), 0).astype(np.float32)
        rest = Rest(rng.standard_normal((4, 16), np.float32), rng.random(4, np.float32))
        q = torch.randn(4, 16)
        out = attend_row(q, request, 1, tail, Selection(kv_indices, valid_len, weights, rest), scale)
        context = request.context.kv[1]
        for head in range(4):
            chosen = head * num_index_heads // 4
            far = kv_indices[chosen, : valid_len[chosen]].tolist()
            of_head = context[head // 2]
            rows = torch.cat([of_head[far], of_head[:first], of_head[second:], tail[head // 2]])[None, None]
            log_weights = torch.zeros(rows.shape[2])
            log_weights[: len(far)] = torch.from_numpy(weights[chosen, : len(far)])
            attended = reference.attend(
                q[None, None, head : head + 1], rows[..., 0, :], rows[..., 1, :], scale, log_weights=log_weights
            )[0][0, 0, 0]
            want = (1 - rest.share[head]) * attended + rest.share[head] * torch.from_numpy(rest.out[head])
            torch.testing.assert_close(out[head], want, rtol=1e-4, atol=1e-5)
