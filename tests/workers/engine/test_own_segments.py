"""Requests whose own rows become segments on the CPU: they agree with the definition, alone and together."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from csattn.artifact import Artifact, open_artifact
from csattn.config import SearchConfig, SketchConfig, preset
from csattn.errors import ConfigError
from csattn.sketch.own import Growth
from index_build.pipeline import build_artifact
from offload.codecs.formats import KvFormat
from tests.tiny import loaded, token_ids
from tests.workers.engine.definition import defined_logits
from tests.workers.engine.talks import Talk, alone, assert_same, reading_of, run_together, with_drafts
from workers.engine.cpu.context import HostBudget
from workers.engine.cpu.engine import CpuEngine
from workers.engine.own_segments import OwnSegments
from workers.serving.step_engine import StepRow

GROWTH = Growth(segment_len=64, least_near=16)
CONFIG = SearchConfig(keep=0.05, window_len=20)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Artifact]]:
    store = tmp_path_factory.mktemp("store")
    made = []
    for number, context_len in enumerate((700, 391)):
        ids = token_ids(context_len, seed=number)
        made.append(open_artifact(build_artifact(loaded(), ids, preset("default"), store).path))
    yield made
    for artifact in made:
        artifact.close()


def make_engine(artifacts: list[Artifact], **options: object) -> CpuEngine:
    engine = CpuEngine(loaded(), **{"max_requests": 4, "num_threads": 1, "growth": GROWTH, **options})
    for context_id, artifact in enumerate(artifacts):
        engine.add_context(context_id, artifact)
    return engine


@pytest.mark.parametrize(("lookahead", "search_period"), [(0, 1), (1, 1), (1, 3)])
def test_logits_with_own_segments_equal_the_definition(
    artifacts: list[Artifact], lookahead: int, search_period: int
) -> None:
    """The steps have no segment, then one, then two."""
    config = SearchConfig(keep=0.05, window_len=20, lookahead=lookahead, search_period=search_period)
    question = token_ids(142, seed=1).tolist()
    with make_engine(artifacts[:1]) as engine:
        got = alone(engine, Talk(0, config, "csattn", question, 12))
    fed = [*question, *got.tokens[:-1]]
    want = defined_logits(loaded(), artifacts[0], config, "csattn", fed, GROWTH)[-12:]
    differences = np.abs(np.stack(got.logits) - want).max(axis=1)
    # queries that differ in their last bits may also differ in an integer of the sketch's scores, and so may all later
    # rows and their codes; without codes of own rows, logits differ by 1 to 7
    assert np.median(differences) < 0.02, differences


@pytest.mark.parametrize(("lookahead", "rest"), [(0, None), (1, None), (0, "none"), (0, "moments")])
def test_drafts_change_no_bit_as_segments_are_made(
    artifacts: list[Artifact], lookahead: int, rest: str | None, rng: np.random.Generator
) -> None:
    config = SearchConfig(keep=0.05, window_len=20, lookahead=lookahead, rest=rest)
    with make_engine(artifacts, max_requests=1) as engine:
        assert engine.takes_drafts(artifacts[0], config, "csattn")
        want = alone(engine, Talk(0, config, "csattn", token_ids(30, seed=1).tolist(), 240))
        got, reading = with_drafts(engine, want, rng)
        assert_same(got, want)
        assert reading == reading_of(engine, want)


def test_a_segment_is_made_in_time_if_all_rows_of_a_step_but_one_were_drafts(artifacts: list[Artifact]) -> None:
    """As many rows stay near as a step may have, and drafts become certain only after the step."""
    config, growth, fed = replace(CONFIG, window_len=4), replace(GROWTH, least_near=8), token_ids(90, seed=1).tolist()
    with make_engine(artifacts[:1], max_requests=1, growth=growth, max_rows=8) as engine:
        want = alone(engine, Talk(0, config, "csattn", fed, 1)).logits[0]
        engine.open(0, 0, config, "csattn")
        for start in range(0, 90, 8):
            first, *draft = fed[start : start + 8]
            rows = [StepRow(0, first), *(StepRow(0, token_id, is_draft=True) for token_id in draft)]
            got = engine.step(rows, want_logits=True).logits[-1].copy()
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "options", [{"host_budget": HostBudget(32 << 20, CONFIG, "csattn")}, {"kv_format": KvFormat.parse("fp8")}]
)
def test_drafts_change_no_bit_where_rows_are_gathered_or_coded(
    artifacts: list[Artifact], options: dict, rng: np.random.Generator
) -> None:
    with make_engine(artifacts[:1], max_requests=1, **options) as engine:
        want = alone(engine, Talk(0, CONFIG, "csattn", token_ids(60, seed=1).tolist(), 60))
        got, reading = with_drafts(engine, want, rng)
        assert_same(got, want)
        assert reading == reading_of(engine, want)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_requests_that_grow_in_shared_steps_get_the_bits_they_get_alone(
    artifacts: list[Artifact], num_threads: int, rng: np.random.Generator
) -> None:
    """However their questions are split over steps."""
    talks = []
    for number, question_len in enumerate((83, 84, 85, 150, 220, 1)):
        config = SearchConfig(keep=0.05, window_len=20, lookahead=number % 2, search_period=1 + 2 * (number % 3 == 2))
        question = token_ids(question_len, seed=number).tolist()
        talks.append(Talk(number % 2, config, "csattn", question, 10))
    with make_engine(artifacts) as engine:
        want = [alone(engine, talk) for talk in talks]
    with make_engine(artifacts, num_threads=num_threads, max_rows=11) as engine:
        run_together(engine, talks, rng)
    for got, wanted in zip(talks, want, strict=True):
        assert_same(got, wanted)


def test_a_context_within_a_host_budget_gives_nearly_the_same_logits(artifacts: list[Artifact]) -> None:
    """The context's rows are gathered; own rows are in memory."""
    talk = Talk(0, CONFIG, "csattn", token_ids(150, seed=2).tolist(), 6)
    with make_engine(artifacts[:1]) as engine:
        want = alone(engine, talk)
    budget = HostBudget(32 << 20, CONFIG, "csattn")
    with make_engine(artifacts[:1], host_budget=budget) as engine:
        got = alone(engine, talk)
    np.testing.assert_allclose(np.stack(got.logits), np.stack(want.logits), atol=2e-2)


def test_counts_and_fidelity_include_own_segments(artifacts: list[Artifact]) -> None:
    with make_engine(artifacts[:1]) as engine:
        engine.open(0, 0, CONFIG, "csattn")
        ids = token_ids(149, seed=2).tolist()
        for start in range(0, 149, 16):
            engine.step([StepRow(0, token_id) for token_id in ids[start : start + 16]])
        before = engine.requests[0].count.near_rows, engine.requests[0].count.far_rows
        result = engine.step([StepRow(0, 1)], watch=(0, 1))
        count = engine.requests[0].count
        num_layers = engine.num_layers
        # of 150 own rows 128 are in segments, and 4 * 0.05 of those are chosen
        assert count.near_rows - before[0] == num_layers * (CONFIG.sink_len + CONFIG.window_len + 150 - 128)
        assert count.far_rows - before[1] == num_layers * (round(0.05 * 700) + round(0.2 * 128))
        assert result.fidelity is not None and 0 < result.fidelity.recall < 1


def test_a_request_with_nan_rows_gets_no_next_token_and_others_continue(artifacts: list[Artifact]) -> None:
    """The thread that makes segments does not fail on NaN."""
    embedding = loaded().model.model.embed_tokens.weight.data
    kept = embedding[7].clone()
    with make_engine(artifacts[:1]) as engine:
        engine.open(0, 0, CONFIG, "csattn")
        engine.open(1, 0, CONFIG, "csattn")
        embedding[7] = np.nan
        try:
            engine.step([StepRow(0, 7)])
        finally:
            embedding[7] = kept
        for _ in range(100):
            broken, sound = engine.step([StepRow(0, 5), StepRow(1, 5)]).next_ids.tolist()
        assert broken == -1 and sound >= 0


def test_a_plan_drops_sketches_of_fewer_segments_as_a_request_grows(artifacts: list[Artifact]) -> None:
    with make_engine(artifacts[:1]) as engine:
        engine.open(0, 0, CONFIG, "csattn")
        for _ in range(64 * 4 + 30):
            engine.step([StepRow(0, 1)])
        (plan,) = engine._plans._plans.values()
        assert plan.owns[0].num_rows == 64 * 4


def test_a_step_fails_while_the_segment_thread_cannot_start_and_can_be_repeated(
    artifacts: list[Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps before the first one that reads the segment succeed, and the failed step changes nothing."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    talk = Talk(0, CONFIG, "csattn", token_ids(90, seed=3).tolist(), 1)
    with make_engine(artifacts[:1]) as engine:
        want = alone(engine, talk)
    with make_engine(artifacts[:1], max_rows=10) as engine, monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        engine.open(0, 0, CONFIG, "csattn")
        steps = [[StepRow(0, i) for i in talk.question[start : start + 10]] for start in range(0, 90, 10)]
        for rows in steps[:8]:
            engine.step(rows)
        with pytest.raises(RuntimeError, match="can't start"):
            engine.step(steps[8])
        patch.undo()
        np.testing.assert_array_equal(engine.step(steps[8], want_logits=True).logits[-1], want.logits[0])


def test_a_reopened_slot_has_no_segments_of_its_previous_request(artifacts: list[Artifact]) -> None:
    talk = Talk(0, CONFIG, "csattn", token_ids(90, seed=3).tolist(), 3)
    with make_engine(artifacts[:1]) as engine:
        want = alone(engine, talk)
        alone(engine, Talk(0, CONFIG, "csattn", token_ids(80, seed=4).tolist(), 1))  # leaves a segment unfinished
        assert_same(alone(engine, talk), want)


def test_building_a_segment_is_spread_over_the_rows_before_it_is_read() -> None:
    """No step waits for a whole segment, and requests that grow at the same time take turns."""
    num_layers, made = 6, list[tuple[int, int]]()
    tails = torch.randn(num_layers, 2, 300, 2, 16, generator=torch.Generator().manual_seed(0))
    with ThreadPoolExecutor(1) as executor:

        def own_segments(request_slot: int) -> OwnSegments:
            def rows(start: int, stop: int) -> Iterator[Tensor]:
                for layer in tails:
                    made.append((request_slot, tail_len))
                    yield layer[:, start:stop]

            growth = Growth(segment_len=64, least_near=48)
            return OwnSegments(request_slot, num_layers, rows, CONFIG, SketchConfig(), growth, executor)

        requests = [own_segments(request_slot) for request_slot in range(2)]
        for tail_len in range(1, 64 + 48 + 1):
            for request in requests:
                request.grow(tail_len)
            executor.submit(int).result()
        before_read = list(made)
        together = requests[0].sketches(1), requests[1].sketches(1)
        at_once = own_segments(2)
        at_once.grow(tail_len := 200)
        at_once.finish()
        assert len(made) - len(before_read) == 3 * num_layers
        wanted = at_once.sketches(3)
    assert [at for request_slot, at in before_read if request_slot == 0] == [64, 68, 72, 76, 80, 84]
    assert len(set(before_read)) == 2 * num_layers and before_read[-1][1] <= 64 + 24
    assert not {at for request_slot, at in before_read if request_slot == 0} & {
        at for request_slot, at in before_read if request_slot == 1
    }
    for sketches in together:
        for sketch, whole in zip(sketches, wanted, strict=True):
            np.testing.assert_array_equal(sketch.codes, whole.codes[:, :1])


def test_close_waits_for_the_layer_being_built_and_builds_no_other() -> None:
    """After that, the rows may be overwritten."""
    under_way, may_go_on, read = threading.Event(), threading.Event(), list[int]()

    def rows(start: int, stop: int) -> Iterator[Tensor]:
        for layer_idx in range(4):
            read.append(layer_idx)
            under_way.set()
            assert may_go_on.wait(timeout=30)
            yield torch.randn(2, stop - start, 2, 16)

    with ThreadPoolExecutor(1) as executor, ThreadPoolExecutor(1) as closing:
        own = OwnSegments(0, 4, rows, CONFIG, SketchConfig(), GROWTH, executor)
        own.grow(64 + 15)  # all four layers are due
        assert under_way.wait(timeout=30)
        closed = closing.submit(own.close)
        with pytest.raises(TimeoutError):
            closed.result(timeout=0.2)
        may_go_on.set()
        closed.result(timeout=30)
        assert read == [0]


def test_invalid_growth_and_too_large_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiples of 64 rows, got 100"):
        Growth(segment_len=100)
    with pytest.raises(ConfigError, match="at least one row"):
        Growth(least_near=0)
    with pytest.raises(ConfigError, match="up to 16 rows, got 17"):
        CpuEngine(loaded(), max_rows=17, growth=GROWTH)
